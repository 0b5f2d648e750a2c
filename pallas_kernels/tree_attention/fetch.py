"""Fetches listed entries from HBM, one transfer a place, a step ahead of their use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention.plan import Walk


class Fetch:
    """The transfers of one tile of nodes.

    Rows of 8 or 16 bits lie interleaved in 32-bit words, so words are moved: a row of words holds
    `pack` neighbouring entries. In interpretation the same entries are moved as they are, since the
    interpreter knows no transfer of a buffer under another type.
    """

    interpreted = False

    def __init__(
        self, walk: Walk, entries: Any, place: Any, used: Array, buffers: Sequence[Any]
    ) -> None:
        """Takes references: entries `[C, X]` in HBM, places `[U]`, of which `used` are meant."""
        self.walk, self.source, self.place, self.used = walk, entries, place, used
        self.buffer, self.arrived = buffers

    @staticmethod
    def scratch(walk: Walk, entries: Array) -> list[Any]:
        """Two buffers and their semaphores."""
        buffer = pltpu.VMEM((2 * walk.size, entries.shape[-1]), entries.dtype)
        return [buffer, pltpu.SemaphoreType.DMA((2,))]

    def start(self, step: Array | int) -> None:
        """Begins to fetch a step's places, none beyond the last."""
        self._each(step, lambda copy: copy.start())

    def wait(self, step: Array) -> Array:
        """A step's entries `[T, X]`; what was not fetched is arbitrary."""
        self._each(step, lambda copy: copy.wait())
        size = self.walk.size
        return self.buffer[pl.ds(pl.multiple_of(lax.rem(step, 2) * size, size), size)]

    def entries(self, count: Array) -> Array:
        """Entries of all steps that are committed: only the last place may reach beyond them."""
        last = self.place[jnp.maximum(self.used - 1, 0)]
        beyond = jnp.maximum((last + 1) * self.walk.pack - count, 0)
        return jnp.where(self.used > 0, self.used * self.walk.pack - beyond, 0)

    def _each(self, step: Array | int, act: Callable[[Any], None]) -> None:
        places, slot = self.walk.places, lax.rem(jnp.int32(step), 2)
        first = step * places

        def body(i: Array, none: None) -> None:
            source = self._at(self.source, self.place[first + i])
            act(
                pltpu.make_async_copy(
                    source, self._at(self.buffer, slot * places + i), self.arrived.at[slot]
                )
            )

        lax.fori_loop(0, jnp.clip(self.used - first, 0, places), body, None)

    def _at(self, ref: Any, place: Array) -> Any:
        pack = self.walk.pack
        if self.interpreted or pack == 1:
            return ref.at[pl.ds(place * pack, pack)]
        return ref.bitcast(jnp.uint32).at[pl.ds(place, 1)]
