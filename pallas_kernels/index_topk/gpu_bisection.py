"""The choice of the largest scores on Hopper, by bisecting their bits.

Finds the least order that is chosen, a digit of four bits at a time by counting the orders that
reach trial values, and among its equals the index up to which they are chosen, likewise. Warpgroups
that share a node count what they hold, and add up each other's counts (`gpu_exchange`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_topk.gpu_exchange import (
    HALF,
    LINES,
    MATRIX,
    ROW,
    TRIALS,
    Exchange,
)

WORD = 32
DIGIT = TRIALS.bit_length() - 1
"""Bits that one pass over the orders finds."""
EVERY = (1 << 31) - 1
"""An index that none reaches."""


class Orders(Protocol):
    """The orders of a node that a warpgroup looks at, by blocks of lines."""

    @property
    def blocks(self) -> Array:
        """How many blocks there are."""

    def block(self, i: Array) -> tuple[Array, Array]:
        """Orders `[64, M]` uint32, 0 in places that hold none, and their indices."""


class Chosen(NamedTuple):
    """What is chosen: greater orders, and equal ones of lower index, but none that is 0."""

    least: Array
    end: Array

    def words(self, orders: Array, index: Array) -> Array:
        """Bits `[64]` uint32 of `[64, 32]` orders: the lowest bit is a line's first."""
        chosen = (orders > self.least) | ((orders == self.least) & (index < self.end))
        chosen = chosen & (orders > jnp.uint32(0))
        column = plgpu.broadcasted_iota(jnp.int32, (LINES, WORD), 1, layout=MATRIX)
        return jnp.where(chosen, jnp.int32(1) << column, 0).sum(axis=1).astype(jnp.uint32)


def bisect(orders: Orders, exchange: Exchange, topk: int, places: int) -> Chosen:
    """The `topk` largest orders, all that are not 0 if they are fewer.

    Args:
        orders: what this warpgroup holds of them.
        exchange: with those that hold the others.
        topk: how many are chosen.
        places: an index that none reaches.
    """
    digits = 32 // DIGIT

    def refine(digit: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        least, above, reached = state
        shift = (32 - DIGIT * (digit + 1)).astype(jnp.uint32)
        trials = [least | (jnp.uint32(k) << shift) for k in range(1, TRIALS)]
        pairs = _count(orders, trials, lambda values, _, trial: values >= trial)
        counts = exchange.totals(pairs, digit)
        enough = counts >= topk
        digit_found = jnp.where(enough, 1, 0).sum().astype(jnp.uint32)
        above = jnp.maximum(above, jnp.where(enough, 0, counts).max())
        reached = jnp.maximum(reached, jnp.where(enough, -counts, -EVERY).max())
        return least | (digit_found << shift), above, reached

    # `reached` is minus the count of orders from the least chosen on: only a maximum is at hand.
    first = jnp.uint32(0), jnp.int32(0), jnp.int32(-EVERY)
    least, above, reached = lax.fori_loop(0, digits, refine, first)
    tied = (least > jnp.uint32(0)) & (-reached > topk)
    turn = digits
    if exchange.nodes > 1:
        tied = exchange.any_node(tied, jnp.int32(turn))
        turn += 1
    end = _end(orders, exchange, (least, topk - above, tied), (turn, places))
    return Chosen(least, end)


def _end(
    orders: Orders, exchange: Exchange, at: tuple[Array, Array, Array], static: tuple[int, int]
) -> Array:
    """The index up to which orders equal to the least are chosen; `EVERY` if no node is tied."""
    (least, room, tied), (turn, places) = at, static
    width = -(-places.bit_length() // DIGIT) * DIGIT

    def extend(digit: Array, end: Array) -> Array:
        shift = width - DIGIT * (digit + 1)
        trials = [end | (jnp.int32(k) << shift) for k in range(1, TRIALS)]
        pairs = _count(orders, trials, lambda x, index, trial: (x == least) & (index < trial))
        counts = exchange.totals(pairs, turn + digit)
        # The last place stands for no trial, and its count is 0.
        return end | ((jnp.where(counts <= room, 1, 0).sum() - 1) << shift)

    digits = jnp.where(tied, width // DIGIT, 0)
    end = lax.fori_loop(0, digits, extend, jnp.int32(0))
    return jnp.where(tied, end, EVERY)


def _count(
    orders: Orders, trials: list[Array], passes: Callable[[Array, Array, Array], Array]
) -> list[Array]:
    """By line how many orders pass a test of 15 trials, two counts of 16 bits a number."""

    def add(i: Array, counted: list[Array]) -> list[Array]:
        values, index = orders.block(i)
        passed = []
        for k, n in enumerate(counted):
            both = jnp.where(passes(values, index, trials[2 * k]), 1, 0)
            if 2 * k + 1 < len(trials):
                second = passes(values, index, trials[2 * k + 1])
                both = both + jnp.where(second, 1 << HALF, 0)
            passed.append(n + both.sum(axis=1))
        return passed

    zero = plgpu.layout_cast(jnp.full((LINES,), 0, jnp.int32), ROW)
    return lax.fori_loop(0, orders.blocks, add, [zero] * (TRIALS // 2))


def load(ref: Any, index: Any, layout: Any) -> Array:
    """Reads memory straight into the layout of a wgmma."""
    read: Any = plgpu.load
    if "idx" in inspect.signature(read).parameters:  # jax before 0.11
        return read(ref, index, layout=layout, optimized=False)
    return read(ref.at[index], layout=layout, optimized=False)


def store(ref: Any, index: Any, value: Array) -> None:
    """Writes memory straight from the layout of a wgmma."""
    write: Any = getattr(plgpu, "store", None)
    if write is None:  # jax before 0.11
        ref[index] = value
    else:
        write(ref.at[index], value, optimized=False)
