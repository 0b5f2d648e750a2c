"""The Hopper kernel of tree attention: 64 query rows against a list of tiles of keys.

A block of threads has two warpgroups. At each step each of them scores its own tile of 64 keys
(wgmma, Q K^T); they agree on the maxima of the rows and hand each other their weights through
shared memory; then each adds both tiles to its half of the output's columns (wgmma, P V). Keys are
values, so a tile is fetched once, by TMA, and refilled as soon as both have used it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.core import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = 64
"""Query rows of a block of threads, and keys of a tile: the rows of one wgmma."""
LOWEST = float(jnp.finfo(jnp.float32).min)
LOG2E = math.log2(math.e)
ALL_BITS = 0xFFFFFFFF
MATRIX = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)


class Shape(NamedTuple):
    """Static sizes of one call."""

    heads: int  # padded: a power of two up to 64, or a multiple of 64
    splits: int  # blocks of threads that share a list of tiles
    starts: tuple[int, ...]  # first tile of each source, then the number of tiles
    interpret: Any

    @property
    def last(self) -> int:
        """The number of tiles of all sources."""
        return self.starts[-1]


class Operands(NamedTuple):
    """Arrays, or references to them in global memory."""

    q: Any  # [B, R, K]: a row is a (node, head) pair
    sources: Sequence[Any]  # of keys, [B, M, K] each
    words: Any  # [B, nodes, 2 last] uint32: which keys of a tile a node sees
    valid: Any  # [B, 2 last] uint32: which keys of a tile hold anything
    tiles: Any  # [B R / 64, even] int32: the tiles that matter to 64 rows, then padding
    counts: Any  # [B R / 64] int32: how many these are
    sink: Any  # [max(heads, 64)] float32, repeated over the rows of a tile


class Results(NamedTuple):
    """Arrays, or references to them; the last two only where there are several splits."""

    out: Any  # [B, splits, R, K] float32
    top: Any  # [B, splits, R] float32: maxima of the scores, times log2(e)
    total: Any  # [B, splits, R] float32: sums of the weights


class Scratch(NamedTuple):
    """References to shared memory and barriers."""

    q: Any  # [1, 64, K]
    keys: Any  # [groups, 64, K]
    weights: Any  # [groups, 64, 64]
    rows: Any  # [groups, 64] float32
    sink: Any  # [64] float32
    q_ready: Any
    key_ready: Any
    rows_ready: Any
    weights_ready: Any
    keys_used: Any


class Softmax(NamedTuple):
    """The state of the online softmax of one warpgroup, in registers."""

    top: Array  # [64]: over the keys of both warpgroups
    total: Array  # [64]: over its own keys
    out: Array  # [64, its columns]


def warpgroups(width: int) -> int:
    """How many share a block of threads; each needs 64 columns of the output at the least."""
    return 2 if width % 128 == 0 else 1


def attend(operands: Operands, shape: Shape) -> Results:
    """Runs the kernel; what comes out is normalised, sink included, where `splits` is 1."""
    q = operands.q
    batch, rows, width = q.shape
    sources = len(operands.sources)
    groups = warpgroups(width)

    def kernel(q_ref: Any, *refs: Any) -> None:
        rest = refs[sources:]
        _block(
            Operands(q_ref, refs[:sources], *rest[:5]),
            Results(*rest[5:8]),
            Scratch(*rest[8:]),
            shape,
        )

    statistics = jax.ShapeDtypeStruct((batch, shape.splits, rows), jnp.float32)
    run = plgpu.kernel(
        kernel,
        out_type=[
            jax.ShapeDtypeStruct((batch, shape.splits, rows, width), jnp.float32),
            statistics,
            statistics,
        ],
        # The last axis runs fastest: blocks that share keys run side by side and find them in L2.
        grid=(shape.splits, batch, rows // TILE),
        grid_names=("split", "batch", "tile"),
        num_threads=groups,
        thread_name="group",
        scratch_types=_scratch(groups, width, q.dtype),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=LoweringSemantics.Lane
        ),
        interpret=shape.interpret,
    )
    return Results(*run(q, *operands.sources, *operands[2:]))


def _scratch(groups: int, width: int, dtype: Any) -> list[Any]:
    columns = 128 // jnp.dtype(dtype).itemsize
    swizzle = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))
    return [
        plgpu.SMEM((1, TILE, width), dtype, transforms=swizzle),
        plgpu.SMEM((groups, TILE, width), dtype, transforms=swizzle),
        plgpu.SMEM((groups, TILE, TILE), dtype, transforms=swizzle),
        plgpu.SMEM((groups, TILE), jnp.float32),
        plgpu.SMEM((TILE,), jnp.float32),
        plgpu.Barrier(num_arrivals=2),
        plgpu.Barrier(num_barriers=groups),
        plgpu.Barrier(num_arrivals=groups),
        plgpu.Barrier(num_arrivals=groups),
        plgpu.Barrier(num_arrivals=groups, num_barriers=groups),
    ]


class _Place(NamedTuple):
    """Where a warpgroup works: its part of the lists, and the references that it works on."""

    ref: Operands
    scratch: Scratch
    shape: Shape
    group: Array
    groups: int
    batch: Array
    row: Array  # its first query row
    line: Array  # of the list of tiles
    first: Array  # step of this split
    steps: Array  # of this split
    listed: Array  # tiles on the list

    def tile(self, step: Array, group: Any) -> Array:
        """The tile that a warpgroup has at a step."""
        return self.ref.tiles[self.line, step * self.groups + group]


def _block(ref: Operands, result: Results, scratch: Scratch, shape: Shape) -> None:
    split, batch, tile = (lax.axis_index(name) for name in ("split", "batch", "tile"))
    line = batch * (ref.q.shape[1] // TILE) + tile
    count, groups = ref.counts[line], warpgroups(ref.q.shape[2])
    steps = (count + groups - 1) // groups
    first = steps * split // shape.splits
    steps = steps * (split + 1) // shape.splits - first
    group, row = lax.axis_index("group"), tile * TILE
    at = _Place(ref, scratch, shape, group, groups, batch, row, line, first, steps, count)

    @pl.when(group == 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(ref.q.at[batch, pl.ds(row, TILE)], scratch.q.at[0], scratch.q_ready)
        sink = ref.sink.at[pl.ds(row % ref.sink.shape[0], TILE)]
        plgpu.copy_gmem_to_smem(sink, scratch.sink, scratch.q_ready)

        @pl.when(steps > 0)
        def _() -> None:
            for g in range(groups):
                _fetch(at, first, g)

    plgpu.barrier_wait(scratch.q_ready)
    columns = ref.q.shape[2] // groups
    state = Softmax(
        # Above LOWEST, so that a masked score weighs nothing even where a row sees no key yet.
        _full((TILE,), LOWEST / 2, ROW),
        _full((TILE,), 0.0, ROW),
        _full((TILE, columns), 0.0, MATRIX),
    )
    state = lax.fori_loop(first, first + steps, lambda i, state: _step(at, i, state), state)
    _finish(at, split, result, state)


def _full(shape: tuple[int, ...], value: float, layout: Any, dtype: Any = jnp.float32) -> Array:
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def _along(rows: Array, columns: int) -> Array:
    """A value for each row, `[64]`, to `[64, columns]`."""
    return lax.broadcast_in_dim(rows, (TILE, columns), (0,))


def _meet(barrier: Any, groups: int) -> None:
    """Waits until every warpgroup is here."""
    if groups > 1:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)


def _fetch(at: _Place, step: Array, group: int) -> None:
    """Starts the copy of a warpgroup's tile; rows beyond the source's end come as zeros."""
    tile = at.tile(step, group)
    for index, keys in enumerate(at.ref.sources):
        start, end = at.shape.starts[index : index + 2]

        @pl.when((tile >= start) & (tile < end))
        def _(keys: Any = keys, start: int = start) -> None:
            plgpu.copy_gmem_to_smem(
                keys.at[at.batch, pl.ds((tile - start) * TILE, TILE)],
                at.scratch.keys.at[group],
                at.scratch.key_ready.at[group],
            )


def _step(at: _Place, step: Array, state: Softmax) -> Softmax:
    """Both warpgroups' tiles of one step."""
    scratch, group, width = at.scratch, at.group, at.ref.q.shape[2]
    words = _seen(at, step)
    # Zero, which the compiler cannot know: or it would keep the descriptors of all operands of
    # wgmma in registers, a hundred of them, and spill the output.
    zero = jnp.where(at.tile(step, group) < 0, 1, 0)
    plgpu.barrier_wait(scratch.key_ready.at[group])
    _clear(at, step)

    def product(acc: Any) -> Array:
        plgpu.wgmma(acc, scratch.q.at[zero], scratch.keys.at[group + zero].transpose((1, 0)))
        return acc[...]

    scores = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32))
    scores = jnp.where(_bits(words, 1), scores * (LOG2E * width**-0.5), LOWEST)
    scratch.rows[group] = scores.max(axis=1)
    _meet(scratch.rows_ready, at.groups)
    top = state.top
    for g in range(at.groups):
        top = jnp.maximum(top, plgpu.layout_cast(scratch.rows[g], ROW))
    weights = jnp.exp2(scores - _along(top, TILE))
    kept = jnp.exp2(state.top - top)
    total = state.total * kept + weights.sum(axis=1)
    scratch.weights[group] = weights.astype(scratch.weights.dtype)
    plgpu.commit_smem()
    _meet(scratch.weights_ready, at.groups)
    out = state.out * _along(kept, width // at.groups)
    for g in range(at.groups):
        out = _add_product(at, g + zero, out)
        _refill(at, step, g)
    return Softmax(top, total, out)


def _add_product(at: _Place, tile: Array, out: Array) -> Array:
    """Adds the weighted sum of one tile's keys, this warpgroup's columns of it."""
    columns = out.shape[1]

    def product(acc: Any) -> None:
        values = at.scratch.keys.at[tile, :, pl.ds(at.group * columns, columns)]
        plgpu.wgmma(acc, at.scratch.weights.at[tile], values)

    if not at.shape.interpret:
        return pl.run_state(product)(plgpu.ACC.init(out))

    # The interpreter has no accumulator with a value: the same sum, from zero, then added.
    def alone(acc: Any) -> Array:
        product(acc)
        return acc[...]

    return out + pl.run_scoped(alone, plgpu.ACC((TILE, columns), jnp.float32))


def _refill(at: _Place, step: Array, group: int) -> None:
    """Fetches the next tile into a place that every warpgroup has used."""
    if at.groups > 1:
        plgpu.barrier_arrive(at.scratch.keys_used.at[group])

    @pl.when(at.group == 0)
    def _() -> None:
        if at.groups > 1:
            plgpu.barrier_wait(at.scratch.keys_used.at[group])

        @pl.when(step + 1 < at.first + at.steps)
        def _() -> None:
            _fetch(at, step + 1, group)


def _seen(at: _Place, step: Array) -> list[Array]:
    """The two words of the warpgroup's tile: scalars, or one for each of the 64 rows."""
    tile, heads = at.tile(step, at.group), at.shape.heads
    real = step * at.groups + at.group < at.listed  # else the tile is padding
    node = at.row // heads

    def word(index: Any, half: int) -> Array:
        seen = at.ref.words[at.batch, index, 2 * tile + half]
        return jnp.where(real, seen, jnp.uint32(0))

    if heads >= TILE:
        return [word(node, half) for half in range(2)]
    row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW)
    words = []
    for half in range(2):
        every = _full((TILE,), 0, ROW, jnp.uint32)
        for k in range(TILE // heads):
            every = jnp.where(row // heads == k, word(node + k, half), every)
        words.append(_along(every, TILE))
    return words


def _bits(words: list[Array], axis: int) -> Array:
    """Bit i of two words at place i of an axis of a matrix."""
    place = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), axis, layout=MATRIX)
    word = jnp.where(place < 32, words[0], words[1])
    return ((word >> (place & 31).astype(jnp.uint32)) & jnp.uint32(1)) == jnp.uint32(1)


