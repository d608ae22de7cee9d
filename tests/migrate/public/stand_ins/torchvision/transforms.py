# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Transforms, of which those that resize do nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


class Compose:
    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


class ToTensor:
    def __call__(self, image: Any) -> torch.Tensor:
        pixels = torch.from_numpy(np.array(image)).float() / 255
        return pixels[None] if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()


class Normalize:
    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        return (image - self.mean) / self.std


class _Same:
    def __init__(self, *arguments: Any) -> None:
        pass

    def __call__(self, image: Any) -> Any:
        return image


CenterCrop = RandomHorizontalFlip = RandomResizedCrop = Resize = _Same
