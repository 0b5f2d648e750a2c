"""Fetches the entries that some node of a tile selects, a step ahead of their use.

The scalar core walks over the words of the union of the selections. For every place it finds it
begins one transfer and notes, in the lanes where the place's entries will be, the nodes' words of
selection and the bit in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention.tpu_plan import LANES, Walk
from pallas_kernels.words import WORD


class Cursor(NamedTuple):
    """Where the walk over the union's words stands."""

    found: Array  # places of this step
    word: Array  # the next word
    bits: Array  # bits left of the word before
    last: Array  # the last place found


class Fetch:
    """The transfers of one tile of nodes.

    Rows of 8 or 16 bits lie interleaved in 32-bit words, so words are moved: a row of words holds
    `pack` neighbouring entries. In interpretation the same entries are moved as they are, since the
    interpreter knows no transfer of a buffer under another type.
    """

    def __init__(
        self,
        walk: Walk,
        sources: Sequence[Any],
        count: Array,
        scratch: Sequence[Any],
        *,
        interpreted: bool,
    ) -> None:
        """Takes references.

        Args:
            walk: over the entries.
            sources: entries `[C, X]` in HBM, the union's words `[U]` in scalar memory and the
                nodes' words `[nodes, U']` in vector memory.
            count: committed entries.
            scratch: as `scratch` makes it.
            interpreted: whether the kernel is.
        """
        self.walk, self.count, self.interpreted = walk, count, interpreted
        self.entries, self.union, self.selected = sources
        self.buffer, self.words, self.bit, self.state, self.arrived = scratch

    @staticmethod
    def scratch(walk: Walk, nodes: int, entries: Array) -> list[Any]:
        """Two buffers of entries, of what selects them, the walk's state and semaphores."""
        return [
            pltpu.VMEM((2 * walk.size, entries.shape[-1]), entries.dtype),
            pltpu.VMEM((2, nodes, walk.size), jnp.int32),
            pltpu.VMEM((2, 1, walk.size), jnp.int32),
            pltpu.SMEM((7,), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
        ]

    def start(self, step: Array | int) -> None:
        """Begins to fetch what the walk finds next, as much as a step takes; step 0 starts it."""
        slot, state = lax.rem(jnp.int32(step), 2), self.state
        first = step == 0 if isinstance(step, int) else False
        at = Cursor(
            found=jnp.int32(0),
            word=jnp.int32(0) if first else state[0],
            bits=jnp.int32(0) if first else state[1],
            last=jnp.int32(0) if first else state[2],
        )
        end = lax.div(self.count + WORD - 1, WORD)
        at = lax.while_loop(
            lambda at: (at.found < self.walk.places) & ((at.word < end) | (at.bits != 0)),
            lambda at: lax.cond(at.bits == 0, self._next_word, lambda a: self._take(slot, a), at),
            at,
        )
        state[0], state[1], state[2] = at.word, at.bits, at.last
        state[3 + slot] = at.found
        # Only the very last place of all may reach beyond what is committed.
        beyond = jnp.maximum((at.last + 1) * self.walk.pack - self.count, 0)
        state[5 + slot] = jnp.where(at.found > 0, at.found * self.walk.pack - beyond, 0)

    def found(self, step: Array) -> Array:
        """Committed entries that a step fetched."""
        return self.state[5 + lax.rem(step, 2)]

    def wait(self, step: Array) -> Array:
        """A step's entries `[T, X]`; what was not fetched is arbitrary."""
        slot, size = lax.rem(step, 2), self.walk.size

        def body(i: Array, none: None) -> None:
            self._copy(slot, i, jnp.int32(0)).wait()

        lax.fori_loop(0, self.state[3 + slot], body, None)
        return self.buffer[pl.ds(pl.multiple_of(slot * size, size), size)]

    def mask(self, step: Array) -> Array:
        """Which nodes select a step's entries, `[nodes, T]`; arbitrary for what was not fetched."""
        slot = lax.rem(step, 2)
        return lax.shift_right_logical(self.words[slot], self.bit[slot] & (WORD - 1)) & 1 == 1

    def _next_word(self, at: Cursor) -> Cursor:
        return at._replace(word=at.word + 1, bits=self.union[at.word])

    def _take(self, slot: Array, at: Cursor) -> Cursor:
        pack, word = self.walk.pack, at.word - 1
        bit = WORD - 1 - lax.clz(at.bits & -at.bits)
        place = lax.div(word * WORD + bit, pack)
        self._copy(slot, at.found, place).start()
        lane = at.found * pack
        here = pl.ds(pl.multiple_of(lane // LANES * LANES, LANES), LANES)
        there = pl.ds(pl.multiple_of(word // LANES * LANES, LANES), LANES)
        shift = lax.rem(lane - word + (word // LANES + 1) * LANES, LANES)
        words = self.selected[:, there]
        # The lane of the word turns to the first lane of the place, then to its others.
        for sub in range(pack):
            turned = pltpu.roll(words, lax.rem(shift + sub, LANES), 1)
            mine = lax.broadcasted_iota(jnp.int32, words.shape, 1) == lax.rem(lane, LANES) + sub
            self.words[slot, :, here] = jnp.where(mine, turned, self.words[slot, :, here])
            self.bit[slot, :, here] = jnp.where(mine[:1], bit + sub, self.bit[slot, :, here])
        return Cursor(at.found + 1, at.word, at.bits & (at.bits - 1), place)

    def _copy(self, slot: Array, index: Array, place: Array) -> Any:
        into = self._at(self.buffer, slot * self.walk.places + index)
        return pltpu.make_async_copy(self._at(self.entries, place), into, self.arrived.at[slot])

    def _at(self, ref: Any, place: Array) -> Any:
        pack = self.walk.pack
        if self.interpreted or pack == 1:
            return ref.at[pl.ds(place * pack, pack)]
        return ref.bitcast(jnp.uint32).at[pl.ds(place, 1)]
