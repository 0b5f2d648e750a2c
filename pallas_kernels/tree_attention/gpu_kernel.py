"""The Hopper kernel of tree attention: 64 query rows against a list of tiles of keys.

A block of threads has two warpgroups. At each step each of them scores its own tile of 64 keys
(wgmma, Q K^T); they agree on the maxima of the rows and hand each other their weights through
shared memory; then each adds both tiles to its half of the output's columns (wgmma, P V). Keys are
values, so a tile is fetched once, whole by TMA or as single rows, and refilled as soon as both have
used it. Blocks of threads that share a list of tiles are a cluster, see `gpu_cluster`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.core import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.tree_attention.gpu_cluster import join, join_in_memory, part_types
from pallas_kernels.tree_attention.gpu_fetch import (
    Place,
    bits_at,
    clear,
    fetch,
    receive,
    refill,
    unpack,
)
from pallas_kernels.tree_attention.gpu_layout import (
    LOG2E,
    LOWEST,
    MATRIX,
    ROW,
    TILE,
    Operands,
    Part,
    Results,
    Scratch,
    Shape,
    Softmax,
    along,
    full,
    is_fp8,
    scratch_types,
    warpgroups,
)


def attend(operands: Operands, shape: Shape) -> Array:
    """Runs the kernel: `[B, R, K]` float32, normalised, sink included."""
    q = operands.q
    batch, rows, width = q.shape
    given, tree = jax.tree.flatten(operands)
    # A cluster joins its parts itself; in interpretation they are left to `join_in_memory`.
    apart = 1 if shape.clustered else shape.splits
    outputs = [jax.ShapeDtypeStruct((batch, apart, rows, width), jnp.float32)]
    if apart > 1:
        outputs += [jax.ShapeDtypeStruct((batch, apart, rows), jnp.float32)] * 2

    def kernel(*refs: Any) -> None:
        ref, rest = jax.tree.unflatten(tree, refs[: len(given)]), refs[len(given) :]
        results, scratch = rest[: len(outputs)], rest[len(outputs) :]
        _block(ref, Results(*results), _scratch(scratch, shape), shape)

    run = plgpu.kernel(
        kernel,
        out_type=outputs,
        # The last axis runs fastest, and the blocks of a cluster run at once: those that share keys
        # run side by side and find them in L2.
        grid=(batch, rows // TILE) if shape.clustered else (shape.splits, batch, rows // TILE),
        grid_names=("batch", "tile") if shape.clustered else ("split", "batch", "tile"),
        cluster=(shape.splits,) if shape.clustered else (),
        cluster_names=("split",) if shape.clustered else (),
        num_threads=warpgroups(width),
        thread_name="group",
        scratch_types=_memory(operands, shape),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Rows are reduced within a warp, without shared memory.
            reduction_scratch_bytes=0,
            lowering_semantics=LoweringSemantics.Lane,
        ),
        interpret=shape.interpret,
    )
    results = Results(*run(*given))
    return results.out[:, 0] if apart == 1 else join_in_memory(*results, operands.sink)


def _memory(operands: Operands, shape: Shape) -> list[Any]:
    """Shared memory and barriers; a cluster's parts lie where keys and weights lay."""
    width = operands.q.shape[2]
    fp8 = any(is_fp8(source) for source in operands.sources)
    types = scratch_types(warpgroups(width), width, operands.q.dtype, fp8)
    if not shape.clustered:
        return types
    q, keys, weights, *rest = types
    return [q, plgpu.RefUnion([keys, weights], part_types(width)), *rest]


def _scratch(refs: Sequence[Any], shape: Shape) -> Scratch:
    """References to what `_memory` asks for."""
    if not shape.clustered:
        return Scratch(*refs)
    q, ((keys, weights), part), *rest = refs
    return Scratch(q, keys, weights, *rest)._replace(part=Part(*part))


def _block(ref: Operands, result: Results, scratch: Scratch, shape: Shape) -> None:
    split, batch, tile = (lax.axis_index(name) for name in ("split", "batch", "tile"))
    line = batch * (ref.q.shape[1] // TILE) + tile
    count, groups = ref.counts[line], warpgroups(ref.q.shape[2])
    steps = (count + groups - 1) // groups
    first = steps * split // shape.splits
    steps = steps * (split + 1) // shape.splits - first
    group, row = lax.axis_index("group"), tile * TILE
    at = Place(ref, scratch, shape, group, groups, batch, row, line, first, steps, count)

    @pl.when(group == 0)
    def _() -> None:
        plgpu.copy_gmem_to_smem(ref.q.at[batch, pl.ds(row, TILE)], scratch.q.at[0], scratch.q_ready)
        sink = ref.sink.at[pl.ds(row % ref.sink.shape[0], TILE)]
        plgpu.copy_gmem_to_smem(sink, scratch.rows.at[groups], scratch.q_ready)

    @pl.when(steps > 0)
    def _() -> None:
        fetch(at, first)

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


def _step(at: Place, step: Array, state: Softmax) -> Softmax:
    """Both warpgroups' tiles of one step."""
    scratch, group, width = at.scratch, at.group, at.ref.q.shape[2]
    words = _seen(at, step)
    # Zero, which the compiler cannot know: or it would keep the descriptors of all operands of
    # wgmma in registers, a hundred of them, and spill the output.
    zero = jnp.where(at.tile(step, group) < 0, 1, 0)
    receive(at, step)
    unpack(at, step)
    clear(at, step)

    def product(acc: Any) -> Array:
        plgpu.wgmma(acc, scratch.q.at[zero], scratch.keys.at[group + zero].transpose((1, 0)))
        return acc[...]

    scores = pl.run_scoped(product, plgpu.ACC((TILE, TILE), jnp.float32))
    scores = jnp.where(bits_at(words, 1), scores * (LOG2E * width**-0.5), LOWEST)
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
        refill(at, step, g)
    return Softmax(top, total, out)


def _add_product(at: Place, tile: Array, out: Array) -> Array:
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


def _seen(at: Place, step: Array) -> list[Array]:
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


def _finish(at: Place, split: Array, result: Results, state: Softmax) -> None:
    """Writes the output, or in interpretation a part of it if there are several splits."""
    scratch, rows = at.scratch, pl.ds(at.row, TILE)
    top, total, out = state
    scratch.rows[at.group] = total
    _meet(scratch.rows_ready, at.groups)
    total = plgpu.layout_cast(scratch.rows[0], ROW)
    for g in range(1, at.groups):
        total = total + plgpu.layout_cast(scratch.rows[g], ROW)
    columns = out.shape[1]
    mine = pl.ds(at.group * columns, columns)
    sink = plgpu.layout_cast(scratch.rows[at.groups], ROW) * LOG2E
    if at.shape.clustered:
        # Nobody needs keys or weights any more: two warpgroups have met above, and a store waits
        # for the warps of its own.
        scratch.part.out[:, mine] = out

        @pl.when(at.group == 0)
        def _() -> None:
            scratch.part.statistics[0] = top
            scratch.part.statistics[1] = total

        def write(columns: Any, joined: Array) -> None:
            result.out[at.batch, 0, rows, columns] = joined

        join(scratch.part, at.shape.splits, sink, write)
        return
    if at.shape.splits == 1:
        highest = jnp.maximum(top, sink)
        kept = jnp.exp2(top - highest)
        out = out * along(kept / (total * kept + jnp.exp2(sink - highest)), columns)
    else:

        @pl.when(at.group == 0)
        def _() -> None:
            result.top[at.batch, split, rows] = top
            result.total[at.batch, split, rows] = total

    result.out[at.batch, split, rows, mine] = out
