"""One softmax over blocks of threads that share the keys of 64 query rows, on the chip.

The blocks are a cluster. Each leaves its sum of keys, not normalised, and the statistics of its
softmax in its own shared memory, where keys lay, and then joins some of the columns out of the
shared memory of all blocks (distributed shared memory). No partial result goes through device
memory. The interpreter does not read peers' memory: there the parts are results of the kernel, and
the same arithmetic joins the same pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.tree_attention.gpu_layout import (
    LOG2E,
    MATRIX,
    ROW,
    TILE,
    Part,
    along,
    warpgroups,
)

SIZES = (1, 2, 4, 8, 16)
"""Blocks of a cluster. 8 fit on every device that has clusters, 16 on those where so many
multiprocessors share their memory and are free; Mosaic GPU's runtime asks for more than 8 itself
(`CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED`)."""
PIECE = 32
"""Columns that are joined at once: 128 bytes, the least that Mosaic GPU writes of a row."""


def pieces_of(width: int) -> int:
    """Pieces of the columns, which the warpgroups of a cluster deal out."""
    return width // PIECE


def turns_of(splits: int, width: int) -> int:
    """Pieces that a warpgroup joins, or one more than it does where they do not come out even."""
    return -(-pieces_of(width) // (splits * warpgroups(width)))


def piece_at(turn: Any, split: Any, group: Any, splits: int, width: int) -> Any:
    """The piece that warpgroup `group` of block `split` joins at a turn, if there are so many.

    Where pieces are few, every block has its first before any has a second.
    """
    return (turn * warpgroups(width) + group) * splits + split


def peer_of(split: Any, turn: int, splits: int) -> Any:
    """Whose part block `split` reads at a turn; its own first.

    At each turn every block reads another one's memory, or all would wait for the same block.
    `splits` is a power of two.
    """
    return (split + turn) & (splits - 1)


def check_splits(splits: int) -> None:
    """Refuses what cannot be a cluster.

    Raises:
        ValueError: a number of blocks that is no cluster's.
    """
    if splits not in SIZES:
        raise ValueError(f"splits must be one of {', '.join(map(str, SIZES))}; got {splits}")


def weights_of(tops: Sequence[Array], totals: Sequence[Array], sink: Array) -> list[Array]:
    """What each part counts in the result, the sink included, `[64]` each.

    Args:
        tops: maxima of the scores of each part, times log2(e).
        totals: sums of the weights of each part, against its own maximum.
        sink: sinks, times log2(e).
    """
    top = reduce(jnp.maximum, tops, sink)
    kept = [jnp.exp2(part - top) for part in tops]
    total = jnp.exp2(sink - top)
    for part, factor in zip(totals, kept, strict=True):
        total = total + part * factor
    return [factor / total for factor in kept]


def blend(weights: Sequence[Array], parts: Sequence[Array]) -> Array:
    """The weighted sum of parts, `[64, columns]` each."""
    columns = parts[0].shape[1]
    products = [along(w, columns) * part for w, part in zip(weights, parts, strict=True)]
    return reduce(jnp.add, products)


def meet_cluster() -> None:
    """Waits for every thread of the cluster.

    What they wrote to shared memory before is seen after it: unlike an mbarrier's, whose arrival
    orders memory within a block unless told otherwise, this barrier's arrival releases and its wait
    acquires for the whole cluster (PTX ISA, `barrier.cluster`).
    """

    @plgpu.inline_mgpu()
    def meet(context: Any) -> None:
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)

    meet()


def part_types(width: int) -> list[Any]:
    """Shared memory of a part."""
    swizzle = (plgpu.TilingTransform((8, PIECE)), plgpu.SwizzleTransform(4 * PIECE))
    return [
        plgpu.SMEM((TILE, width), jnp.float32, transforms=swizzle),
        plgpu.SMEM((2, TILE), jnp.float32),
    ]


def join(part: Part, splits: int, sink: Array, write: Callable[..., None]) -> None:
    """Joins this warpgroup's columns of all blocks' parts, which their own blocks have written.

    Every thread of every block comes through both barriers once, whatever keys its block had, so
    none waits for ever. The first one ends the writing of parts, and with it, since parts lie where
    keys lay, all reading of keys. The second one keeps a block from leaving, and its shared memory
    from going to another block, while a peer may still read there.

    Args:
        part: of this block; its peers' lie at the same addresses of their memory.
        splits: blocks of the cluster.
        sink: `[64]`, times log2(e).
        write: takes a slice of columns and their result.
    """
    meet_cluster()
    split, group = jax.lax.axis_index("split"), jax.lax.axis_index("group")
    peers = [peer_of(split, turn, splits) for turn in range(splits)]

    def read(ref: Any, peer: Any, layout: Any) -> Array:
        return plgpu.layout_cast(plgpu.cluster_ref(ref, {"split": peer})[...], layout)

    tops = [read(part.statistics.at[0], peer, ROW) for peer in peers]
    totals = [read(part.statistics.at[1], peer, ROW) for peer in peers]
    weights = weights_of(tops, totals, sink)
    width = part.out.shape[1]

    @pl.loop(0, turns_of(splits, width))
    def _(turn: Array) -> None:
        piece = piece_at(turn, split, group, splits, width)

        @pl.when(piece < pieces_of(width))
        def _() -> None:
            columns = pl.ds(piece * PIECE, PIECE)
            place = part.out.at[:, columns]
            write(columns, blend(weights, [read(place, peer, MATRIX) for peer in peers]))

    meet_cluster()


def join_in_memory(out: Array, top: Array, total: Array, sink: Array) -> Array:
    """`join` of parts in device memory, as interpretation has it.

    Args:
        out: `[B, splits, R, K]`, not normalised.
        top: `[B, splits, R]`, maxima of the scores, times log2(e).
        total: `[B, splits, R]`, sums of the weights.
        sink: repeated over the rows of a tile, a multiple of 64.

    Returns:
        `[B, R, K]`.
    """
    batch, splits, rows, width = out.shape
    sinks = jnp.tile(sink * LOG2E, rows // sink.shape[0]).reshape(-1, TILE)
    pieces = pieces_of(width)
    # Piece `p` is block `p % splits`'s, which starts with its own part.
    orders = [[peer_of(p % splits, turn, splits) for turn in range(splits)] for p in range(pieces)]

    def join_piece(piece: Array, order: Array) -> Array:
        of_peers, maxima, sums = (
            x[:, order].reshape(batch, splits, -1, TILE, *x.shape[3:]) for x in (piece, top, total)
        )
        every_tile = jax.vmap(_join_tile, (1, 1, 1, 0))
        return jax.vmap(every_tile, (0, 0, 0, None))(of_peers, maxima, sums, sinks)

    parts = out.reshape(batch, splits, rows, pieces, PIECE)
    joined = jax.vmap(join_piece, (3, 0), 3)(parts, jnp.array(orders))
    return joined.reshape(batch, rows, width)


def _join_tile(out: Array, top: Array, total: Array, sink: Array) -> Array:
    """One piece of 64 rows, `[64, PIECE]`, of parts `[splits, 64, PIECE]` in their order."""
    return blend(weights_of(list(top), list(total), sink), list(out))
