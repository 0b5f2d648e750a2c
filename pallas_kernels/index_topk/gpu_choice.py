"""The choice of the largest scores on Hopper, by bisecting their bits.

One block of threads for each node. It finds the least order that is chosen, a digit of four bits
at a time by counting the orders that reach trial values, and among its equals the index up to which
they are chosen, likewise. The orders are read anew for each digit, from the caches.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.core import LoweringSemantics
from jax.experimental.pallas import mosaic_gpu as plgpu

WORD, LINES = 32, 64
BLOCK = WORD * LINES
"""Orders that a warpgroup looks at together: one word of bits a row of a wgmma's layout."""
DIGIT = 4
"""Bits that one pass over the orders finds."""
MATRIX = plgpu.Layout.WGMMA
ROW, COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)


class Scratch(NamedTuple):
    """References to shared memory and barriers."""

    counts: Any  # [groups, 15, 64] int32
    counted: Any
    read: Any


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

    def kernel(order: Any, tiles: Any, out: Any, *scratch: Any) -> None:
        b, n = lax.axis_index("batch"), lax.axis_index("node")
        count = tiles[b, 1] * tile
        _choose(Node(order.at[b, n], out.at[b, n], count, Scratch(*scratch), groups), topk)

    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((batch, nodes, size // WORD), jnp.uint32),
        grid=(batch, nodes),
        grid_names=("batch", "node"),
        num_threads=groups,
        thread_name="group",
        scratch_types=[
            plgpu.SMEM((groups, (1 << DIGIT) - 1, LINES), jnp.int32),
            plgpu.Barrier(num_arrivals=groups),
            plgpu.Barrier(num_arrivals=groups),
        ],
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=0, lowering_semantics=LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    return run(orders.reshape(batch, nodes, size // WORD, WORD), tiles)


class Node(NamedTuple):
    """One node's part of the work of a warpgroup."""

    order: Any  # [words, 32]
    out: Any  # [words]
    written: Array  # how many orders are
    scratch: Scratch
    groups: int

    @property
    def blocks(self) -> Array:
        """Blocks of this warpgroup."""
        every = (self.written + BLOCK - 1) // BLOCK
        return (every - lax.axis_index("group") + self.groups - 1) // self.groups

    def block(self, i: Array) -> tuple[Array, Array, Any]:
        """Orders, their indices and their lines."""
        line = (i * self.groups + lax.axis_index("group")) * LINES
        lines = pl.ds(line, LINES)
        index = line * WORD + _place()
        values = load(self.order, (lines, slice(None)), MATRIX)
        return jnp.where(index < self.written, values, jnp.uint32(0)), index, lines

    def counts(self, holds: Callable[[Array, Array], list[Array]]) -> list[Array]:
        """How many orders pass each of some tests on (orders, indices)."""

        def add(i: Array, counted: list[Array]) -> list[Array]:
            values, index, _ = self.block(i)
            tests = holds(values, index)
            return [
                n + jnp.where(test, 1, 0).sum(axis=1)
                for n, test in zip(counted, tests, strict=True)
            ]

        size = len(
            jax.eval_shape(holds, *(jax.ShapeDtypeStruct((), x) for x in ("uint32", "int32")))
        )
        zero = [plgpu.layout_cast(jnp.full((LINES,), 0, jnp.int32), ROW) for _ in range(size)]
        return self._sums(lax.fori_loop(0, self.blocks, add, zero))

    def _sums(self, counts: list[Array]) -> list[Array]:
        """Sums over rows and warpgroups, the same for all.

        Rows lie in different warps. They are summed as columns, which every warp holds: a sum
        across warps would go through memory that Pallas shares between warpgroups.
        """
        for k, n in enumerate(counts):
            self.scratch.counts[lax.axis_index("group"), k] = n
        _meet(self.scratch.counted, self.groups)
        sums = []
        for k in range(len(counts)):
            every = plgpu.layout_cast(self.scratch.counts[0, k], COLUMN)
            for group in range(1, self.groups):
                every = every + plgpu.layout_cast(self.scratch.counts[group, k], COLUMN)
            sums.append(every.sum())
        _meet(self.scratch.read, self.groups)
        return sums


def _meet(barrier: Any, groups: int) -> None:
    if groups > 1:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)


def _choose(node: Node, topk: int) -> None:
    width = -(-(node.order.shape[0] * WORD).bit_length() // DIGIT) * DIGIT

    def refine(digit: Array, least: Array) -> Array:
        shift = (32 - DIGIT * (digit + 1)).astype(jnp.uint32)
        trials = [least | (jnp.uint32(k) << shift) for k in range(1, 1 << DIGIT)]
        reached = node.counts(lambda values, _: [values >= trial for trial in trials])
        return least | (_first(n >= topk for n in reached).astype(jnp.uint32) << shift)

    least = lax.fori_loop(0, 32 // DIGIT, refine, jnp.uint32(0))
    (above,) = node.counts(lambda values, _: [values > least])
    room = topk - above

    def extend(digit: Array, end: Array) -> Array:
        shift = width - DIGIT * (digit + 1)
        trials = [end | (jnp.int32(k) << shift) for k in range(1, 1 << DIGIT)]
        before = node.counts(
            lambda values, index: [(values == least) & (index < trial) for trial in trials]
        )
        return end | (_first(n <= room for n in before) << shift)

    end = lax.fori_loop(0, width // DIGIT, extend, jnp.int32(0))

    @pl.loop(0, node.blocks)
    def _(i: Array) -> None:
        values, index, lines = node.block(i)
        chosen = (values > least) | ((values == least) & (index < end))
        chosen = chosen & (values > jnp.uint32(0))
        column = plgpu.broadcasted_iota(jnp.int32, (LINES, WORD), 1, layout=MATRIX)
        bits = jnp.where(chosen, jnp.int32(1) << column, 0)
        node.out[lines] = bits.sum(axis=1).astype(jnp.uint32)


def _first(tests: Iterable[Array]) -> Array:
    """How many of some tests hold, all of which stand before those that do not."""
    held = jnp.int32(0)
    for test in tests:
        held = held + jnp.where(test, 1, 0)
    return held


def _place() -> Array:
    """Index of an order within its block."""
    line, column = (
        plgpu.broadcasted_iota(jnp.int32, (LINES, WORD), axis, layout=MATRIX) for axis in (0, 1)
    )
    return line * WORD + column


def load(ref: Any, index: Any, layout: Any) -> Array:
    """Reads global memory straight into the layout of a wgmma."""
    read: Any = plgpu.load
    if "idx" in inspect.signature(read).parameters:  # jax before 0.11
        return read(ref, index, layout=layout, optimized=False)
    return read(ref.at[index], layout=layout, optimized=False)
