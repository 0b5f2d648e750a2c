"""The largest scores of a group of nodes, chosen in VMEM by counting (Mosaic TPU).

Nodes stand in groups of 8, the sublanes of a register. A chunk is 128 entries of a group, one
register of their orders; a span is 32 chunks, whose choices pack into one register of words. An
entry's place is 4096 span + 128 chunk + lane.

Mosaic has neither sort nor top-k nor running sums. So the least order that is chosen is found by
bisecting its bits: 32 counts. If more entries share it than have room, the place from which on
they are left out is bisected in the same way.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

GROUP = 8  # nodes
CHUNK = 128  # entries
SPAN = 32  # chunks
PLACES = CHUNK * SPAN
LEAST = -(2**31)  # the order of what is not there; every score lies above it


class Bound(NamedTuple):
    """What separates a node's chosen entries from the rest, each `[8, 128]` int32, lanes alike."""

    order: Array  # entries above it are chosen
    place: Array  # and those equal to it before this place


def lane() -> Array:
    """`[8, 128]`: the index of each lane."""
    return lax.broadcasted_iota(jnp.int32, (GROUP, CHUNK), 1)


def rising(scores: Array, there: Array) -> Array:
    """Integers that are ordered as float32 `scores` are; `LEAST` where an entry is not `there`."""
    bits = pltpu.bitcast(scores, jnp.int32)
    bits = jnp.where(scores == 0, 0, bits)  # -0 becomes 0, its equal
    return jnp.where(there, bits ^ ((bits >> 31) & (2**31 - 1)), LEAST)


def bisect(orders: Any, spans: Any, count: int) -> Bound:
    """The bound of each node's `count` largest; a node that sees fewer gets all of them.

    Args:
        orders: ref `[chunks, 8, 128]` int32.
        spans: how many spans hold orders, traced.
        count: entries to choose at most.
    """

    def refine(step: Any, least: Array) -> Array:
        # Bits rise as unsigned integers do; the sign turns them into ordered signed ones.
        trial = least | lax.shift_left(jnp.int32(1), 31 - step)
        enough = _count(orders, spans, lambda block, _: block >= (trial ^ LEAST)) >= count
        return jnp.where(enough, trial, least)

    zero = jnp.zeros((GROUP, CHUNK), jnp.int32)
    least = lax.fori_loop(0, 32, refine, zero) ^ LEAST
    crowded = _count(orders, spans, lambda block, _: block >= least) > count
    crowded = crowded & (least > LEAST)
    room = count - _count(orders, spans, lambda block, _: block > least)
    top = (orders.shape[0] * CHUNK).bit_length()

    def narrow(step: Any, place: Array) -> Array:
        trial = place | lax.shift_left(jnp.int32(1), top - 1 - step)
        fits = _count(orders, spans, lambda block, at: (block == least) & (at < trial)) <= room
        return jnp.where(fits, trial, place)

    # Nearly always there is room for all that share the least order: then no count is made.
    counts = jnp.where(jnp.max(crowded.astype(jnp.int32)) > 0, top, 0)
    place = lax.fori_loop(0, counts, narrow, zero)
    place = jnp.where(crowded, place, 2**31 - 1)
    return Bound(least, jnp.where(least > LEAST, place, 0))


def _count(orders: Any, spans: Any, test: Any) -> Array:
    """How many entries of each node pass `test(orders, places)`, in all lanes."""

    def add(span: Any, total: Array) -> Array:
        block = _span(orders, span)
        return total + jnp.where(test(block, _places(span)), 1, 0).sum(0)

    total = lax.fori_loop(0, spans, add, jnp.zeros((GROUP, CHUNK), jnp.int32))
    return jnp.broadcast_to(total.sum(1, keepdims=True), total.shape)


def _span(orders: Any, span: Any) -> Array:
    return orders[pl.ds(pl.multiple_of(span * SPAN, SPAN), SPAN)]


def _places(span: Any) -> Array:
    shape = (SPAN, GROUP, CHUNK)
    chunk, lanes = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 2))
    return span * PLACES + chunk * CHUNK + lanes


def pack_span(orders: Any, span: Any, bound: Bound) -> Array:
    """The choices in a span as words `[8, 128]`: bit i of lane w is entry 32 w + i.

    Each of five steps merges pairs of registers and of lanes, both 1, 2, 4, ... apart: lanes whose
    index lacks the step's bit come from the first register, the others from the second.
    """
    block = _span(orders, span)
    chosen = (block > bound.order) | ((block == bound.order) & (_places(span) < bound.place))
    own_bit = lax.shift_left(jnp.ones((GROUP, CHUNK), jnp.int32), lane() & 31)
    parts = [jnp.where(chosen[c], own_bit, 0) for c in range(SPAN)]
    for step in range(5):
        apart = 1 << step
        first = (lane() & apart) == 0
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [
            jnp.where(
                first,
                a | pltpu.roll(a, CHUNK - apart, 1),
                b | pltpu.roll(b, apart, 1),
            )
            for a, b in pairs
        ]
    # Now lane 32 k + c holds word k of chunk c, which is word 4 c + k of the span.
    source = (lane() & 3) * 32 + lane() // 4
    return jnp.take_along_axis(parts[0], source, axis=1)


def unpack_chunk(words: Array, chunk: int) -> Array:
    """The bits of a chunk of entries, `[8, 128]` bool, from words `[8, n]` int32."""
    spread = jnp.zeros((GROUP, CHUNK), jnp.int32)
    for k in range(4):
        column = 4 * chunk + k
        if column < words.shape[1]:
            spread = jnp.where(lane() // 32 == k, words[:, column : column + 1], spread)
    return (lax.shift_right_logical(spread, lane() & 31) & 1) == 1
