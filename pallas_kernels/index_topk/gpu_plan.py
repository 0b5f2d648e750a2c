"""Which blocks of threads score and choose for which nodes, where orders stay on the chip."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from jax import Array

from pallas_kernels.hopper import SMS
from pallas_kernels.index_topk.gpu_exchange import HALF, LINES, SLOTS, TRIALS
from pallas_kernels.index_topk.gpu_scores import SLOTS as KEY_SLOTS
from pallas_kernels.index_topk.gpu_scores import TILE
from pallas_kernels.index_topk.packed import PackedKeys, values

if TYPE_CHECKING:
    from pallas_kernels.index_topk.op import IndexKeys

UNIT = LINES * TILE
"""Committed entries of a unit, which one block of threads of a cluster holds whole."""
MOST_PARTS = 8
"""Blocks of the largest cluster that every Hopper GPU runs. Mosaic GPU asks for larger ones by the
attribute that allows them, up to 16, and ends the process where the device does not."""
MOST_NODES = 64
"""Nodes of the largest tree. Longer chains gain more from a pass over the keys that more of their
nodes share than from orders that stay on the chip."""
CHUNK_BYTES = 128 << 10
"""Shared memory for the queries of the nodes that share a pass over the keys, in two kernels."""
SHARED_MEMORY = 227 << 10
SLACK = 8 << 10
"""Shared memory kept for barriers and for the alignment of what is in it."""


class Sizes(NamedTuple):
    """Static sizes of a call."""

    batch: int
    nodes: int
    heads: int  # a multiple of 8
    dim: int
    capacity: int
    own: int
    is_packed: bool

    @property
    def units(self) -> int:
        """Units of committed entries."""
        return max(1, -(-self.capacity // UNIT))

    @property
    def own_tiles(self) -> int:
        """Tiles of the block's own entries."""
        return -(-self.own // TILE)


class Plan(NamedTuple):
    """Static choices."""

    nodes: int  # that a block of threads scores together, a divisor of their number and of `groups`
    parts: int  # blocks of threads of a cluster, which share the entries of its nodes
    groups: int  # warpgroups of a block

    def rows(self, sizes: Sizes) -> int:
        """Rows of 64 orders that a block holds for a node."""
        return max(LINES, LINES * -(-sizes.units // self.parts) + sizes.own_tiles)

    def shared_memory(self, sizes: Sizes) -> int:
        """Bytes that a block takes, at the most."""
        key = TILE * sizes.dim
        slots = 2 * key if sizes.is_packed else 2 * key * KEY_SLOTS
        if sizes.is_packed:
            slots += KEY_SLOTS * (key + 2 * TILE)
        query = sizes.heads * (2 * sizes.dim + 4)
        lines = 4 * LINES * (TRIALS * HALF // 32 + 2)
        counts = 4 * SLOTS * self.parts * self.groups * TRIALS
        orders = 4 * TILE * self.rows(sizes)
        return self.nodes * (query + orders) + self.groups * (slots + lines) + counts + SLACK

    def fits(self, sizes: Sizes) -> bool:
        """Whether a call can be so divided."""
        if sizes.nodes % self.nodes or self.groups % self.nodes:
            return False
        return self.shared_memory(sizes) <= SHARED_MEMORY


def plan(sizes: Sizes, groups: int, parts: int = 0) -> Plan | None:
    """The plan for a call, or None where a node's orders do not fit into a cluster.

    Two nodes share a pass over the keys where enough blocks are left to occupy the device, then as
    few blocks as possible share a node, since they wait for each other at every digit. Where there
    are not enough, there are as many as can be; more than there are units would have no work.
    """
    most = max(1, min(MOST_PARTS, sizes.units))
    choices = [parts] if parts else [k for k in (1, 2, 4, 8) if k < 2 * most]
    every = [Plan(nodes, k, groups) for nodes in (2, 1) for k in choices]
    fitting = [each for each in every if each.fits(sizes)]

    def blocks(each: Plan) -> int:
        return sizes.batch * (sizes.nodes // each.nodes) * each.parts

    occupying = [each for each in fitting if blocks(each) >= SMS - SMS // 8]
    return next(iter(occupying), max(fitting, key=blocks, default=None))


def how(
    q: Array, entries: IndexKeys, mode: str, splits: int, groups: int
) -> tuple[Sizes, Plan | None]:
    """Sizes of a call, and the plan of one kernel or None for two; arguments as of `index_topk`.

    Scores stay on the chip for trees, as far as a node's fit into the shared memory of the largest
    cluster: about a million tokens' entries. Each node, or two, then reads the keys from L2 anew. A
    prefill chunk has so many nodes that this would be most of its time: there eight share a pass.

    Raises:
        ValueError: an unknown mode, numbers that are none, or one kernel where it cannot be.
    """
    if splits < 0 or groups < 0:
        raise ValueError(f"splits {splits} and groups {groups} must not be negative")
    if mode not in ("auto", "fused", "split"):
        raise ValueError(f"unknown mode {mode!r}; choose auto, fused or split")
    batch, nodes, heads, dim = q.shape
    capacity, own = (values(x).shape[1] for x in (entries.keys, entries.own))
    is_packed = all(isinstance(x, PackedKeys) for x in (entries.keys, entries.own))
    sizes = Sizes(batch, nodes, -(-heads // 8) * 8, dim, capacity, own, is_packed)
    if mode == "split" or (mode == "auto" and nodes > MOST_NODES):
        return sizes, None
    if splits > MOST_PARTS:
        raise ValueError(f"a cluster has up to {MOST_PARTS} blocks, not {splits}; use 'split'")
    found = plan(sizes, groups or 2, splits)
    if mode == "fused" and found is None:
        raise ValueError(f"scores of {capacity} entries do not fit into a cluster; use 'split'")
    return sizes, found


def chunk_of(nodes: int, heads: int, dim: int) -> int:
    """Nodes whose queries fit into shared memory together, where two kernels do the work."""
    return max(1, min(nodes, CHUNK_BYTES // (-(-heads // 8) * 8 * dim * 2)))
