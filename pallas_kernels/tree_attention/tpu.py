"""Tree attention in Pallas for TPUs: one pass over all keys with an online softmax.

The grid is (sequence, tile of nodes, step). Step 0 takes the ring and the block's own rows and
entries, the steps after it committed entries: *stream* takes them in order, a tile a step, up to
the last that is committed; *gather* fetches only what some node of the tile selects. Which of the
two is a static choice by bytes, see `tpu_plan.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import target_platform
from pallas_kernels.tree_attention import tpu_tile as tile
from pallas_kernels.tree_attention.sources import Committed, Own
from pallas_kernels.tree_attention.tpu_fetch import Fetch
from pallas_kernels.tree_attention.tpu_operands import Operands, operands
from pallas_kernels.tree_attention.tpu_plan import ALIGN, LANES, Plan, choose, rows_of
from pallas_kernels.tree_attention.tpu_traffic import traffic
from pallas_kernels.words import WORD

__all__ = ["traffic", "tree_attention"]

VMEM_LIMIT = 32 << 20
"""Bytes; v5e and v5p grant 16 MiB unless asked, every TPU has 64 MiB or more."""


def tree_attention(
    q: Array,
    sink: Array,
    committed: Committed,
    own: Own,
    *,
    position: Array,
    mode: str = "auto",
    node_tile: int = 8,
    entry_tile: int = 512,
) -> Array:
    """See `op.tree_attention`, whose arguments these are.

    Args:
        q: queries.
        sink: sinks.
        committed: committed keys; `Fp8Entries` are copied first, `Fp8Bytes` are read as they are.
        own: the block's own keys.
        position: positions of the queries.
        mode: `stream`, `gather`, or `auto`: the one that reads less. Static, as are the tiles.
        node_tile: nodes whose queries share a pass over the entries.
        entry_tile: entries a step.

    Raises:
        ValueError: the mode cannot be, or a tile has no such size.
    """
    batch, nodes, heads, dim = q.shape
    # A node's heads fill whole tiles of sublanes; only toys need the padding.
    spare = -heads % (8 if q.dtype == jnp.float32 else 16)
    if spare:
        q = jnp.pad(q, [(0, 0), (0, 0), (0, spare), (0, 0)])
        sink = jnp.pad(sink, (0, spare))
    rows = rows_of(committed.entries)
    plan = choose(q, committed, own, rows, mode=mode, node_tile=node_tile, entry_tile=entry_tile)
    out = _call(plan, operands(plan, (q, sink, position), rows, committed, own))
    return out.reshape(batch, nodes, heads + spare, dim)[:, :, :heads]


def _call(plan: Plan, given: Operands) -> Array:
    rows, gather = plan.node_tile * plan.heads, plan.walk.gather
    scratch = [pltpu.VMEM((rows, 1), jnp.float32), pltpu.VMEM((rows, 1), jnp.float32)]
    if gather:
        scratch += Fetch.scratch(plan.walk, plan.node_tile, given.blocks["entries"][0])
    return pl.pallas_call(
        functools.partial(_kernel, plan, tuple(given.blocks), target_platform() != "tpu"),
        out_shape=jax.ShapeDtypeStruct(
            (plan.batch, plan.nodes * plan.heads, plan.dim), jnp.float32
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(given.scalars),
            grid=(plan.batch, plan.tiles, 1 + plan.walk.steps),
            in_specs=[spec for _, spec in given.blocks.values()],
            out_specs=pl.BlockSpec((1, rows, plan.dim), lambda b, i, *_: (b, i, 0)),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        name="tree_attention_" + ("gather" if gather else "stream"),
    )(*given.scalars, *(array for array, _ in given.blocks.values()))


Refs = dict[str, Any]


def _kernel(plan: Plan, names: tuple[str, ...], interpreted: bool, *refs: Any) -> None:
    ref: Refs = dict(zip(("length", "seen", *names), refs, strict=False))
    out, top, total, *buffers = refs[len(ref) :]
    softmax, walk = tile.Softmax(top, total, out), plan.walk
    b, step = pl.program_id(0), pl.program_id(2)
    length = ref["length"][b]
    count = jnp.minimum(lax.div(length, walk.ratio), walk.capacity)
    fetch = None
    if walk.gather:
        sources = ref["entries"].at[b], ref["union"].at[0, 0, 0], ref["selected"].at[0]
        fetch = Fetch(walk, sources, count, buffers, interpreted=interpreted)

    @pl.when(step == 0)
    def _() -> None:
        if fetch is not None:
            fetch.start(0)
        softmax.start(ref["sink"][...])
        _add_ring(plan, ref, softmax, length)
        if plan.chain:
            _add_chain_rows(plan, ref, softmax)
        else:
            _add_tree_rows(plan, ref, softmax)
        _add_own_entries(plan, ref, softmax)

    @pl.when(step > 0)
    def _() -> None:
        if fetch is not None:
            _add_gathered(plan, ref, softmax, fetch)
        elif walk.steps:
            _add_streamed(plan, ref, softmax, count - (step - 1) * walk.size)

    @pl.when(step == walk.steps)
    def _() -> None:
        softmax.finish()


def _add_streamed(plan: Plan, ref: Refs, softmax: tile.Softmax, left: Array) -> None:
    """The entries of this step, in order, of which `left` or all are committed."""

    @pl.when(left > 0)
    def _() -> None:
        _add_entries(plan, ref, softmax, left, (ref["entries"][0], _streamed_mask(plan, ref)))


def _add_gathered(plan: Plan, ref: Refs, softmax: tile.Softmax, fetch: Fetch) -> None:
    """What this step fetched, while the next step's entries are on their way."""
    step = pl.program_id(2) - 1
    left = fetch.found(step)
    fetch.start(step + 1)  # also when nothing is left, so that the steps after this one know

    @pl.when(left > 0)
    def _() -> None:
        stored = fetch.wait(step)
        _add_entries(plan, ref, softmax, left, (stored, fetch.mask(step)))


