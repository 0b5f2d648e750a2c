"""The indexer's scores and choice on Hopper in one kernel: orders of scores stay on the chip.

A cluster of blocks of threads works for a node of a sequence, or for two. Each block scores its
part of the entries, 64 to a row of its shared memory, and the cluster finds what is chosen
(`gpu_bisection`), exchanging nothing but counts. Nodes of a sequence run side by side, and find
each other's keys in the L2 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.core import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.index_topk.gpu_bisection import Chosen, bisect, load, store
from pallas_kernels.index_topk.gpu_exchange import LINES, MATRIX, ROW, Crew, Exchange
from pallas_kernels.index_topk.gpu_plan import UNIT, Plan, Sizes
from pallas_kernels.index_topk.gpu_scores import (
    SLOTS,
    TILE,
    Scratch,
    await_keys,
    fetch_keys,
    fetch_queries,
    order_of,
    score_tile,
    scratch_types,
)
from pallas_kernels.words import ALL_BITS, WORD

HALVES = TILE // WORD


class Operands(NamedTuple):
    """Arrays, or references to them in global memory."""

    q: Any  # [B, N heads, ci]
    weight: Any  # [B, N, heads in 32s] float32
    keys: Any  # [B, C, ci], or `PackedKeys` with the bits of their scales, uint8
    own: Any  # [B, J, ci], in the form of `keys`
    own_bits: Any  # [B, N, words] uint32
    committed: Any  # [B] int32, not more than there are


class Memory(NamedTuple):
    """References to what a block of threads works with."""

    orders: Any  # [nodes, rows, 64] uint32
    words: Any  # [groups, 2, 64] uint32
    scratch: Scratch
    exchange: tuple[Any, ...]


class Part(NamedTuple):
    """Rows of 64 entries that a block holds of a sequence: units of committed ones, then own ones.

    The last block of a cluster, which has the fewest committed ones, holds the block's own.
    """

    sizes: Sizes
    plan: Plan
    number: Array
    committed: Array  # entries of the sequence

    @property
    def units(self) -> Array:
        """Units of committed entries that the sequence has."""
        return (self.committed + UNIT - 1) // UNIT

    @property
    def first(self) -> Array:
        """The first unit of this block."""
        return self.number * ((self.units + self.plan.parts - 1) // self.plan.parts)

    @property
    def own_row(self) -> Array:
        """Row of the first own entries, and how many of committed ones there are."""
        each = (self.units + self.plan.parts - 1) // self.plan.parts
        return jnp.clip(self.units - self.first, 0, each) * LINES

    @property
    def rows(self) -> Array:
        """How many rows hold entries."""
        return self.own_row + jnp.where(self.number == self.plan.parts - 1, self.sizes.own_tiles, 0)

    def source(self, row: Array) -> tuple[Array, Array, Array]:
        """Whether a row is of own entries, the first of them, and how many there are from it on."""
        is_own = row >= self.own_row
        start = TILE * jnp.where(is_own, row - self.own_row, self.first * LINES + row)
        end = jnp.where(is_own, jnp.int32(self.sizes.own), self.committed)
        return is_own, start, end - start


class Node(NamedTuple):
    """A node's orders in this block; its warpgroups take blocks of them by turns."""

    part: Part
    orders: Any  # [rows, 64]
    share: Array
    shares: int

    @property
    def blocks(self) -> Array:
        """Blocks of this warpgroup."""
        every = (self.part.rows + LINES - 1) // LINES
        return (every - self.share + self.shares - 1) // self.shares

    def block(self, i: Array) -> tuple[Array, Array]:
        """64 rows of orders and their indices; rows of other blocks count as empty."""
        first = (i * self.shares + self.share) * LINES
        start = self.start(first)
        row = start + plgpu.broadcasted_iota(jnp.int32, (LINES,), 0, layout=ROW)
        is_here = (row >= first) & (row < self.part.rows)
        values = load(self.orders, (pl.ds(start, LINES), slice(None)), MATRIX)
        is_here = lax.broadcast_in_dim(is_here, values.shape, (0,))
        return jnp.where(is_here, values, jnp.uint32(0)), self._index(row, 0, TILE)

    def words(self, chosen: Chosen, first: Array, half: int) -> Array:
        """Words `[64]` of 64 rows: of the first or second half of each."""
        columns = pl.ds(half * WORD, WORD)
        values = load(self.orders, (pl.ds(first, LINES), columns), MATRIX)
        row = first + plgpu.broadcasted_iota(jnp.int32, (LINES,), 0, layout=ROW)
        return chosen.words(values, self._index(row, half * WORD, WORD))

    def start(self, first: Array) -> Array:
        """A row from which on 64 are there, the wanted one among them."""
        return jnp.minimum(first, self.orders.shape[0] - LINES)

    def _index(self, row: Array, column: int, width: int) -> Array:
        """Indices of entries: committed ones, then own ones."""
        own = self.part.sizes.units * LINES - self.part.own_row
        at = row + jnp.where(row >= self.part.own_row, own, self.part.first * LINES)
        at = lax.broadcast_in_dim(at * TILE + column, (LINES, width), (0,))
        return at + plgpu.broadcasted_iota(jnp.int32, (LINES, width), 1, layout=MATRIX)


