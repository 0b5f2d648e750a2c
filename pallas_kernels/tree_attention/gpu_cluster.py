"""One softmax over blocks of threads that share the keys of 64 query rows, on the chip.

The blocks are a cluster. Each leaves its sum of keys, not normalised, and the statistics of its
softmax in its own shared memory, where keys lay, and then brings its share of the columns together
from the shared memory of all of them (distributed shared memory). So no partial result goes through
device memory. The interpreter knows neither clusters nor peers' memory: there the parts are results
of the kernel, and the same arithmetic joins the same shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

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
"""Columns that are joined at once at the most: 16 registers a part, and a line of 128 bytes."""
WGMMA_COLUMNS = 8
"""Columns that a matrix in wgmma's layout is a multiple of."""


class Share(NamedTuple):
    """Columns that a warpgroup of one block of a cluster joins."""

    first: Any  # a number, or one that is known when the kernel runs
    columns: int
    piece: int  # of `columns`, which it divides: so many at once


def share_of(split: Any, group: Any, splits: int, width: int) -> Share:
    """The columns of warpgroup `group` of block `split`: those of all of them are a partition."""
    groups = warpgroups(width)
    columns = width // (splits * groups)
    return Share((split * groups + group) * columns, columns, piece_of(splits, width))


def piece_of(splits: int, width: int) -> int:
    """Columns that are joined at once: a divisor of a share, as long as a swizzle may be."""
    return math.gcd(width // (splits * warpgroups(width)), PIECE)


def peer_of(split: Any, turn: int, splits: int) -> Any:
    """Whose part block `split` reads at a turn; its own first.

    At each turn every block reads another one's memory, or all would wait for the same block.
    `splits` is a power of two.
    """
    return (split + turn) & (splits - 1)


def check_splits(splits: int, width: int) -> None:
    """Refuses what cannot be a cluster.

    Raises:
        ValueError: a number of blocks that is no cluster's, or too many for the head dim.
    """
    if splits not in SIZES:
        raise ValueError(f"splits must be one of {', '.join(map(str, SIZES))}; got {splits}")
    if splits > 1 and width % (splits * warpgroups(width) * WGMMA_COLUMNS):
        raise ValueError(f"{splits} splits are too many for head dim {width}; take 8 or fewer")


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


def part_types(splits: int, width: int) -> list[Any]:
    """Shared memory of a part."""
    columns = piece_of(splits, width)
    swizzle = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(4 * columns))
    return [
        plgpu.SMEM((TILE, width), jnp.float32, transforms=swizzle),
        plgpu.SMEM((2, TILE), jnp.float32),
    ]


def join(part: Part, splits: int, sink: Array, write: Callable[..., None]) -> None:
    """Joins this warpgroup's share of all blocks' parts, which their own blocks have written.

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
    share = share_of(split, group, splits, part.out.shape[1])

    @pl.loop(0, share.columns // share.piece)
    def _(turn: Array) -> None:
        columns = pl.ds(share.first + turn * share.piece, share.piece)
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
    shares = []
    for block in range(splits * warpgroups(width)):
        split, group = divmod(block, warpgroups(width))
        share = share_of(split, group, splits, width)
        mine = out[..., share.first : share.first + share.columns]
        peers = [peer_of(split, turn, splits) for turn in range(splits)]
        tiles = [x.reshape(batch, splits, -1, TILE, *x.shape[3:]) for x in (mine, top, total)]
        of_tile = jax.vmap(partial(_join_tile, peers), (1, 1, 1, 0))
        shares.append(jax.vmap(of_tile, (0, 0, 0, None))(*tiles, sinks))
    return jnp.concatenate(shares, axis=-1).reshape(batch, rows, width)


def _join_tile(peers: list[int], out: Array, top: Array, total: Array, sink: Array) -> Array:
    """One share of 64 rows, `[64, columns]`, of parts `[splits, 64, columns]`."""
    weights = weights_of([top[k] for k in peers], [total[k] for k in peers], sink)
    return blend(weights, [out[k] for k in peers])
