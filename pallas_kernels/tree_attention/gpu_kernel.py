"""The Hopper kernel of tree attention: 64 query rows against a list of tiles of keys.

A block of threads has two warpgroups. At each step each of them scores its own tile of 64 keys
(wgmma, Q K^T); they agree on the maxima of the rows and hand each other their weights through
shared memory; then each adds both tiles to its half of the output's columns (wgmma, P V). Keys are
values, so a tile is fetched once, by TMA, and refilled as soon as both have used it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.core import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention.gpu_layout import (
    ALL_BITS,
    LOG2E,
    LOWEST,
    MATRIX,
    ROW,
    STAGES,
    TILE,
    Fp8Source,
    Operands,
    Results,
    Scratch,
    Shape,
    Softmax,
    along,
    full,
    pieces,
    scratch_types,
    warpgroups,
)


def attend(operands: Operands, shape: Shape) -> Results:
    """Runs the kernel; what comes out is normalised, sink included, where `splits` is 1."""
    q = operands.q
    batch, rows, width = q.shape
    given, tree = jax.tree.flatten(operands)
    groups = warpgroups(width)
    fp8 = any(isinstance(source, Fp8Source) for source in operands.sources)

    def kernel(*refs: Any) -> None:
        results, scratch = refs[len(given) : len(given) + 3], refs[len(given) + 3 :]
        ref = jax.tree.unflatten(tree, refs[: len(given)])
        _block(ref, Results(*results), Scratch(*scratch), shape)

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
        scratch_types=scratch_types(groups, width, q.dtype, fp8),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Rows are reduced within a warp, without shared memory.
            reduction_scratch_bytes=0,
            lowering_semantics=LoweringSemantics.Lane,
        ),
        interpret=shape.interpret,
    )
    return Results(*run(*given))


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

    @property
    def fp8(self) -> bool:
        """Whether a source is in FP8."""
        return any(isinstance(source, Fp8Source) for source in self.ref.sources)

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
        plgpu.copy_gmem_to_smem(sink, scratch.rows.at[groups], scratch.q_ready)

        @pl.when(steps > 0)
        def _() -> None:
            for g in range(groups):
                _fetch(at, first, g)

    plgpu.barrier_wait(scratch.q_ready)
    columns = ref.q.shape[2] // groups
    state = Softmax(
        # Above LOWEST, so that a masked score weighs nothing even where a row sees no key yet.
        full((TILE,), LOWEST / 2, ROW),
        full((TILE,), 0.0, ROW),
        full((TILE, columns), 0.0, MATRIX),
    )
    state = lax.fori_loop(first, first + steps, lambda i, state: _step(at, i, state), state)
    _finish(at, split, result, state)


def _meet(barrier: Any, groups: int) -> None:
    """Waits until every warpgroup is here."""
    if groups > 1:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)


def _fetch(at: _Place, step: Array, group: int) -> None:
    """Starts the copy of a warpgroup's tile; rows beyond the source's end come as zeros."""
    tile = at.tile(step, group)
    for index, source in enumerate(at.ref.sources):
        start, end = at.shape.starts[index : index + 2]

        @pl.when((tile >= start) & (tile < end))
        def _(source: Any = source, start: int = start) -> None:
            keys, first = source, 0
            if isinstance(source, Fp8Source):  # the rest follows in `_unpack`
                keys, first = source.rotary, at.ref.q.shape[2] - TILE
            count = pieces(at.fp8)
            for piece in range(count):
                lines = pl.ds(piece * (TILE // count), TILE // count)
                rows = pl.ds((tile - start) * TILE + piece * (TILE // count), TILE // count)
                plgpu.copy_gmem_to_smem(
                    keys.at[at.batch, rows],
                    at.scratch.keys.at[group, lines, first:],
                    at.scratch.key_ready.at[group],
                )


def _unpack(at: _Place, step: Array) -> None:
    """Brings the warpgroup's tile from FP8 to bfloat16, a group of 64 values a key at a time."""
    tile = at.tile(step, at.group)
    for index, source in enumerate(at.ref.sources):
        start, end = at.shape.starts[index : index + 2]
        if isinstance(source, Fp8Source):

            @pl.when((tile >= start) & (tile < end))
            def _(source: Fp8Source = source, start: int = start) -> None:
                _unpack_tile(at, source, (tile - start) * TILE)


def _unpack_tile(at: _Place, source: Fp8Source, row: Array) -> None:
    scratch, count = at.scratch, source.scale.shape[1]

    def bring(part: Array, stage: Array) -> None:
        rows, barrier = pl.ds(row, TILE), scratch.staged_ready.at[stage]
        values = source.values.at[at.batch, rows, pl.ds(part * TILE, TILE)]
        plgpu.copy_gmem_to_smem(values, scratch.staged.at[stage], barrier)
        scales = source.scale.at[at.batch, part, pl.ds(row, 2 * TILE)]
        plgpu.copy_gmem_to_smem(scales, scratch.scales.at[stage], barrier)

    for part in range(min(STAGES, count)):
        bring(jnp.int32(part), at.group * STAGES + part)

    @pl.loop(0, count)
    def _(part: Array) -> None:
        stage = at.group * STAGES + lax.rem(part, STAGES)
        plgpu.barrier_wait(scratch.staged_ready.at[stage])
        values = plgpu.layout_cast(scratch.staged[stage], MATRIX).astype(jnp.float32)
        exponent = plgpu.layout_cast(scratch.scales[stage, :TILE], ROW).astype(jnp.uint32)
        scale = lax.bitcast_convert_type(exponent << jnp.uint32(23), jnp.float32)
        keys = scratch.keys.at[at.group, :, pl.ds(part * TILE, TILE)]
        keys[...] = (values * along(scale, TILE)).astype(keys.dtype)
        plgpu.commit_smem()

        @pl.when(part + STAGES < count)
        def _() -> None:
            bring(part + STAGES, stage)


def _step(at: _Place, step: Array, state: Softmax) -> Softmax:
    """Both warpgroups' tiles of one step."""
    scratch, group, width = at.scratch, at.group, at.ref.q.shape[2]
    words = _seen(at, step)
    # Zero, which the compiler cannot know: or it would keep the descriptors of all operands of
    # wgmma in registers, a hundred of them, and spill the output.
    zero = jnp.where(at.tile(step, group) < 0, 1, 0)
    plgpu.barrier_wait(scratch.key_ready.at[group])
    _unpack(at, step)
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
    weights = jnp.exp2(scores - along(top, TILE))
    kept = jnp.exp2(state.top - top)
    total = state.total * kept + weights.sum(axis=1)
    scratch.weights[group] = weights.astype(scratch.weights.dtype)
    plgpu.commit_smem()
    _meet(scratch.weights_ready, at.groups)
    out = state.out * along(kept, width // at.groups)
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
        every = full((TILE,), 0, ROW, jnp.uint32)
        for k in range(TILE // heads):
            every = jnp.where(row // heads == k, word(node + k, half), every)
        words.append(along(every, TILE))
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
        sink = plgpu.layout_cast(scratch.rows[at.groups], ROW) * LOG2E
        highest = jnp.maximum(top, sink)
        kept = jnp.exp2(top - highest)
        out = out * along(kept / (total * kept + jnp.exp2(sink - highest)), columns)
    else:

        @pl.when(at.group == 0)
        def _() -> None:
            result.top[at.batch, split, rows] = top
            result.total[at.batch, split, rows] = total

    result.out[at.batch, split, rows, pl.ds(at.group * columns, columns)] = out
