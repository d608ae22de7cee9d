# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Amp that does nothing."""

import contextlib


def initialize(models, optimizers, **options):
    return models, optimizers


@contextlib.contextmanager
def scale_loss(loss, optimizer, **options):
    yield loss


def master_params(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


disable_casts = contextlib.nullcontext


def state_dict():
    return {}


def load_state_dict(state):
    pass
