"""What the TPU kernel does with a tile of keys: masks from bits, stored rows to values, softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.precision import precision_of
from pallas_kernels.tree_attention.sources import FP8_GROUP
from pallas_kernels.words import WORD

LOWEST = -1e30
"""Score of a masked key: finite, and its weight underflows to zero beside any real score."""


class Softmax(NamedTuple):
    """References to a running softmax of `Q = nodes * H` query rows."""

    top: Any  # [Q, 1] float32 largest score so far
    total: Any  # [Q, 1] float32 sum of weights
    out: Any  # [1, Q, K] float32 weighted sum of keys

    def start(self, sink: Array) -> None:
        """The sink `[H, 1]` takes weight and gives no value."""
        nodes = self.top.shape[0] // sink.shape[0]
        every = jnp.broadcast_to(sink[None], (nodes, *sink.shape))
        self.top[...] = every.reshape(self.top.shape)
        self.total[...] = jnp.ones(self.total.shape, jnp.float32)
        self.out[...] = jnp.zeros(self.out.shape, jnp.float32)

    def add(self, q: Array, keys: Array, mask: Array) -> None:
        """Takes in keys `[T, K]` under a mask `[nodes, T]`; masked keys must be finite."""
        keys, mask = _at_least_a_tile(keys.astype(q.dtype), mask)
        rows, size, nodes = q.shape[0], *mask.shape[::-1]
        scores = _product(q, keys, 1) * q.shape[1] ** -0.5
        # Rows are node-major, so the heads of a node share a row of the mask.
        scores = scores.reshape(nodes, rows // nodes, size)
        scores = jnp.where(mask[:, None], scores, LOWEST).reshape(rows, size)
        top = jnp.maximum(self.top[...], scores.max(1, keepdims=True))
        weight = jnp.exp(scores - top)
        keep = jnp.exp(self.top[...] - top)
        self.top[...] = top
        self.total[...] = self.total[...] * keep + weight.sum(1, keepdims=True)
        self.out[0] = self.out[0] * keep + _product(weight.astype(q.dtype), keys, 0)

    def finish(self) -> None:
        """Leaves the mean of the keys in `out`."""
        self.out[0] = self.out[0] / self.total[...]


def _at_least_a_tile(keys: Array, mask: Array) -> tuple[Array, Array]:
    """A single key becomes one of eight: Mosaic's product over a single one does not compile."""
    if keys.shape[0] > 1:
        return keys, mask
    first = lax.broadcasted_iota(jnp.int32, (mask.shape[0], 8), 1) == 0
    return jnp.broadcast_to(keys, (8, keys.shape[1])), mask & first


def _product(x: Array, keys: Array, axis: int) -> Array:
    """Contracts the last axis of `x` with an axis of the keys, in float32."""
    return lax.dot_general(
        x,
        keys,
        (((1,), (axis,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=precision_of(x.dtype),
    )


def lanes(words: Array, size: int) -> Array:
    """Packed words `[M, >= ceil(size / 32)]` int32 to bool `[M, size]`, keys along lanes."""
    shape = words.shape[0], size
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    word = jnp.broadcast_to(words[:, :1], shape)
    for i in range(1, -(-size // WORD)):
        word = jnp.where(lane // WORD == i, words[:, i : i + 1], word)
    return lax.shift_right_logical(word, lane % WORD) & 1 == 1


def column(words: Sequence[Array], size: int) -> Array:
    """The bits of scalar words as a mask `[size, 1]`, keys along sublanes."""
    sublane = lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    word = jnp.full((size, 1), words[0], jnp.int32)
    for i in range(1, -(-size // WORD)):
        word = jnp.where(sublane // WORD == i, words[i], word)
    return lax.shift_right_logical(word, sublane % WORD) & 1 == 1


def below(count: Array, size: int, axis: int) -> Array:
    """Mask `[size, 1]` or `[1, size]` of the first `count` places along an axis."""
    shape = (size, 1) if axis == 0 else (1, size)
    return lax.broadcasted_iota(jnp.int32, shape, axis) < count


def ring_positions(length: Array, window: int) -> Array:
    """Positions `[1, W]` that the ring's slots hold; negative where nothing is."""
    newest = lax.rem(length + window - 1, window)  # its slot
    back = newest - lax.broadcasted_iota(jnp.int32, (1, window), 1)
    return length - 1 - jnp.where(back < 0, back + window, back)


def values(rows: Array, form: str, rotary: int) -> Array:
    """Keys `[T, K]` of a tile of entries as they are stored: `plain`, `words` or `bytes`."""
    if form == "words":
        low = lax.bitcast_convert_type(rows << 16, jnp.float32)
        high = lax.bitcast_convert_type(rows & jnp.uint32(0xFFFF0000), jnp.float32)
        return jnp.concatenate([low, high], axis=1).astype(jnp.bfloat16)
    return _from_bytes(rows, rotary) if form == "bytes" else rows


def _from_bytes(rows: Array, rotary: int) -> Array:
    """FP8 values times their scale; in the last lanes the rotary dims from their two bytes.

    A scale is the exponent field of a float32, moved to its place; `FP8_GROUP` values share one.
    """
    tail = min(rows.shape[1] // 2, 128)
    dim = rows.shape[1] - tail
    extra = rows[:, dim:].astype(jnp.int32)
    power = lax.bitcast_convert_type(extra << 23, jnp.float32)
    lane = lax.broadcasted_iota(jnp.int32, (rows.shape[0], dim), 1)
    scale = jnp.broadcast_to(power[:, :1], lane.shape)
    for i in range(1, -(-(dim - rotary) // FP8_GROUP)):
        scale = jnp.where(lane // FP8_GROUP == i, power[:, i : i + 1], scale)
    stored = lax.bitcast_convert_type(rows[:, :dim], jnp.float8_e4m3fn)
    scaled = stored.astype(jnp.float32) * scale
    low = rows[:, dim - tail : dim].astype(jnp.int32)
    turned = lax.bitcast_convert_type((extra << 24) | (low << 16), jnp.float32)
    last = jnp.where(lane[:, dim - tail :] < dim - rotary, scaled[:, dim - tail :], turned)
    if dim > tail:
        last = jnp.concatenate([scaled[:, : dim - tail], last], axis=1)
    return last.astype(jnp.bfloat16)


def keep_where(mask: Array, keys: Array) -> Array:
    """Keys `[T, K]` with those outside the mask `[T, 1]` set to zero, whatever they hold."""
    return jnp.where(mask, keys, jnp.zeros((), keys.dtype))
