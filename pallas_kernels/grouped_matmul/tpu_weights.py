"""Products with a tile of one expert's weights, packed ones dequantised on the way (Mosaic TPU).

A product runs over chunks of the weights' rows, its outputs, so that little is unpacked at a time.
Everything that is unpacked is exact: a value of e4m3 or e2m1 times a power of two fits bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.packed import FP4_GROUP, FP8_BLOCK
from pallas_kernels.precision import precision_of

CHUNK = 128  # outputs whose weights are unpacked at a time


class WeightTile(NamedTuple):
    """Refs of a tile of one expert's weights, and where it starts."""

    value: Any  # [1, R, in]; e2m1 holds two inputs in a byte
    scale: Any  # [1, ...] e8m0, or None
    turned: bool = False  # scales of e2m1 have all rows in their lanes; else the tile's in sublanes
    row: Any = 0
    column: Any = 0

    @property
    def kind(self) -> str:
        """`plain`, `fp8` or `fp4`."""
        if self.scale is None:
            return "plain"
        return "fp4" if self.value.dtype == jnp.uint8 else "fp8"


def multiply(x: Array, w: WeightTile, store: Callable[[Any, Array], None]) -> None:
    """`x [M, in]` times the tile's transpose, handed to `store(first column, [M, n])` in parts.

    For FP4 the columns of `x` are even ones first, then odd ones.
    """
    rows = w.value.shape[1]
    if w.kind == "plain":
        store(0, _dot(x, w.value[0].astype(x.dtype)))
        return
    size = CHUNK if rows % CHUNK == 0 else rows
    unpack = _fp8_chunks(w, size) if w.kind == "fp8" else _fp4_chunks(w, size)
    half = x.shape[1] // 2

    def visit(i: Any, _: None) -> None:
        first = pl.multiple_of(i * size, size)
        parts = unpack(first)
        if len(parts) == 1:
            y = _dot(x, parts[0].astype(x.dtype))
        else:
            even, odd = (part.astype(x.dtype) for part in parts)
            y = _dot(x[:, :half], even) + _dot(x[:, half:], odd)
        store(first, y)

    lax.fori_loop(0, rows // size, visit, None)


def split_parity(x: Array) -> Array:
    """The columns of `x [M, n]`, even ones first: as products with FP4 want them.

    Mosaic has no strided access to lanes. A product with a permutation is exact in bfloat16; for
    float32 the highest precision is.
    """
    columns = x.shape[1]
    source, goal = (lax.broadcasted_iota(jnp.int32, (columns, columns), axis) for axis in (0, 1))
    half = columns // 2
    moved = source == jnp.where(goal < half, 2 * goal, 2 * (goal - half) + 1)
    return lax.dot(
        x,
        moved.astype(x.dtype),
        precision=precision_of(x.dtype),
        preferred_element_type=jnp.float32,
    ).astype(x.dtype)


def _dot(x: Array, w: Array) -> Array:
    return lax.dot_general(
        x,
        w,
        (((1,), (1,)), ((), ())),
        precision=precision_of(x.dtype),
        preferred_element_type=jnp.float32,
    )


def _fp8_chunks(w: WeightTile, size: int) -> Callable[[Any], list[Array]]:
    """Unpacks chunks of `size` rows in e4m3, given the first row in the tile."""
    scale = w.scale[0]
    columns = w.value.shape[2]
    spread = _belongs((scale.shape[1], columns), 0, w.column, FP8_BLOCK)
    wide = _sum_of_one(scale, spread)

    def unpack(first: Any) -> list[Array]:
        rows = _belongs((size, wide.shape[0]), 1, w.row + first, FP8_BLOCK)
        value = w.value[0, pl.ds(first, size)].astype(jnp.float32)
        return [value * _sum_of_one(rows, wide)]

    return unpack


def _fp4_chunks(w: WeightTile, size: int) -> Callable[[Any], list[Array]]:
    """Unpacks chunks of `size` rows in e2m1, even and odd inputs apart."""
    groups, pairs = w.scale.shape[1 if w.turned else 2], w.value.shape[2]
    spread = _belongs((groups, pairs), 0, w.column // 2, FP4_GROUP // 2)

    def unpack(first: Any) -> list[Array]:
        rows = pl.ds(first, size)
        if w.turned:
            lanes = pl.ds(pl.multiple_of(w.row + first, size), size)
            scale = _sum_of_one(w.scale[0, :, lanes], spread, axis=0)
        else:
            scale = _sum_of_one(w.scale[0, rows], spread)
        code = w.value[0, rows].astype(jnp.int32)
        return [_e2m1(code & 15) * scale, _e2m1(code >> 4) * scale]

    return unpack


def _e2m1(code: Array) -> Array:
    """Values of four-bit codes in int32.

    Exponent and mantissa move to those of float32. The codes 0 and 1 have no leading one: as they
    stand they would be 0.5 and 0.75, and are 0 and 0.5.
    """
    size = code & 7
    value = pltpu.bitcast((size << 22) + (126 << 23), jnp.float32)
    value = jnp.where(size < 2, 2 * value - 1, value)
    return jnp.where(code >= 8, -value, value)


def _belongs(shape: tuple[int, int], axis: int, first: Any, size: int) -> Array:
    """One where the index along `axis` is the group of `size` that the other index lies in.

    The other index counts from `first` on.
    """
    group, place = (lax.broadcasted_iota(jnp.int32, shape, a) for a in (axis, 1 - axis))
    return jnp.where(group == (first + place) // size, 1.0, 0.0).astype(jnp.bfloat16)


def _sum_of_one(a: Array, b: Array, axis: int = 1) -> Array:
    """Product over `axis` of `a` and the first of `b`, in float32.

    Every sum has one term that is not 0, a power of two, so bfloat16 is exact.
    """
    over = (((axis,), (0,)), ((), ()))
    a, b = (x.astype(jnp.float32).astype(jnp.bfloat16) for x in (a, b))
    return lax.dot_general(a, b, over, preferred_element_type=jnp.float32)
