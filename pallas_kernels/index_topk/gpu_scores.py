"""The indexer's scores on Hopper: all nodes of a block in one pass over the keys.

A warpgroup multiplies 64 keys with the heads of one node after the other (wgmma, K Q^T), so that
the sum over heads runs along a row. What it writes is the order of a score, an unsigned number
that rises with it and is 0 where the node does not see the key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.core import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu

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
    weight: Any  # [B, N, heads] float32, N a multiple of the chunk, heads of 8
    keys: Any  # [B, C, ci]
    own: Any  # [B, J, ci]
    visible: Any  # [B, N, words] uint32, by place: committed keys, then own ones
    tiles: Any  # [B, 2] int32: tiles of committed keys, and of all


class Scratch(NamedTuple):
    """References to shared memory and barriers."""

    q: Any  # [chunk, heads, ci]
    weight: Any  # [chunk, heads]
    keys: Any  # [GROUPS, SLOTS, 64, ci]
    ready: Any
    key_ready: Any


def orders(operands: Operands, shape: Shape) -> Array:
    """Orders of the scores, `[B, N, size]` uint32; places beyond the last tile are not written."""
    batch, nodes, heads = operands.weight.shape
    dim = operands.q.shape[2]

    def kernel(*refs: Any) -> None:
        _block(Operands(*refs[:6]), refs[6], Scratch(*refs[7:]), shape)

    width = min(128, dim * operands.q.dtype.itemsize)
    columns = width // operands.q.dtype.itemsize
    swizzle = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(width))
    dtype = operands.q.dtype
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, nodes, shape.size), jnp.uint32),
        grid=(nodes // shape.chunk, batch, shape.splits),
        grid_names=("chunk", "batch", "split"),
        num_threads=GROUPS,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((shape.chunk, heads, dim), dtype, transforms=swizzle),
            plgpu.SMEM((shape.chunk, heads), jnp.float32),
            plgpu.SMEM((GROUPS, SLOTS, TILE, dim), dtype, transforms=swizzle),
            plgpu.Barrier(num_arrivals=shape.chunk + 1),
            plgpu.Barrier(num_barriers=GROUPS * SLOTS),
        ],
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, lowering_semantics=LoweringSemantics.Lane
        ),
        interpret=shape.interpret,
    )
    return run(*operands)


def _block(ref: Operands, out: Any, scratch: Scratch, shape: Shape) -> None:
    chunk, batch, split = (lax.axis_index(name) for name in ("chunk", "batch", "split"))
    group = lax.axis_index("group")
    node, heads = chunk * shape.chunk, ref.weight.shape[2]
    committed, count = ref.tiles[batch, 0], ref.tiles[batch, 1]
    first = count * split // shape.splits
    steps = (count * (split + 1) // shape.splits - first - group + GROUPS - 1) // GROUPS

    def fetch(step: Any) -> None:
        tile = first + step * GROUPS + group
        slot = lax.rem(step, SLOTS)
        place, barrier = scratch.keys.at[group, slot], scratch.key_ready.at[group * SLOTS + slot]

        @pl.when(tile < committed)
        def _() -> None:
            rows = pl.ds(tile * TILE, TILE)
            plgpu.copy_gmem_to_smem(ref.keys.at[batch, rows], place, barrier)

        @pl.when(tile >= committed)
        def _() -> None:
            rows = pl.ds((tile - committed) * TILE, TILE)
            plgpu.copy_gmem_to_smem(ref.own.at[batch, rows], place, barrier)

    @pl.when(group == 0)
    def _() -> None:
        nodes = pl.ds(node, shape.chunk)
        for i in range(shape.chunk):
            rows = pl.ds((node + i) * heads, heads)
            plgpu.copy_gmem_to_smem(ref.q.at[batch, rows], scratch.q.at[i], scratch.ready)
        plgpu.copy_gmem_to_smem(ref.weight.at[batch, nodes], scratch.weight, scratch.ready)

    for slot in range(SLOTS):

        @pl.when(slot < steps)
        def _(slot: int = slot) -> None:
            fetch(jnp.int32(slot))

    plgpu.barrier_wait(scratch.ready)

    @pl.loop(0, steps)
    def _(step: Array) -> None:
        tile, slot = first + step * GROUPS + group, lax.rem(step, SLOTS)
        plgpu.barrier_wait(scratch.key_ready.at[group * SLOTS + slot])

        @pl.loop(0, shape.chunk)
        def _(i: Array) -> None:
            score = _score(scratch, scratch.keys.at[group, slot], i)
            words = [ref.visible[batch, node + i, 2 * tile + half] for half in range(2)]
            out[batch, node + i, pl.ds(tile * TILE, TILE)] = _order(score, words)

        @pl.when(step + SLOTS < steps)
        def _() -> None:
            fetch(step + SLOTS)


def _score(scratch: Scratch, keys: Any, node: Array) -> Array:
    """sum_h weight_h relu(q_h . key) of 64 keys."""
    heads = scratch.weight.shape[1]

    def product(acc: Any) -> Array:
        plgpu.wgmma(acc, keys, scratch.q.at[node].transpose((1, 0)))
        return acc[...]

    dots = pl.run_scoped(product, plgpu.ACC((TILE, heads), jnp.float32))
    weight = plgpu.layout_cast(scratch.weight[node], COLUMN)
    return (jnp.maximum(dots, 0.0) * lax.broadcast_in_dim(weight, dots.shape, (1,))).sum(axis=1)


def _order(score: Array, words: list[Array]) -> Array:
    """Rises with the score, -0 like 0; 0 where the bit of a key is not set."""
    bits = lax.bitcast_convert_type(score + 0.0, jnp.uint32)
    sign = jnp.uint32(SIGN)
    order = jnp.where(bits < sign, bits | sign, ~bits)
    place = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW)
    word = jnp.where(place < 32, words[0], words[1])
    seen = ((word >> (place & 31).astype(jnp.uint32)) & jnp.uint32(1)) == jnp.uint32(1)
    return jnp.where(seen, order, jnp.uint32(0))
