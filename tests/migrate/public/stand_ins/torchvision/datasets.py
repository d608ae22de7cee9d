# Copyright (c) 2026, the apex_npu authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small data sets, made up by their index."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image

_COUNT = 48
_SIDE = 32


class _Images(torch.utils.data.Dataset):
    def __init__(
        self, shape: tuple[int, int, int], classes: int, transform: Callable[[Any], Any] | None, count: int = _COUNT
    ) -> None:
        pixels = np.random.RandomState(classes).randint(0, 256, (count, *shape[1:], shape[0]), dtype=np.uint8)
        self._pixels = pixels[..., 0] if shape[0] == 1 else pixels
        self._transform = transform
        self.data = torch.from_numpy(self._pixels)
        self.targets = torch.arange(count) % classes

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = Image.fromarray(self._pixels[index])
        return image if self._transform is None else self._transform(image), int(self.targets[index])


class FakeData(_Images):
    def __init__(
        self,
        size: int = _COUNT,
        image_size: tuple[int, int, int] = (3, _SIDE, _SIDE),
        num_classes: int = 10,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        shape = (image_size[0], min(image_size[1], 64), min(image_size[2], 64))
        super().__init__(shape, num_classes, transform, min(size, _COUNT))


class MNIST(_Images):
    def __init__(
        self, root: str, train: bool = True, transform: Callable[[Any], Any] | None = None, download: bool = False
    ) -> None:
        super().__init__((1, 28, 28), 10, transform)


class ImageFolder(_Images):
    def __init__(self, root: str, transform: Callable[[Any], Any] | None = None) -> None:
        super().__init__((3, _SIDE, _SIDE), 10, transform)
