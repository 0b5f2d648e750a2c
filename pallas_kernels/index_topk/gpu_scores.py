"""The indexer's scores on Hopper: all nodes of a block in one pass over the keys.

A warpgroup multiplies 64 keys with the heads of one node after the other (wgmma, K Q^T), so that
the sum over heads runs along a row. What it writes is the order of a score, an unsigned number
that rises with it and is 0 where the node does not see the key.

Packed keys are brought to bfloat16 in shared memory, which is exact, and their scales multiply the
scores: powers of two leave the order of roundings alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.core import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_topk.packed import PackedKeys, values

TILE = 64
"""Keys that a warpgroup scores at a time: the rows of one wgmma."""
GROUPS, SLOTS = 2, 2
SIGN = 1 << 31
MATRIX = plgpu.Layout.WGMMA
ROW, COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)


class Shape(NamedTuple):
    """Static sizes of one call."""

    chunk: int  # nodes that share a pass over the keys
    splits: int  # blocks of threads that share the keys of a sequence
    size: int  # places of a node's orders
    interpret: Any


class Operands(NamedTuple):
    """Arrays, or references to them in global memory."""

    q: Any  # [B, N heads, ci]
    weight: Any  # [B, N, heads in 32s] float32, N a multiple of the chunk
    keys: Any  # [B, C, ci], or `PackedKeys` with the bits of their scales, uint8
    own: Any  # [B, J, ci], in the form of `keys`
    visible: Any  # [B, N, words] uint32, by place: committed keys, then own ones
    tiles: Any  # [B, 2] int32: tiles of committed keys, and of all


class Scratch(NamedTuple):
    """References to shared memory and barriers."""

    q: Any  # [chunk, heads, ci]
    weight: Any  # [chunk, heads in 32s]
    keys: Any  # [GROUPS, SLOTS, 64, ci]; one slot where keys are packed
    ready: Any
    key_ready: Any
    packed: Any = None  # [GROUPS, SLOTS, 64, ci] float8_e4m3fn
    scale: Any = None  # [GROUPS, SLOTS, 128] uint8: no copy is smaller; 64 are used


def orders(operands: Operands, shape: Shape) -> Array:
    """Orders of the scores, `[B, N, size]` uint32; places beyond the last tile are not written."""
    batch, nodes, _ = operands.weight.shape
    given, tree = jax.tree.flatten(operands)

    def kernel(*refs: Any) -> None:
        ref = jax.tree.unflatten(tree, refs[: len(given)])
        _block(ref, refs[len(given)], Scratch(*refs[len(given) + 1 :]), shape)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, nodes, shape.size), jnp.uint32),
        grid=(nodes // shape.chunk, batch, shape.splits),
        grid_names=("chunk", "batch", "split"),
        num_threads=GROUPS,
        thread_name="group",
        scratch_types=scratch_types(operands, shape.chunk),
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, lowering_semantics=LoweringSemantics.Lane
        ),
        interpret=shape.interpret,
    )
    return run(*given)


def scratch_types(operands: Any, chunk: int, groups: int = GROUPS) -> list[Any]:
    """The fields of `Scratch` for the queries of a chunk of nodes."""
    dtype, dim = operands.q.dtype, operands.q.shape[2]
    _, nodes, weights = operands.weight.shape
    heads = operands.q.shape[1] // nodes
    is_packed = isinstance(operands.keys, PackedKeys)
    columns = min(64, dim)

    def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
        width = columns * jnp.dtype(dtype).itemsize
        swizzle = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(width))
        return plgpu.SMEM(shape, dtype, transforms=swizzle)

    types = [
        swizzled((chunk, heads, dim), dtype),
        plgpu.SMEM((chunk, weights), jnp.float32),
        swizzled((groups, 1 if is_packed else SLOTS, TILE, dim), dtype),
        plgpu.Barrier(num_arrivals=chunk + 1),
        plgpu.Barrier(num_arrivals=2 if is_packed else 1, num_barriers=groups * SLOTS),
    ]
    if is_packed:
        types += [
            swizzled((groups, SLOTS, TILE, dim), jnp.float8_e4m3fn),
            plgpu.SMEM((groups, SLOTS, 2 * TILE), jnp.uint8),
        ]
    return types


def _block(ref: Operands, out: Any, scratch: Scratch, shape: Shape) -> None:
    chunk, batch, split = (lax.axis_index(name) for name in ("chunk", "batch", "split"))
    group = lax.axis_index("group")
    node = chunk * shape.chunk
    committed, count = ref.tiles[batch, 0], ref.tiles[batch, 1]
    first = count * split // shape.splits
    steps = (count * (split + 1) // shape.splits - first - group + GROUPS - 1) // GROUPS

    def fetch(step: Any) -> None:
        tile = first + step * GROUPS + group
        slot = lax.rem(step, SLOTS)

        @pl.when(tile < committed)
        def _() -> None:
            fetch_keys(ref.keys, scratch, (batch, tile * TILE), slot)

        @pl.when(tile >= committed)
        def _() -> None:
            fetch_keys(ref.own, scratch, (batch, (tile - committed) * TILE), slot)

    @pl.when(group == 0)
    def _() -> None:
        fetch_queries(ref, scratch, batch, node)

    for slot in range(SLOTS):

        @pl.when(slot < steps)
        def _(slot: int = slot) -> None:
            fetch(jnp.int32(slot))

    plgpu.barrier_wait(scratch.ready)

    @pl.loop(0, steps)
    def _(step: Array) -> None:
        tile, slot = first + step * GROUPS + group, lax.rem(step, SLOTS)
        keys, scale = await_keys(scratch, slot)

        @pl.loop(0, shape.chunk)
        def _(i: Array) -> None:
            score = score_tile(scratch, keys, i)
            score = score if scale is None else score * scale
            words = [ref.visible[batch, node + i, 2 * tile + half] for half in range(2)]
            out[batch, node + i, pl.ds(tile * TILE, TILE)] = order_of(score, words)

        @pl.when(step + SLOTS < steps)
        def _() -> None:
            fetch(step + SLOTS)


def fetch_queries(ref: Any, scratch: Scratch, batch: Array, node: Array) -> None:
    """Starts the copies of the chunk's queries and head weights, from its first node on."""
    chunk, heads = scratch.q.shape[:2]
    for i in range(chunk):
        rows = pl.ds((node + i) * heads, heads)
        plgpu.copy_gmem_to_smem(ref.q.at[batch, rows], scratch.q.at[i], scratch.ready)
    weights = ref.weight.at[batch, pl.ds(node, chunk)]
    plgpu.copy_gmem_to_smem(weights, scratch.weight, scratch.ready)


