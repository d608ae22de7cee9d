# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Norms under Apex's names, against their formulas in float64."""

import inspect

import pytest
import torch
from devices import DEVICE

from apex_npu import normalization
from apex_npu.normalization import FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm

SHAPES = [((4, 7), 7), ((3, 5, 6), (5, 6)), ((2, 41, 123), [123])]
TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3)}


def dims(x, shape):
    return tuple(range(x.dim() - (1 if isinstance(shape, int) else len(shape)), x.dim()))


def layer_norm(x, shape, eps, weight=1.0, bias=0.0):
    x = x.double()
    over = dims(x, shape)
    variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
    return (x - mean) / torch.sqrt(variance + eps) * weight + bias


def rms_norm(x, shape, eps, weight=1.0):
    x = x.double()
    return x / torch.sqrt((x * x).mean(dims(x, shape), keepdim=True) + eps) * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("size", "shape"), SHAPES, ids=str)
def test_layers_compute_their_formulas(size, shape, dtype):
    x = torch.randn(size, device=DEVICE).to(dtype)
    rtol, atol = TOLERANCE[dtype]
    for layer, formula in ((FusedLayerNorm, layer_norm), (FusedRMSNorm, rms_norm)):
        for affine in (True, False):
            norm = layer(shape, eps=1e-3, elementwise_affine=affine, memory_efficient=True).to(DEVICE, dtype)
            factors = []
            for p in norm.parameters():
                torch.nn.init.normal_(p)
                factors.append(p.detach().double())
            expected = formula(x, shape, 1e-3, *factors)
            torch.testing.assert_close(norm(x).double(), expected, rtol=rtol, atol=atol * 4)
            assert norm(x).dtype == dtype
            assert len(factors) == (0 if not affine else 2 if layer is FusedLayerNorm else 1)


@pytest.mark.parametrize("layer", [MixedFusedLayerNorm, MixedFusedRMSNorm])
@pytest.mark.parametrize(("weight", "input"), [(torch.float32, torch.float16), (torch.float16, torch.float32)])
def test_mixed_layers_answer_in_their_weights_dtype(layer, weight, input):
    norm = layer(7).to(DEVICE, weight)
    x = torch.randn(4, 7, device=DEVICE).to(input)
    formula = layer_norm if layer is MixedFusedLayerNorm else rms_norm
    assert norm(x).dtype == weight
    rtol, atol = TOLERANCE[weight]
    torch.testing.assert_close(norm(x).double(), formula(x, 7, 1e-5), rtol=rtol, atol=atol)


def test_mixed_layers_are_always_affine():
    with pytest.raises(RuntimeError, match=r"MixedFusedLayerNorm .*elementwise_affine=False"):
        MixedFusedLayerNorm(4, elementwise_affine=False)
    assert MixedFusedRMSNorm(4, elementwise_affine=True).weight.shape == (4,)
    with pytest.raises(TypeError, match="argument 'sequence_parallel'"):
        MixedFusedRMSNorm(4, sequence_parallel=True)


def test_functions_understand_both_orders_of_arguments():
    x, w, b = torch.randn(4, 7, device=DEVICE), torch.randn(7, device=DEVICE), torch.randn(7, device=DEVICE)
    expected = layer_norm(x, 7, 1e-6, w.double(), b.double()).float()
    for output in (
        normalization.fused_layer_norm_affine(x, w, b, 7),
        normalization.fused_layer_norm_affine(x, (7,), w, b),
        normalization.fused_layer_norm_affine(x, weight=w, bias=b, normalized_shape=[7], eps=1e-6),
        normalization.mixed_dtype_fused_layer_norm_affine(x, w, b, (7,)),
    ):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(normalization.fused_layer_norm(x, 7), layer_norm(x, 7, 1e-6).float())
    torch.testing.assert_close(normalization.fused_rms_norm(x, 7), rms_norm(x, 7, 1e-6).float())
    expected = rms_norm(x, 7, 1e-6, w.double()).float()
    for output in (
        normalization.fused_rms_norm_affine(x, w, 7),
        normalization.mixed_dtype_fused_rms_norm_affine(x, w, 7),
        normalization.manual_rms_norm(x, (7,), w, 1e-6),
    ):
        torch.testing.assert_close(output, expected)
    torch.testing.assert_close(normalization.manual_rms_norm(x, (7,), None, 1e-6), rms_norm(x, 7, 1e-6).float())
    half = x.half()  # Apex multiplies by the float32 root of the mean square
    torch.testing.assert_close(normalization.manual_rms_norm(half, (7,), None, 1e-6), rms_norm(half, 7, 1e-6).float())


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("affine", ["", "Affine", "AffineMixedDtypes"])
def test_the_functions_forward_has_apexs_arguments(norm, affine):
    function = getattr(normalization, f"Fused{norm}{affine}Function")
    weights = ["weight", "bias"][: 1 + (norm == "LayerNorm")] if affine else []
    # As Megatron-LM's norms ask, before they pass memory_efficient by position.
    arguments = inspect.getfullargspec(function.forward).args
    assert arguments == ["ctx", "input", *weights, "normalized_shape", "eps", "memory_efficient"]
    x, tensors = torch.randn(4, 7, device=DEVICE), [torch.randn(7, device=DEVICE) for _ in weights]
    x = x.bfloat16() if affine == "AffineMixedDtypes" else x
    formula = layer_norm if norm == "LayerNorm" else rms_norm
    expected = formula(x, 7, 1e-5, *(t.double() for t in tensors)).float()
    torch.testing.assert_close(function.apply(x, *tensors, torch.Size([7]), 1e-5, True), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(function.forward(None, x, *tensors, (7,), 1e-5), function.apply(x, *tensors, (7,), 1e-5))


def test_state_dicts_are_torchs():
    torch_norm = torch.nn.LayerNorm(5)
    norm = FusedLayerNorm(5)
    norm.load_state_dict(torch_norm.state_dict())
    torch_norm.load_state_dict(norm.state_dict())
    assert isinstance(norm, torch.nn.LayerNorm)
    assert FusedRMSNorm(5).state_dict().keys() == torch.nn.RMSNorm(5).state_dict().keys()


def test_no_multi_tensor_kernels_are_claimed():
    from apex_npu.multi_tensor_apply import multi_tensor_applier

    assert multi_tensor_applier.available is False
    with pytest.raises(RuntimeError, match="has no amp_C") as caught:
        multi_tensor_applier.check_avail()
    assert isinstance(caught.value.__cause__, ImportError)
    # An operator of the caller's own is called as amp_C's would be.
    seen = multi_tensor_applier(lambda *args: args, None, [[1]], 2.0)
    assert seen == (65536, None, [[1]], 2.0)
