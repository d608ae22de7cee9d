# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Scripts that import ``apex`` on the simulated device, and the names that public scripts use there."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, torch, torch_npu
from apex import amp

def train(rank):
    model = torch.nn.Linear(3, 1).npu()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    print(f"rank {rank} has {model.weight.dtype} on {model.weight.device} with {sys.argv[1:]}", flush=True)

if __name__ == "__main__":
    train(0) if "--alone" in sys.argv else torch.multiprocessing.spawn(train, nprocs=2)
"""
ORDERS = {
    "simulator first": ["-m", "npu_simulator", "-m", "apex_npu", "run"],
    "apex first": ["-m", "apex_npu", "run", "-m", "npu_simulator"],
}


def run(folder, text, *command, arguments=()):
    """What a script prints."""
    script = folder / "script.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *command, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_script_that_says_apex_runs(order, tmp_path):
    printed = run(tmp_path, SCRIPT, *ORDERS[order], arguments=["--alone"])
    assert "rank 0 has torch.float16 on npu:0 with ['--alone']" in printed


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_the_children_that_a_script_spawns_run(order, tmp_path):
    printed = run(tmp_path, SCRIPT, *ORDERS[order])
    for rank in (0, 1):
        assert f"rank {rank} has torch.float16 on npu:0" in printed


SCRIPTED = """
import torch, torch_npu
from torch_npu.contrib import transfer_to_npu

def count(x: torch.Tensor):
    return x + torch.arange(3, device=x.device)