def _clear(at: _Place, step: Array) -> None:
    """Zeroes the keys of the warpgroup's tile that hold nothing: zero times NaN is NaN."""
    tile = at.tile(step, at.group)
    words = [at.ref.valid[at.batch, 2 * tile + half] for half in range(2)]

    @pl.when((words[0] & words[1]) != jnp.uint32(ALL_BITS))
    def _() -> None:
        @pl.loop(0, at.ref.q.shape[2] // TILE)
        def _(column: Array) -> None:
            keys = at.scratch.keys.at[at.group, :, pl.ds(column * TILE, TILE)]
            held = plgpu.layout_cast(keys[...], MATRIX)
            keys[...] = jnp.where(_bits(words, 0), held, jnp.zeros_like(held))

        plgpu.commit_smem()


def _finish(at: _Place, split: Array, result: Results, state: Softmax) -> None:
    """Writes the output, normalised if this is the only split."""
    scratch, rows = at.scratch, pl.ds(at.row, TILE)
    top, total, out = state
    scratch.rows[at.group] = total
    _meet(scratch.rows_ready, at.groups)
    total = plgpu.layout_cast(scratch.rows[0], ROW)
    for g in range(1, at.groups):
        total = total + plgpu.layout_cast(scratch.rows[g], ROW)
    columns = out.shape[1]
    if at.shape.splits == 1:
        sink = plgpu.layout_cast(scratch.sink[...], ROW) * LOG2E
        highest = jnp.maximum(top, sink)
        kept = jnp.exp2(top - highest)
        out = out * _along(kept / (total * kept + jnp.exp2(sink - highest)), columns)
    else:

        @pl.when(at.group == 0)
        def _() -> None:
            result.top[at.batch, split, rows] = top
            result.total[at.batch, split, rows] = total

    result.out[at.batch, split, rows, pl.ds(at.group * columns, columns)] = out
