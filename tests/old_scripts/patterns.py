# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""How public scripts use apex, pattern by pattern. Run as `python -m apex_npu run patterns.py NAME ...`."""

import argparse
import copy
import io
import math
import sys

import apex
import torch
from apex import amp
from apex.contrib.combine_tensors import combine_npu
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedLAMB
from torch import nn

try:
    from apex.parallel import DistributedDataParallel as DDP
    from apex.parallel import convert_syncbn_model

    has_apex = True
except ImportError:
    has_apex = False

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def fit(model, optimizer, steps=60, clip=None):
    for _ in range(steps):
        model.zero_grad()
        loss = nn.functional.mse_loss(model(X).float(), Y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        if clip is not None:
            clip(optimizer)
        optimizer.step()
    return loss.item()


def modelzoo():
    """Ascend's ModelZoo: arguments straight from argparse, combined gradients, a fused clip."""
    args = argparse.Namespace(opt_level="O2", loss_scale="128.0", lr=1e-2)
    model = net()
    optimizer = apex.optimizers.NpuFusedAdam(model.parameters(), lr=args.lr)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level=args.opt_level, loss_scale=args.loss_scale, combine_grad=True, verbosity=0
    )
    norms = []
    assert fit(model, optimizer, clip=lambda o: norms.append(o.clip_optimizer_grad_norm_fused(5.0))) < 0.2
    assert norms[0] > norms[-1] > 0
    assert amp._amp_state.opt_properties.options["loss_scale"] == 128.0


def timm():
    """The scaler object of timm, and its guard around state dicts."""

    class Scaler:
        state_dict_key = "amp"

        def __call__(self, loss, optimizer, max_norm):
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward(create_graph=False)
            nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)
            optimizer.step()

        def state_dict(self):
            if "state_dict" in amp.__dict__:
                return amp.state_dict()

        def load_state_dict(self, state_dict):
            if "load_state_dict" in amp.__dict__:
                amp.load_state_dict(state_dict)

    model, scaler = net(), Scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    first = nn.functional.mse_loss(model(X), Y).item()
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(X), Y)
        scaler(loss, optimizer, 1.0)
    assert loss.item() < 0.2 * first
    state = scaler.state_dict()
    assert state["loss_scaler0"]["unskipped"] == amp._amp_state.loss_scalers[0]._unskipped > 0
    scaler.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 7}})
    assert amp._amp_state.loss_scalers[0].loss_scale() == 4.0


def dcgan():
    """Two models, two optimizers, three losses, each with a scale of its own."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer_d = torch.optim.Adam(critic.parameters(), lr=1e-3)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=1e-3)
    [critic, generator], [optimizer_d, optimizer_g] = amp.initialize(
        [critic, generator], [optimizer_d, optimizer_g], opt_level="O1", num_losses=3, verbosity=0
    )
    criterion = nn.BCEWithLogitsLoss()
    ones = torch.ones(64, 1)
    before = copy.deepcopy([critic.state_dict(), generator.state_dict()])
    for _ in range(3):
        critic.zero_grad()
        with amp.scale_loss(criterion(critic(X), ones), optimizer_d, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        fake = generator(X[:, :2])
        with amp.scale_loss(criterion(critic(fake.detach()), 0 * ones), optimizer_d, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        optimizer_d.step()
        generator.zero_grad()
        with amp.scale_loss(criterion(critic(fake), ones), optimizer_g, loss_id=2) as scaled_loss:
            scaled_loss.backward()
        optimizer_g.step()
    assert all(entry["unskipped"] == 3 or entry["loss_scale"] < 2.0**16 for entry in amp.state_dict().values())
    for now, then in zip([critic.state_dict(), generator.state_dict()], before, strict=True):
        assert not any(torch.equal(now[name], then[name]) for name in now)


def private_scales():
    """Scripts that clamp or reset the loss scale themselves."""
    model = net()
    optimizer = apex.optimizers.NpuFusedSGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", verbosity=0)
    for loss_scaler in amp._amp_state.loss_scalers:
        loss_scaler._loss_scale = min(loss_scaler._loss_scale, 2.0**10)
    fit(model, optimizer, steps=2)
    assert amp._amp_state.loss_scalers[0]._loss_scale == 2.0**10
    with amp.disable_casts():
        pass


def bert():
    """NVIDIA's BERT: FusedLAMB, FusedLayerNorm, groups without decay, masters in the checkpoint."""

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), FusedLayerNorm(16, eps=1e-12), nn.Linear(16, 1))
        decay = [p for name, p in model.named_parameters() if "bias" not in name]
        rest = [p for name, p in model.named_parameters() if "bias" in name]
        groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        return amp.initialize(model, FusedLAMB(groups, lr=1e-2), opt_level="O2", loss_scale=128, verbosity=0)

    model, optimizer = make()
    fit(model, optimizer, steps=5)
    file = io.BytesIO()
    state = {"optimizer": optimizer.state_dict(), "master params": list(amp.master_params(optimizer))}
    torch.save({**state, "model": {name: value.half() for name, value in model.state_dict().items()}}, file)
    expected = fit(model, optimizer, steps=5)

    file.seek(0)
    checkpoint = torch.load(file, weights_only=False)
    model, optimizer = make()
    model.load_state_dict(checkpoint["model"], strict=False)
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(checkpoint["optimizer"])
    for param, saved_param in zip(amp.master_params(optimizer), checkpoint["master params"], strict=True):
        param.data.copy_(saved_param.data)
    # The parameters of the list have been saved in 16 bits.
    assert math.isclose(fit(model, optimizer, steps=5), expected, rel_tol=2e-2)


def moving_average():
    """An EMA over all weights in one tensor."""
    model = net()
    ema = copy.deepcopy(model)
    optimizer = apex.optimizers.NpuFusedSGD(model.parameters(), lr=0.05)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128, combine_grad=True, verbosity=0)
    fit(model, optimizer, steps=1)
    # In the optimizer's buffer the weights have the layout of one that is made for the copy alone: the same slots.
    flat_ema = combine_npu([p.data for p in ema.parameters()])
    flat_model = optimizer.get_optimizer_combined_params()[0]
    before = [p.clone() for p in ema.parameters()]
    flat_ema.mul_(0.9).add_(flat_model, alpha=0.1)
    for average, old, new in zip(ema.parameters(), before, model.parameters(), strict=True):
        torch.testing.assert_close(average, 0.9 * old + 0.1 * new)


def imagenet():
    """Batch norms converted, and the model wrapped after initialize; one process."""
    assert has_apex
    model = convert_syncbn_model(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = amp.initialize(
        model, optimizer, opt_level="O2", keep_batchnorm_fp32="True", loss_scale=None, verbosity=0
    )
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = DDP(model, delay_allreduce=True)
    loss = fit(model, optimizer)
    torch.distributed.destroy_process_group()
    assert loss < 0.2
    assert all(name.startswith("module.") and v.dtype != torch.float16 for name, v in model.state_dict().items())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
        print(name)
