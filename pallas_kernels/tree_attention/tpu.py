"""Tree attention in Pallas for TPUs: one pass over all keys with an online softmax.

The grid is (sequence, tile of nodes, step). Step 0 takes the ring and the block's own rows and
entries, the steps after it committed entries: *stream* takes them in order, a tile a step, up to
the last that is committed; *gather* fetches only what some node of the tile selects. Which of the
two is a static choice by bytes, see `plan.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tree_attention import tile
from pallas_kernels.tree_attention.fetch import Fetch
from pallas_kernels.tree_attention.operands import Operands, operands
from pallas_kernels.tree_attention.plan import ALIGN, WORD, Plan, Tuning, choose, rows_of
from pallas_kernels.tree_attention.sources import Committed, Own


def tree_attention(
    q: Array,
    sink: Array,
    committed: Committed,
    own: Own,
    *,
    position: Array,
    tuning: Tuning = Tuning(),
    interpret: Any = False,
) -> Array:
    """See `op.tree_attention`, whose arguments these are.

    Args:
        q: queries.
        sink: sinks.
        committed: committed keys; `Fp8Entries` are copied first, `Fp8Bytes` are read as they are.
        own: the block's own keys.
        position: positions of the queries.
        tuning: tiles and plan, static.
        interpret: what `pallas_call` takes, static.

    Raises:
        ValueError: the plan that the tuning names cannot be.
    """
    batch, nodes, heads, dim = q.shape
    # A node's heads fill whole tiles of sublanes; only toys need the padding.
    spare = -heads % (8 if q.dtype == jnp.float32 else 16)
    if spare:
        q = jnp.pad(q, [(0, 0), (0, 0), (0, spare), (0, 0)])
        sink = jnp.pad(sink, (0, spare))
    rows = rows_of(committed.entries)
    plan = choose(q, committed, own, rows, tuning)
    given = operands(plan, (q, sink, position), rows, committed, own)
    out = _call(plan, given, tuning, interpret)
    return out.reshape(batch, nodes, heads + spare, dim)[:, :, :heads]


def _call(plan: Plan, given: Operands, tuning: Tuning, interpret: Any) -> Array:
    rows, gather = plan.node_tile * plan.heads, plan.walk.gather
    scratch = [pltpu.VMEM((rows, 1), jnp.float32), pltpu.VMEM((rows, 1), jnp.float32)]
    if gather:
        scratch += Fetch.scratch(plan.walk, given.blocks["entries"][0])
    return pl.pallas_call(
        functools.partial(_kernel, plan, tuple(given.blocks), bool(interpret)),
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
            vmem_limit_bytes=tuning.vmem_limit,
        ),
        interpret=interpret,
        name="tree_attention_" + ("gather" if gather else "stream"),
    )(*given.scalars, *(array for array, _ in given.blocks.values()))


Refs = dict[str, Any]


def _kernel(plan: Plan, names: tuple[str, ...], interpreted: bool, *refs: Any) -> None:
    ref: Refs = dict(zip(("length", "seen", "used", *names), refs, strict=False))
    out, top, total, *buffers = refs[len(ref) :]
    softmax, walk = tile.Softmax(top, total, out), plan.walk
    b, i, step = (pl.program_id(axis) for axis in range(3))
    length = ref["length"][b]
    count = jnp.minimum(lax.div(length, walk.ratio), walk.capacity)
    fetch = None
    if walk.gather:
        used = ref["used"][b * plan.tiles + i]
        fetch = Fetch(walk, ref["entries"].at[b], ref["place"].at[0, 0, 0], used, buffers)
        fetch.interpreted = interpreted
        count = fetch.entries(count)

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

    if walk.steps:

        @pl.when((step > 0) & ((step - 1) * walk.size < count))
        def _() -> None:
            _add_entries(plan, ref, softmax, fetch, count)

    @pl.when(step == walk.steps)
    def _() -> None:
        softmax.finish()


def _add_entries(
    plan: Plan, ref: Refs, softmax: tile.Softmax, fetch: Fetch | None, count: Array
) -> None:
    """Committed entries of this step; `count` of all steps are meant."""
    walk, index = plan.walk, pl.program_id(2) - 1
    if fetch is None:
        stored, mask = ref["entries"][0], _streamed_mask(plan, ref)
    else:
        fetch.start(index + 1)
        stored, mask = fetch.wait(index), _gathered_mask(plan, ref)
    left = count - index * walk.size
    keys = tile.values(stored, walk.form, walk.rotary)
    keys = tile.keep_where(tile.below(left, walk.size, 0), keys)
    softmax.add(ref["q"][0], keys, mask & tile.below(left, walk.size, 1))


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
    if walk.word_block > each:
        first = lax.rem((pl.program_id(2) - 1) * each, walk.word_block)
        words = pltpu.roll(words, lax.rem(walk.word_block - first, walk.word_block), 1)
    return tile.lanes(words, walk.size)


def _gathered_mask(plan: Plan, ref: Refs) -> Array:
    """Bit n of what is fetched, for node n of the tile."""
    shape = plan.node_tile, plan.walk.size
    flags = jnp.broadcast_to(ref["selectors"][0, 0], shape)
    return lax.shift_right_logical(flags, lax.broadcasted_iota(jnp.int32, shape, 0)) & 1 == 1
