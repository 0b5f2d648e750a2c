"""The choice of the largest scores on Hopper where they lie in device memory.

One block of threads for each node. Orders are read anew for each digit, from the caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.core import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_topk.gpu_bisection import WORD, bisect, load
from pallas_kernels.index_topk.gpu_exchange import LINES, MATRIX, Crew, Exchange

BLOCK = WORD * LINES
"""Orders that a warpgroup looks at together: one word of bits a row of a wgmma's layout."""


def choose(
    orders: Array, tiles: Array, *, topk: int, tile: int, groups: int, interpret: Any
) -> Array:
    """The `topk` largest orders of each node as packed bits.

    Args:
        orders: `[B, N, size]` uint32, `size` a multiple of `BLOCK`.
        tiles: `[B, 2]` int32; the second says how many tiles of orders are written.
        topk: how many are chosen; an order of 0 is not, even where there are fewer.
        tile: orders a tile.
        groups: warpgroups that share a node.
        interpret: what `plgpu.kernel` takes.

    Returns:
        `[B, N, size / 32]` uint32; words beyond the last tile hold anything.
    """
    batch, nodes, size = orders.shape
    crew = Crew(nodes=1, parts=1, groups=groups, is_interpreted=bool(interpret))

    def kernel(order: Any, tiles: Any, out: Any, *scratch: Any) -> None:
        lines, counts, barrier = scratch
        b, n, group = (lax.axis_index(name) for name in ("batch", "node", "group"))
        exchange = Exchange(crew, lines, counts, barrier, jnp.int32(0), group)
        node = Node(order.at[b, n], tiles[b, 1] * tile, group, groups)
        chosen = bisect(node, exchange, topk, size)

        @pl.loop(0, node.blocks)
        def _(i: Array) -> None:
            out[b, n, pl.ds(node.line(i), LINES)] = chosen.words(*node.block(i))

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, nodes, size // WORD), jnp.uint32),
        grid=(batch, nodes),
        grid_names=("batch", "node"),
        num_threads=groups,
        thread_name="group",
        scratch_types=crew.scratch(),
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, lowering_semantics=LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    return run(orders.reshape(batch, nodes, size // WORD, WORD), tiles)


class Node(NamedTuple):
    """One node's part of the work of a warpgroup."""

    order: Any  # [words, 32]
    written: Array  # how many orders are
    group: Array
    groups: int

    @property
    def blocks(self) -> Array:
        """Blocks of this warpgroup."""
        every = (self.written + BLOCK - 1) // BLOCK
        return (every - self.group + self.groups - 1) // self.groups

    def line(self, i: Array) -> Array:
        """First line of a block."""
        return (i * self.groups + self.group) * LINES

    def block(self, i: Array) -> tuple[Array, Array]:
        """Orders and their indices."""
        line, column = (
            plgpu.broadcasted_iota(jnp.int32, (LINES, WORD), axis, layout=MATRIX) for axis in (0, 1)
        )
        index = (self.line(i) + line) * WORD + column
        values = load(self.order, (pl.ds(self.line(i), LINES), slice(None)), MATRIX)
        return jnp.where(index < self.written, values, jnp.uint32(0)), index