def select(
    operands: Operands, sizes: Sizes, plan: Plan, *, topk: int, interpret: Any
) -> tuple[Array, Array]:
    """Packed bits of what each node chooses of committed entries and of the block's own.

    Returns:
        `[B, N, units, 64, 2]` and `[B, N, tiles, 2]` uint32, words in order.
    """
    crew = Crew(plan.nodes, plan.parts, plan.groups, bool(interpret))
    given, tree = jax.tree.flatten(operands)
    grid = sizes.batch, sizes.nodes // plan.nodes
    outputs = [
        jax.ShapeDtypeStruct((*grid, plan.nodes, sizes.units, LINES, HALVES), jnp.uint32),
        jax.ShapeDtypeStruct((*grid, plan.nodes, max(1, sizes.own_tiles), HALVES), jnp.uint32),
    ]
    if crew.leaves_chip:
        outputs.append(jax.ShapeDtypeStruct((*grid, *crew.slots), jnp.int32))
    types = scratch_types(operands, plan.nodes, plan.groups)

    def kernel(*refs: Any) -> None:
        ref = jax.tree.unflatten(tree, refs[: len(given)])
        out, rest = refs[len(given) : len(given) + len(outputs)], refs[len(given) + len(outputs) :]
        orders, words, *others = rest
        scratch, (lines, *exchange) = Scratch(*others[: len(types)]), others[len(types) :]
        place = lax.axis_index("batch"), lax.axis_index("chunk")
        if crew.leaves_chip:
            exchange.insert(0, out[2].at[place])
        memory = Memory(orders, words, scratch, (lines, *exchange))
        _block(ref, [x.at[place] for x in out[:2]], memory, (sizes, plan, crew, topk))

    run = plgpu.kernel(
        kernel,
        out_type=tuple(outputs),
        grid=grid,
        grid_names=("batch", "chunk"),
        cluster=(plan.parts,),
        cluster_names=("part",),
        num_threads=plan.groups,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((plan.nodes, plan.rows(sizes), TILE), jnp.uint32),
            plgpu.SMEM((plan.groups, HALVES, LINES), jnp.uint32),
            *types,
            *crew.scratch(),
        ],
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, lowering_semantics=LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    chosen, own, *_ = run(*given)
    whole = sizes.batch, sizes.nodes
    return chosen.reshape(*whole, *chosen.shape[3:]), own.reshape(*whole, *own.shape[3:])


def _block(
    ref: Operands, out: list[Any], memory: Memory, static: tuple[Sizes, Plan, Crew, int]
) -> None:
    sizes, plan, crew, topk = static
    number, group = lax.axis_index("part"), lax.axis_index("group")
    lines, counts, barrier = memory.exchange
    exchange = Exchange(crew, lines, counts, barrier, number, group)
    part = Part(sizes, plan, number, ref.committed[lax.axis_index("batch")])
    _score(ref, memory, part)
    exchange.meet()
    node = Node(part, memory.orders.at[exchange.node], exchange.share, crew.shares)
    places = sizes.units * UNIT + sizes.own_tiles * TILE
    chosen = bisect(node, exchange, topk, places)
    committed, own = (x.at[exchange.node] for x in out)
    _write_committed(node, chosen, committed)
    if sizes.own_tiles:

        @pl.when((number == plan.parts - 1) & (exchange.share == 0))
        def _() -> None:
            _write_own(node, chosen, memory.words.at[group], own)


