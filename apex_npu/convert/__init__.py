# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of apex, torch and this package: what is in them, and as which others they can be written.

``contents.parts_of`` finds the states in a checkpoint, ``conversion.convert`` translates them, ``files`` reads and
writes. Importing this module, and ``command``, needs no torch.
"""
