"""Static sizes of the TPU kernel of `index_topk`, and the bytes that it moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.experimental import pallas as pl

from pallas_kernels.index_topk.packed import PackedKeys, values
from pallas_kernels.index_topk.tpu_bisection import CHUNK, GROUP, PLACES, SPAN
from pallas_kernels.memory import nbytes

if TYPE_CHECKING:
    from pallas_kernels.index_topk.op import IndexKeys

VMEM_LIMIT = 56 << 20  # bytes; a 7x has 64 MiB, the other generations 128 MiB
NODE_TILE_GROUPS = 8  # at most: the tile's queries and its scores of the own entries stay small


class Plan(NamedTuple):
    """Static sizes of one call; letters as in `op.index_topk`."""

    nodes: int  # N
    heads: int  # Hi
    dim: int  # ci
    capacity: int  # C
    own: int  # J
    topk: int
    tile: int  # entries of a key tile, a power of two
    groups: int  # groups of a node tile

    @property
    def spans(self) -> int:
        """Spans of the committed entries."""
        return pl.cdiv(self.capacity, PLACES)

    @property
    def own_spans(self) -> int:
        """Spans of the block's own entries; they follow the last committed span in use."""
        return pl.cdiv(self.own, PLACES)

    @property
    def node_tiles(self) -> int:
        """Passes over the keys."""
        return pl.cdiv(self.nodes, self.groups * GROUP)

    @property
    def words(self) -> tuple[int, int]:
        """Words of a node's choices: of the committed entries and of the block's own."""
        return pl.cdiv(self.capacity, 32), pl.cdiv(self.own, 32)

    @property
    def order_shape(self) -> tuple[int, int, int, int]:
        """Scores in VMEM, one register a chunk."""
        return self.groups, (self.spans + self.own_spans) * SPAN, GROUP, CHUNK


def make_plan(
    q: tuple[int, ...], sizes: tuple[int, int], topk: int, *, tile: int, score_bytes: int
) -> Plan:
    """Tiles for queries of shape `q [B, N, Hi, ci]` and `sizes` (C, J).

    As many groups share a pass over the keys as have room for their scores, but at least one.
    """
    _, nodes, heads, dim = q
    tile = max(CHUNK, min(tile, 1 << (sizes[0] - 1).bit_length()))
    one = Plan(nodes, heads, dim, *sizes, topk, tile, 1)
    room = score_bytes // (4 * GROUP * CHUNK * one.order_shape[1])
    groups = pl.cdiv(nodes, GROUP)
    passes = pl.cdiv(groups, max(1, min(room, NODE_TILE_GROUPS)))
    return one._replace(groups=pl.cdiv(groups, passes))


def traffic(
    q: Array,
    weight: Array,
    entries: IndexKeys,
    *,
    topk: int,
    tile: int = 1024,
    score_bytes: int = 24 << 20,
) -> tuple[int, int, int]:
    """Bytes that a call reads and writes by the kernel's schedule, and the fewest possible.

    Arguments are those of `index_topk`; abstract ones count every entry as committed. The fewest
    are every operand's visible part read once and the results written once.
    """
    sizes = values(entries.keys).shape[1], values(entries.own).shape[1]
    plan = make_plan(q.shape, sizes, topk, tile=tile, score_bytes=score_bytes)
    batch = q.shape[0]
    committed = np.full(batch, plan.capacity)
    if not isinstance(entries.committed, jax.ShapeDtypeStruct):
        committed = np.asarray(entries.committed)
    key = plan.dim * values(entries.keys).dtype.itemsize
    once = nbytes((q, weight, entries.own, entries.own_bits, entries.committed))
    written = 4 * batch * plan.nodes * sum(plan.words)
    scale = int(isinstance(entries.keys, PackedKeys))
    fewest = once + written + int(committed.sum()) * (key + scale)
    if sum(sizes) <= topk:  # no kernel runs
        return nbytes(entries.own_bits), written, fewest
    tiles = np.maximum(-(-committed // plan.tile), 1)
    passes = np.where(tiles > 1, plan.node_tiles, 1)  # a tile that stays is not read again
    rows = int((np.minimum(tiles * plan.tile, plan.capacity) * passes).sum())
    # The scales are first laid out for row access: read once, written and read in tiles of four
    # sublanes of which one is in use.
    layout = scale * batch * plan.capacity
    return once + rows * (key + 4 * scale) + layout, written + 4 * layout, fewest