def fetch_keys(keys: Any, scratch: Scratch, at: tuple[Array, Array], slot: Array) -> None:
    """Starts the copies of 64 keys from a (sequence, row) on; rows beyond the end are zeros."""
    batch, row = at
    group = lax.axis_index("group")
    barrier = scratch.key_ready.at[group * SLOTS + slot]
    place = scratch.keys if scratch.packed is None else scratch.packed
    rows: Any = values(keys).at[batch, pl.ds(row, TILE)]
    plgpu.copy_gmem_to_smem(rows, place.at[group, slot], barrier)
    if scratch.scale is not None:
        scales = keys.scale.at[batch, pl.ds(row, 2 * TILE)]
        plgpu.copy_gmem_to_smem(scales, scratch.scale.at[group, slot], barrier)


def await_keys(scratch: Scratch, slot: Array) -> tuple[Any, Array | None]:
    """The warpgroup's keys in bfloat16, once they are here, and the scales of packed ones."""
    group = lax.axis_index("group")
    plgpu.barrier_wait(scratch.key_ready.at[group * SLOTS + slot])
    if scratch.packed is None:
        return scratch.keys.at[group, slot], None
    return scratch.keys.at[group, 0], _unpack(scratch, slot)


def _unpack(scratch: Scratch, slot: Array) -> Array:
    """Brings the warpgroup's keys to bfloat16, and their scales `[64]` to registers."""
    group = lax.axis_index("group")
    plgpu.commit_smem()  # all warps have done with the keys of before
    bits = plgpu.layout_cast(scratch.scale[group, slot, :TILE], ROW).astype(jnp.uint32)
    columns = min(64, scratch.keys.shape[3])
    for part in range(scratch.keys.shape[3] // columns):
        here = pl.ds(part * columns, columns)
        packed = plgpu.layout_cast(scratch.packed[group, slot, :, here], MATRIX)
        keys = scratch.keys.at[group, 0, :, here]
        keys[...] = packed.astype(jnp.float32).astype(keys.dtype)
    plgpu.commit_smem()
    return lax.bitcast_convert_type(bits << jnp.uint32(23), jnp.float32)


def score_tile(scratch: Scratch, keys: Any, node: Array | int) -> Array:
    """sum_h weight_h relu(q_h . key) of 64 keys."""
    heads = scratch.q.shape[1]

    def product(acc: Any) -> Array:
        plgpu.wgmma(acc, keys, scratch.q.at[node].transpose((1, 0)))
        return acc[...]

    dots = pl.run_scoped(product, plgpu.ACC((TILE, heads), jnp.float32))
    weight = plgpu.layout_cast(scratch.weight[node, :heads], COLUMN)
    return (jnp.maximum(dots, 0.0) * lax.broadcast_in_dim(weight, dots.shape, (1,))).sum(axis=1)


def order_of(score: Array, words: list[Array], there: Array | int = TILE) -> Array:
    """Rises with the score, -0 like 0; 0 where the bit of a key is not set or it is not there."""
    bits = lax.bitcast_convert_type(score, jnp.uint32)
    bits = jnp.where(score == 0.0, jnp.uint32(0), bits)  # -0 becomes 0; a zero added may be dropped
    sign = jnp.uint32(SIGN)
    order = jnp.where(bits < sign, bits | sign, ~bits)
    place = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW)
    word = jnp.where(place < 32, words[0], words[1])
    seen = ((word >> (place & 31).astype(jnp.uint32)) & jnp.uint32(1)) == jnp.uint32(1)
    return jnp.where(seen & (place < there), order, jnp.uint32(0))
