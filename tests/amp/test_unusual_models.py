# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models that share modules, list some of their parameters, or hold what low precision does not; failed conversions."""

import numpy as np
import pytest
import torch
from devices import DEVICE
from torch import nn
from torch.optim.swa_utils import AveragedModel

from apex_npu import amp, optimizers
from apex_npu.fp16_utils import convert_network

FUSED, PLAIN = optimizers.NpuFusedAdam, torch.optim.SGD
pytestmark = pytest.mark.device


def initialize(models, optimizer=None, level="O2", **options):
    return amp.initialize(models, optimizer, opt_level=level, verbosity=0, **options)


@pytest.mark.parametrize("bits", [None, "int8"])
@pytest.mark.parametrize("cls", [FUSED, PLAIN])
def test_a_second_initialize_that_fails_changes_no_bit(cls, bits):
    if bits and (cls is PLAIN or DEVICE.type == "npu"):
        pytest.skip("bytes of remainders are for fused optimizers on cpu and cuda")
    torch.manual_seed(0)
    model, too_large = nn.Linear(64, 64).to(DEVICE), nn.Linear(1, 1).to(DEVICE)
    initialize(model, cls(model.parameters(), lr=0.1), "O5", store_param_remainders=bits)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    places = [p.data_ptr() for p in model.parameters()]
    nn.init.constant_(too_large.weight, 3.4e38)
    with pytest.raises(RuntimeError, match="Nothing has been changed"):
        initialize([model, too_large], PLAIN(model.parameters(), lr=0.1), "O5")
    assert [p.data_ptr() for p in model.parameters()] == places
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])


@pytest.mark.parametrize("cls", [FUSED, PLAIN])
@pytest.mark.parametrize("twice", [True, False])
def test_models_with_common_modules_load_float32_values(cls, twice):
    common = nn.Linear(4, 4)
    models = [nn.Sequential(common, nn.Linear(4, 4)).to(DEVICE) for _ in range(2)]
    models = models[:1] * 2 if twice else models
    params = dict.fromkeys(p for model in models for p in model.parameters())
    initialize(models, cls(list(params), lr=0.1))
    for model in models:
        loaded = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
        model.load_state_dict(loaded)
        for name, value in model.state_dict().items():
            assert torch.equal(value, loaded[name])


class HeadAlone(nn.Module):
    """Lists the parameters of its head, but not those of its backbone."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def parameters(self, recurse=True):
        return self.head.parameters()

    def forward(self, x):
        return self.head(self.backbone(x))


@pytest.mark.parametrize("cls", [FUSED, PLAIN])
def test_a_model_may_list_some_of_its_parameters(cls):
    model = HeadAlone().to(DEVICE)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model, _ = initialize(model, cls(model.parameters(), lr=0.1))
    assert model(torch.ones(1, 4, device=DEVICE)).isfinite().all()
    for name, value in model.state_dict().items():
        assert torch.equal(value, values[name])


def shares(param, buffer):
    model = nn.Module()
    model.w = nn.Parameter(param)
    model.register_buffer("b", buffer)
    return model


def odd_addresses():
    data = np.zeros(64, dtype=np.uint8)
    first, second = (torch.from_numpy(data[at : at + 32].view(np.float32)) for at in (0, 2))
    return shares(first, second)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="memory that tensors of other dtypes share is made on the host")
@pytest.mark.parametrize(
    "make",
    [
        lambda: shares(w := torch.zeros(4, dtype=torch.complex64), w.imag),
        lambda: shares((w := torch.zeros(4)).view(torch.float64), w[1::2]),
        odd_addresses,
    ],
)
def test_tensors_that_share_parts_of_elements_are_refused(make):
    model = make()
    with pytest.raises(RuntimeError, match="share memory"):
        initialize(model)
    assert model.b.dtype == torch.float32


@pytest.mark.parametrize("cls", [FUSED, PLAIN])
def test_what_bfloat16_rounds_to_inf_is_kept_in_float32(cls):
    model = nn.Linear(2, 1).to(DEVICE)
    nn.init.constant_(model.weight, torch.finfo(torch.float32).max)
    model, optimizer = initialize(model, cls(model.parameters(), lr=0.0), "O5")
    if cls is PLAIN:
        with amp.float32_params(optimizer):
            assert (model.weight == torch.finfo(torch.float32).max).all()


@pytest.mark.parametrize("enabled", [np.bool_(True), 2, None, 0])
def test_enabled_is_true_or_false(enabled):
    model = nn.Linear(2, 1).to(DEVICE)
    initialize(model, PLAIN(model.parameters(), lr=0.1), enabled=enabled)
    assert model.weight.dtype == (torch.float16 if enabled else torch.float32)
    assert len(amp.state_dict()) == (1 if enabled else 0)


class OtherOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    def parameters(self, recurse=True):
        return iter([*self.b.parameters(), *self.a.parameters()])


class AverageInOrder(AveragedModel):
    def parameters(self, recurse=True):
        return self.module.parameters()


def test_an_average_reads_the_parameters_that_a_model_lists():
    model = initialize(OtherOrder().to(DEVICE), level="O1")
    average = AverageInOrder(model, avg_fn=lambda old, new, _: new)
    for _ in range(2):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        average.update_parameters(model)
    for p, value in zip(average.module.b.parameters(), model.b.parameters(), strict=True):
        assert torch.equal(p, value)


def test_a_copy_of_a_model_that_has_loaded_16_bit_values():
    model = initialize(nn.Linear(3, 3).to(DEVICE))
    model.load_state_dict({name: value.half().float() for name, value in model.state_dict().items()})
    copy = amp.float32_copy(model)
    assert copy.weight.dtype == torch.float32
    assert torch.equal(copy.weight, model.state_dict()["weight"])


def test_a_network_that_cannot_be_converted_stays_float32(monkeypatch):
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    to, left = torch.Tensor.to, [3]

    def out_of_memory(tensor, *args, **kwargs):
        left[0] -= 1
        if not left[0]:
            raise MemoryError
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", out_of_memory)
    with pytest.raises(MemoryError):
        convert_network(network, torch.float16)
    assert {p.dtype for p in network.parameters()} == {torch.float32}