print(torch.jit.script(count)(torch.ones(3).npu()).tolist())
"""


@pytest.mark.slow
def test_functions_are_scripted_after_transfer_to_npu(tmp_path):
    assert "[1.0, 2.0, 3.0]" in run(tmp_path, SCRIPTED, "-m", "npu_simulator")


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


X, Y = rand(2, 3, 4), rand(2, 4, 5)
# For each operator: arguments, and torch's error.
OPERATORS = {
    "npu_linear": ((X[0], Y[0].T, rand(5)), nn.functional.linear),
    "fast_gelu": ((X,), lambda x: x * torch.sigmoid(1.702 * x)),
    "npu_fast_gelu": ((X,), lambda x: x * torch.sigmoid(1.702 * x)),
    "npu_confusion_transpose": (
        (X, (0, 2, 1), (2, 12), True),
        lambda x, order, shape, first: x.permute(order).reshape(shape),
    ),
    "npu_bmmV2": ((X, Y, []), lambda x, y, _: x @ y),
    "npu_softmax_cross_entropy_with_logits": (
        (X[0], Y[0][:3, :4].softmax(1)),
        lambda x, targets: nn.functional.cross_entropy(x, targets, reduction="none"),
    ),
    "npu_one_hot": (
        (torch.tensor([0, 2, 1], dtype=torch.int32), -1, 4),
        lambda x, _, depth: nn.functional.one_hot(x.long(), depth).float(),
    ),
}


# ------------------------------------------------------------------------------- gradients, other arguments, refusals


def evaluate(function, device, *tensors):
    """The result, and the gradients of the floating point ``tensors``, on the host."""
    leaves = [t.clone().to(device).requires_grad_(t.is_floating_point()) for t in tensors]
    result = function(*leaves)
    grads = torch.autograd.grad(result.float().square().sum(), [leaf for leaf in leaves if leaf.requires_grad])
    return [t.detach().cpu() for t in (result, *grads)]


def targets(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape) % 3


INDEXED = {
    "cross_entropy 2d": (nn.functional.cross_entropy, (4, 5, 3), (4, 3)),
    "nll_loss": (nn.functional.nll_loss, (4, 5), (4,)),
    "label_smoothing": (
        lambda x, i: nn.functional.cross_entropy(x, i, label_smoothing=0.1, ignore_index=1), (4, 5), (4,)),
    "gather": (lambda x, i: x.gather(1, i), (4, 5), (4, 2)),
    "scatter": (lambda x, i: torch.zeros(4, 5, device=x.device).scatter(1, i, x), (4, 2), (4, 2)),
    "scatter_add": (lambda x, i: torch.zeros(4, 5, device=x.device).scatter_add(1, i, x), (4, 2), (4, 2)),
    "index_select": (lambda x, i: x.index_select(1, i), (4, 5), (3,)),
    "index": (lambda x, i: x[i], (4, 5), (3,)),
    "embedding": (lambda x, i: nn.functional.embedding(i, x), (4, 5), (2, 3)),
}  # fmt: skip


@pytest.mark.parametrize(("function", "shape", "index"), INDEXED.values(), ids=INDEXED)
def test_indices_in_int32(function, shape, index):
    x, indices = rand(*shape), targets(*index)
    found = evaluate(function, "npu", x, indices.int())
    torch.testing.assert_close(found, evaluate(function, "cpu", x, indices))


WITH_BIAS = {
    "linear": (nn.functional.linear, (4, 5), (3, 5)),
    "linear of 3 dimensions": (nn.functional.linear, (2, 4, 5), (3, 5)),
    "conv1d": (nn.functional.conv1d, (2, 2, 4), (3, 2, 3)),
    "conv2d": (nn.functional.conv2d, (1, 2, 4, 4), (3, 2, 3, 3)),
    "conv2d, same": (lambda x, w, b: nn.functional.conv2d(x, w, b, padding="same"), (1, 2, 4, 4), (3, 2, 3, 3)),
    "conv2d without a batch": (nn.functional.conv2d, (2, 4, 4), (3, 2, 3, 3)),
    "conv3d": (nn.functional.conv3d, (1, 2, 3, 3, 3), (3, 2, 2, 2, 2)),
    "conv_transpose2d": (nn.functional.conv_transpose2d, (1, 2, 4, 4), (2, 3, 3, 3)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", WITH_BIAS)
def test_a_bias_in_float32_beside_halves(layer, dtype):
    function, x_shape, weight_shape = WITH_BIAS[layer]
    x, weight, bias = rand(*x_shape), rand(*weight_shape), rand(3)

    def of_halves(x, weight, bias):
        result = function(x.to(dtype), weight.to(dtype), bias)
        assert result.dtype == dtype
        return result

    found = evaluate(of_halves, "npu", x, weight, bias)
    expected = evaluate(lambda x, w, b: function(x.to(dtype).float(), w.to(dtype).float(), b), "cpu", x, weight, bias)
    atol = 1e-1 if dtype == torch.float16 else 1.0
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=atol, check_dtype=False)
    assert [t.dtype for t in found] == [dtype, *[torch.float32] * 3]
    with torch.inference_mode():
        again = of_halves(x.npu(), weight.npu(), bias.npu())
    torch.testing.assert_close(again.cpu(), found[0])


def torch_npu():
    return importlib.import_module("torch_npu")


@pytest.mark.parametrize("name", ["npu_linear", "fast_gelu", "npu_fast_gelu", "npu_confusion_transpose", "npu_bmmV2"])
def test_gradients_of_these_operators(name):
    arguments, expected = OPERATORS[name]
    count = sum(isinstance(a, torch.Tensor) for a in arguments)
    tensors, rest = arguments[:count], arguments[count:]
    found = evaluate(lambda *t: getattr(torch_npu(), name)(*t, *rest), "npu", *tensors)
    torch.testing.assert_close(found, evaluate(lambda *t: expected(*t, *rest), "cpu", *tensors))


def test_the_gradient_of_the_softmax_cross_entropy_is_that_of_the_features():
    x, labels = X[0], Y[0][:3, :4].softmax(1)
    x_npu = x.npu().requires_grad_()
    loss = torch_npu().npu_softmax_cross_entropy_with_logits(x_npu, labels.npu())
    expected = nn.functional.cross_entropy(x, labels, reduction="none")
    torch.testing.assert_close(loss.detach().cpu(), expected)
    (grad,) = torch.autograd.grad(loss.sum(), x_npu)
    torch.testing.assert_close(grad.cpu(), x.softmax(1) - labels)
    with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'labels'"):
        torch_npu().npu_softmax_cross_entropy_with_logits(x_npu, labels.npu().requires_grad_())


def test_other_arguments_of_these_operators():
    x = X.npu()
    reshaped = torch_npu().npu_confusion_transpose(x, (0, 2, 1, 3), (2, 3, 2, 2), False)
    assert torch.equal(reshaped.cpu(), X.reshape(2, 3, 2, 2).permute(0, 2, 1, 3))
    assert torch_npu().npu_bmmV2(x, Y.npu(), [6, 5]).shape == (6, 5)
    indices = torch.tensor([0, 2, -1, 5], dtype=torch.int32).npu()
    assert torch_npu().npu_one_hot(indices, depth=3, on_value=2.5, off_value=-1).tolist() == [
        [2.5, -1, -1],
        [-1, -1, 2.5],
        [-1, -1, -1],
        [-1, -1, -1],
    ]
    half = torch.full((3,), 40.0, dtype=torch.float16, device="npu")
    assert torch_npu().fast_gelu(half).tolist() == [40.0] * 3


@pytest.mark.parametrize("name", OPERATORS)
def test_these_operators_refuse_tensors_of_the_host(name):
    with pytest.raises(RuntimeError, match=f"{name}: .* npu, .* cpu"):
        getattr(torch_npu(), name)(*OPERATORS[name][0])


def call_bert_adam(var, grad, m, v, step_size=None, adam_mode=0, max_grad_norm=0.0):
    out = tuple(t.npu() for t in (var, m, v))
    found = torch_npu().npu_bert_apply_adam(
        0.1, 0.9, 0.99, 1e-6, grad.npu(), max_grad_norm, 0.0, 0.02, step_size, adam_mode, out=out
    )
    assert all(a is b for a, b in zip(found, out, strict=True))
    return [t.cpu() for t in found]


def test_a_step_of_bert_adam_without_bias_correction():
    var, grad, m, v = rand(5), rand(5) + 1, rand(5) + 2, rand(5).square()
    m1, v1 = 0.9 * m.double() + 0.1 * grad.double(), 0.99 * v.double() + 0.01 * grad.double() ** 2
    expected = var.double() - 0.1 * (m1 / (v1.sqrt() + 1e-6) + 0.02 * var.double())
    found = call_bert_adam(var, grad, m, v)
    torch.testing.assert_close(found, [expected.float(), m1.float(), v1.float()])


def test_a_step_of_bert_adam_with_a_step_size_is_that_of_adamw():
    """With the bias corrections in the step size, and an epsilon that does not count."""
    var, grad = rand(5), rand(5) + 1
    param = nn.Parameter(var.clone())
    param.grad = grad.clone()
    torch.optim.AdamW([param], lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.02).step()
    step_size = 0.1 * (1 - 0.99) ** 0.5 / (1 - 0.9)
    found = call_bert_adam(var, grad, torch.zeros(5), torch.zeros(5), step_size, adam_mode=1)
    torch.testing.assert_close(found[0], param.detach(), rtol=1e-4, atol=1e-5)


def test_what_a_step_of_bert_adam_does_not_do():
    with pytest.raises(NotImplementedError, match="max_grad_norm"):
        call_bert_adam(*[rand(5)] * 4, max_grad_norm=1.0)
    with pytest.raises(RuntimeError, match="takes a step_size"):
        call_bert_adam(*[rand(5)] * 4, adam_mode=1)
    with pytest.raises(RuntimeError, match="got one on cpu"):
        torch_npu().npu_bert_apply_adam(0.1, 0.9, 0.99, 1e-6, X.npu(), 0, 0, 0, out=(X, X.npu(), X.npu()))


def test_names_of_torch_npu_in_torch():
    x = torch.ones(64, 64).npu()
    assert nn.DropoutWithByteMask is importlib.import_module("torch_npu.contrib.module").DropoutWithByteMask
    assert torch.equal(nn.functional.dropout_with_byte_mask(x, 0.5, training=False), x)
    assert 0.4 < nn.functional.dropout_with_byte_mask(x).bool().float().mean().item() < 0.6
    with pytest.raises(ValueError, match="no-inplace"):
        nn.functional.dropout_with_byte_mask(x, inplace=True)


def test_operators_of_matrices_refuse_more_dimensions():
    for name, other in (("npu_linear", Y[0].T), ("npu_softmax_cross_entropy_with_logits", X)):
        with pytest.raises(RuntimeError, match=f"{name} .* 3 dimensions"):
            getattr(torch_npu(), name)(X.npu(), other.npu())


def test_dropout_of_these_layers():
    layers = importlib.import_module("torch_npu.contrib.module")
    assert importlib.import_module("torch_npu.contrib.module.ensemble_dropout").NpuPreGenDropout
    x = torch.ones(64, 64).npu()
    pre_generated = layers.NpuPreGenDropout(0.25)
    with pytest.raises(RuntimeError, match="enable_dropout_ensemble"):
        pre_generated(x)
    layers.NpuPreGenDropout.enable_dropout_ensemble(pre_generated)
    for layer in (layers.DropoutWithByteMask(0.25), pre_generated):
        y = layer(x).cpu()
        torch.testing.assert_close(y.unique(), torch.tensor([0.0, 1 / 0.75]))
        assert 0.9 < y.mean().item() < 1.1
        assert torch.equal(layer.eval()(x), x)
    with pytest.raises(ValueError, match="no-inplace"):
        layers.DropoutWithByteMask(0.25, inplace=True)(x)


@pytest.mark.slow
def test_spawned_processes_have_as_many_devices(tmp_path):
    text = (
        "import torch, torch_npu\n"
        + """
def count(rank):
    print(f"rank {rank} of {torch.npu.device_count()}", flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(count, nprocs=2)
"""
    )
    printed = run(tmp_path, text, "-m", "npu_simulator", "--devices", "3")
    assert sorted(printed.splitlines()) == ["rank 0 of 3", "rank 1 of 3"]