def _add_entries(
    plan: Plan, ref: Refs, softmax: tile.Softmax, left: Array, found: tuple[Array, Array]
) -> None:
    """Stored entries under a mask; those from `left` on may hold anything."""
    stored, mask = found
    size = plan.walk.size
    keys = tile.values(stored, plan.walk.form, plan.walk.rotary)
    keys = tile.keep_where(tile.below(left, size, 0), keys)
    softmax.add(ref["q"][0], keys, mask & tile.below(left, size, 1))


def _add_ring(plan: Plan, ref: Refs, softmax: tile.Softmax, length: Array) -> None:
    """Committed rows within the window of each node's position."""

    @pl.when(length > 0)
    def _() -> None:
        slots = tile.ring_positions(length, plan.window)
        keys = tile.keep_where(tile.below(length, plan.window, 0), ref["ring"][0])
        oldest = ref["position"][0] - plan.window  # [nodes, 1]
        softmax.add(ref["q"][0], keys, (slots >= 0) & (slots > oldest))


def _add_tree_rows(plan: Plan, ref: Refs, softmax: tile.Softmax) -> None:
    """The block's rows under the ancestor bits and the window."""
    first = pl.program_id(0) * plan.seen_words
    seen = [ref["seen"][first + word] for word in range(plan.row_words)]
    keys = tile.keep_where(tile.column(seen, plan.rows), ref["rows"][0])
    near = ref["row_position"][0] > ref["position"][0] - plan.window
    softmax.add(ref["q"][0], keys, tile.lanes(ref["row_bits"][0], plan.rows) & near)


def _add_chain_rows(plan: Plan, ref: Refs, softmax: tile.Softmax) -> None:
    """The band of a chain's rows that the window of this tile's nodes reaches."""
    node = pl.program_id(1) * plan.node_tile
    start = jnp.clip(lax.div(node - plan.window + 1, ALIGN) * ALIGN, 0, plan.rows - plan.band)
    keys = ref["rows"][0, pl.ds(pl.multiple_of(start, ALIGN), plan.band)]
    shape = plan.node_tile, plan.band
    mine = node + lax.broadcasted_iota(jnp.int32, shape, 0)
    back = mine - (start + lax.broadcasted_iota(jnp.int32, shape, 1))
    softmax.add(ref["q"][0], keys, (back >= 0) & (back < plan.window))


def _add_own_entries(plan: Plan, ref: Refs, softmax: tile.Softmax) -> None:
    """Entries that the block itself completes, in tiles where a long chain has many."""
    first = pl.program_id(0) * plan.seen_words + plan.row_words
    for start in range(0, plan.own_entries, plan.entry_tile):
        end = min(start + plan.entry_tile, plan.own_entries)
        words = range(start // WORD, -(-end // WORD))
        seen = [ref["seen"][first + word] for word in words]
        keys = tile.keep_where(tile.column(seen, end - start), ref["own_entries"][0, start:end])
        bits = ref["entry_bits"][0][:, words.start : words.stop]
        softmax.add(ref["q"][0], keys, tile.lanes(bits, end - start))


def _streamed_mask(plan: Plan, ref: Refs) -> Array:
    """Bits of this step's entries: its words turn to the front of the block of words."""
    walk = plan.walk
    if "selected" not in ref:
        return jnp.ones((plan.node_tile, walk.size), bool)
    words, each = ref["selected"][0], walk.size // WORD
    if each < LANES:
        first = lax.rem((pl.program_id(2) - 1) * each, LANES)
        words = pltpu.roll(words, lax.rem(LANES - first, LANES), 1)
    return tile.lanes(words, walk.size)
