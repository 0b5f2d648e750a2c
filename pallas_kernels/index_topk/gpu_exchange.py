"""How warpgroups that choose for a node learn each other's counts.

They are those of a block of threads, or of a cluster of blocks. Each writes its counts into the
shared memory of every block of the cluster, and all meet before they are read.

They meet by `barrier.cluster`, whose arrival releases and whose wait acquires for the cluster (PTX
ISA, "barrier.cluster"); what Mosaic GPU makes of a `ClusterBarrier` releases and acquires for the
block alone, the default of mbarriers. The interpreter knows neither this instruction nor other
blocks' shared memory, but it knows `ClusterBarrier` and finds races: there counts go through device
memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

LINES = 64
"""Lines of a wgmma's layout."""
TRIALS = 16
"""Places of a vector of counts, the last one empty."""
HALF = 16
"""Bits of a count in a pair of them: a line has less than 2^16 orders, 4 million a warpgroup."""
SLOTS = 2
"""Vectors of counts are written to slots by turns: who writes to one again has met all readers."""
MATRIX = plgpu.Layout.WGMMA
ROW, COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)


class Crew(NamedTuple):
    """Static: who works together."""

    nodes: int  # of a block
    parts: int  # blocks of a cluster
    groups: int  # warpgroups of a block, a multiple of its nodes
    is_interpreted: bool

    @property
    def shares(self) -> int:
        """Warpgroups of a block that share a node."""
        return self.groups // self.nodes

    @property
    def slots(self) -> tuple[int, ...]:
        """Shape of the memory for counts: each node's of each warpgroup that shares it."""
        return SLOTS, self.nodes, self.parts * self.shares, TRIALS

    @property
    def leaves_chip(self) -> bool:
        """Whether counts go through device memory."""
        return self.is_interpreted and self.parts > 1

    def scratch(self) -> list[Any]:
        """Shared memory of an exchange: lines, counts if they stay there, and a barrier."""
        types = [plgpu.SMEM((self.groups, TRIALS // 2, LINES), jnp.int32)]
        if not self.leaves_chip:
            return [
                *types,
                plgpu.SMEM(self.slots, jnp.int32),
                plgpu.Barrier(num_arrivals=self.groups),
            ]
        return [
            *types,
            plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=self.groups),
        ]


class Exchange(NamedTuple):
    """A warpgroup's part in it."""

    crew: Crew
    lines: Any  # [groups, 8, 64] int32
    counts: Any  # [2, nodes, warpgroups that share one, 16] int32
    barrier: Any
    part: Array
    group: Array

    @property
    def nodes(self) -> int:
        """Nodes of a block."""
        return self.crew.nodes

    @property
    def node(self) -> Array:
        """Node of this warpgroup."""
        return self.group % self.crew.nodes

    @property
    def share(self) -> Array:
        """Number of this warpgroup among those of its block that share the node."""
        return self.group // self.crew.nodes

    @property
    def _place(self) -> Array:
        return self.part * self.crew.shares + self.share

    def totals(self, pairs: list[Array], turn: Array) -> Array:
        """Sums `[16]` over lines and warpgroups, the same for all who share the node.

        Lines lie in different warps. They are summed as columns, which every warp holds: a sum
        across warps would go through memory that Pallas shares between warpgroups.
        """
        for k, both in enumerate(pairs):
            self.lines[self.group, k] = both
        place = plgpu.broadcasted_iota(jnp.int32, (TRIALS,), 0, layout=COLUMN)
        mine = _nothing()
        for k in range(len(pairs)):
            both = plgpu.layout_cast(self.lines[self.group, k], COLUMN).astype(jnp.uint32)
            for half, n in enumerate(
                (both & jnp.uint32((1 << HALF) - 1), both >> jnp.uint32(HALF))
            ):
                mine = jnp.where(place == 2 * k + half, n.astype(jnp.int32).sum(), mine)
        slot = turn % SLOTS
        self._tell(slot, mine)
        every = _nothing()
        for other in range(self.crew.slots[2]):
            every = every + plgpu.layout_cast(self.counts[slot, self.node, other], COLUMN)
        return every

    def any_node(self, flag: Array, turn: Array) -> Array:
        """Whether the flag of any node of the block is set."""
        slot = turn % SLOTS
        self._tell(slot, _nothing() + jnp.where(flag, 1, 0))
        every = _nothing()
        for node in range(self.crew.nodes):
            every = every + plgpu.layout_cast(self.counts[slot, node, self._place], COLUMN)
        return every.max() > 0

    def _tell(self, slot: Array, vector: Array) -> None:
        """Lets all who share the node know a vector, and waits for theirs."""
        mine = self.counts.at[slot, self.node, self._place]
        if self.crew.parts == 1 or self.crew.is_interpreted:
            mine[...] = vector
        else:

            @pl.loop(0, self.crew.parts)
            def _(part: Array) -> None:
                plgpu.cluster_ref(mine, {"part": part})[...] = vector

        self.meet()

    def meet(self) -> None:
        """Waits for all warpgroups of the cluster; what they wrote before can be read then."""
        if self.crew.parts > 1 and not self.crew.is_interpreted:
            _meet_cluster()
        elif self.crew.parts * self.crew.groups > 1:
            plgpu.barrier_arrive(self.barrier)
            plgpu.barrier_wait(self.barrier)


def _nothing() -> Array:
    return plgpu.layout_cast(jnp.full((TRIALS,), 0, jnp.int32), COLUMN)


def _meet_cluster() -> None:
    @plgpu.inline_mgpu()
    def meet(context: Any) -> None:
        nothing = ir.Type.parse("!llvm.void")
        for half in ("arrive.release", "wait.acquire"):
            llvm.inline_asm(
                nothing, [], f"barrier.cluster.{half};", "~{memory}", has_side_effects=True
            )

    meet()