def _score(ref: Operands, memory: Memory, part: Part) -> None:
    """Writes the orders of all rows, 0 where there is no entry; warpgroups take them by turns."""
    batch, node = lax.axis_index("batch"), lax.axis_index("chunk") * part.plan.nodes
    group, scratch, groups = lax.axis_index("group"), memory.scratch, part.plan.groups

    def fetch(step: Array) -> None:
        row, slot = step * groups + group, lax.rem(step, SLOTS)
        is_own, start, left = part.source(row)
        is_there = (row < part.rows) & (left > 0)
        for keys, is_from in ((ref.keys, ~is_own), (ref.own, is_own)):

            @pl.when(is_there & is_from)
            def _(keys: Any = keys) -> None:
                fetch_keys(keys, scratch, (batch, start), slot)

    @pl.when(group == 0)
    def _() -> None:
        fetch_queries(ref, scratch, batch, node)

    for slot in range(SLOTS):
        fetch(jnp.int32(slot))
    plgpu.barrier_wait(scratch.ready)

    @pl.loop(0, (part.rows - group + groups - 1) // groups)
    def _(step: Array) -> None:
        row, slot = step * groups + group, lax.rem(step, SLOTS)
        is_own, start, left = part.source(row)

        @pl.when(left > 0)
        def _() -> None:
            keys, scale = await_keys(scratch, slot)
            for i in range(part.plan.nodes):
                score = score_tile(scratch, keys, i)
                score = score if scale is None else score * scale
                words = _seen(ref.own_bits.at[batch, node + i], start, is_own)
                memory.orders[i, row] = order_of(score, words, left)

        @pl.when(left <= 0)
        def _() -> None:
            for i in range(part.plan.nodes):
                memory.orders[i, row] = _zeros()

        fetch(step + SLOTS)


def _seen(own_bits: Any, start: Array, is_own: Array) -> list[Array]:
    """Words of who sees 64 entries from one on: all nodes see committed ones."""
    last = own_bits.shape[0] - 1
    words = [own_bits[jnp.minimum(start // WORD + half, last)] for half in range(HALVES)]
    return [jnp.where(is_own, word, jnp.uint32(ALL_BITS)) for word in words]


def _zeros() -> Array:
    return plgpu.layout_cast(jnp.full((LINES,), 0, jnp.uint32), ROW)


def _write_committed(node: Node, chosen: Chosen, out: Any) -> None:
    """Writes the words of this warpgroup's units, and of units that nobody holds zeros."""
    part = node.part

    @pl.loop(0, (part.own_row // LINES - node.share + node.shares - 1) // node.shares)
    def _(i: Array) -> None:
        unit = i * node.shares + node.share
        for half in range(HALVES):
            words = node.words(chosen, unit * LINES, half)
            store(out, (part.first + unit, slice(None), half), words)

    turns = part.plan.parts * node.shares
    empty = part.units + part.number * node.shares + node.share

    @pl.loop(0, (part.sizes.units - empty + turns - 1) // turns)
    def _(i: Array) -> None:
        for half in range(HALVES):
            store(out, (empty + i * turns, slice(None), half), _zeros())


def _write_own(node: Node, chosen: Chosen, words: Any, out: Any) -> None:
    """Writes the words of own entries one by one: they are few."""
    tiles = node.part.sizes.own_tiles
    for tile in range(0, tiles, LINES):
        row = node.part.own_row + tile
        start = node.start(row)
        for half in range(HALVES):
            words[half] = node.words(chosen, start, half)

        @pl.loop(0, min(LINES, tiles - tile))
        def _(i: Array, tile: int = tile, row: Array = row, start: Array = start) -> None:
            for half in range(HALVES):
                out[tile + i, half] = words[half, row - start + i]
