"""Blocks of a cluster in NumPy, for code that reads and writes its peers' shared memory.

The interpreter of GPU kernels knows no distributed shared memory. What a cluster does on a device
is run here as plain Python, with NumPy for jnp, on references that do.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np


class Memory:
    """A reference to shared memory that every block of a cluster has at the same address."""

    def __init__(self, blocks: np.ndarray, block: int, *places: Any) -> None:
        self.blocks, self.block, self.places = blocks, block, places

    @property
    def at(self) -> _At:
        """What makes references to parts."""
        return _At(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what is referred to."""
        return self._view().shape

    def peer(self, block: int) -> Memory:
        """The same place in another block's memory."""
        return Memory(self.blocks, block, *self.places)

    def __getitem__(self, place: Any) -> np.ndarray:
        return np.array(self._view()[place])  # a copy, since memory changes

    def __setitem__(self, place: Any, value: Any) -> None:
        self._view()[place] = value

    def _view(self) -> np.ndarray:
        view = self.blocks[self.block]
        for place in self.places:
            view = view[place]
        return view


class _At:
    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __getitem__(self, place: Any) -> Memory:
        memory = self.memory
        return Memory(memory.blocks, memory.block, *memory.places, place)


def pallas() -> SimpleNamespace:
    """`pl` of code that runs as Python."""

    def loop(start: int, stop: int) -> Callable[[Callable[..., None]], None]:
        return lambda body: [body(i) for i in range(start, stop)] and None

    def when(condition: Any) -> Callable[[Callable[[], None]], None]:
        return lambda body: body() if condition else None

    def ds(start: int, size: int) -> slice:
        return slice(start, start + size)

    return SimpleNamespace(loop=loop, when=when, ds=ds)


def mosaic_gpu(axis: str) -> SimpleNamespace:
    """`plgpu` of code that runs as Python, in a cluster of one axis.

    Layouts mean nothing, and an iota has one axis.
    """
    return SimpleNamespace(
        layout_cast=lambda x, _: x,
        cluster_ref=lambda ref, peer: ref.peer(peer[axis]),
        broadcasted_iota=lambda dtype, shape, _, *, layout: np.arange(shape[0], dtype=dtype),
    )
