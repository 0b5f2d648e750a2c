"""The indexer's selection on TPUs: one kernel that scores and chooses.

Queries of all heads and of a group of nodes meet a tile of keys in one matrix product; all groups
of a node tile do so while the tile is in VMEM, so a key is read once for all of them. Scores stay
in VMEM, as integers that rise with them, until the last key tile; then the kernel chooses.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_topk.packed import PackedKeys, values
from pallas_kernels.index_topk.tpu_bisection import (
    CHUNK,
    GROUP,
    LEAST,
    PLACES,
    SPAN,
    bisect,
    lane,
    pack_span,
    rising,
    unpack_chunk,
)
from pallas_kernels.index_topk.tpu_plan import VMEM_LIMIT, Plan, make_plan, traffic
from pallas_kernels.precision import precision_of
from pallas_kernels.words import WORD, leading

if TYPE_CHECKING:
    from pallas_kernels.index_topk.op import IndexKeys

__all__ = ["index_topk", "traffic"]


class Refs(NamedTuple):
    """What the kernel is given: operands of a node tile and a key tile, results, scratch."""

    q: Any  # [1, G * 8 * Hi, ci]
    weight: Any  # [1, G * 8, Hi]
    keys: Any  # [1, T, ci]
    scale: Any  # [1, 1, T] uint8 exponents of e8m0, or None
    own: Any  # [1, J rounded up to chunks, ci]
    own_bits: Any  # [1, G * 8, ceil(J / 32)] int32
    chosen: Any  # [1, G * 8, ceil(C / 32)] int32
    own_chosen: Any  # [1, G * 8, ceil(J / 32)] int32
    orders: Any  # [G, chunks, 8, 128] int32
    spread: Any  # [G, 8 * Hi, 128] float32: each head's weight in all lanes


def index_topk(
    q: Array,
    weight: Array,
    entries: IndexKeys,
    *,
    topk: int,
    tile: int = 1024,
    score_bytes: int = 24 << 20,
) -> tuple[Array, Array]:
    """See `op.index_topk`; `tile` and `score_bytes` are static.

    Scores never leave VMEM. Eight nodes over 262144 entries (1M tokens) take 8.1 MiB. Where a
    block's nodes do not fit into `score_bytes` together, each node tile reads the keys once.

    Args:
        q: as there.
        weight: as there.
        entries: as there; keys in FP8 are turned to the dtype of `q` in their tile.
        topk: as there.
        tile: entries read at a time, a power of two from 128 on.
        score_bytes: VMEM for scores.
    """
    sizes = tuple(values(x).shape[1] for x in (entries.keys, entries.own))
    if sum(sizes) <= topk:
        return _all_visible(entries, q.shape[1])
    # A kernel takes no empty operand: one row that nobody sees stands in.
    entries = entries._replace(
        keys=_at_least_one(entries.keys, 1),
        own=_at_least_one(entries.own, 1),
        own_bits=_at_least_one(entries.own_bits, 2),
    )
    some = max(1, sizes[0]), max(1, sizes[1])
    plan = make_plan(q.shape, some, topk, tile=tile, score_bytes=score_bytes)
    words = (lax.bitcast_convert_type(x, jnp.uint32) for x in _run(q, weight, entries, plan))
    chosen, own = (w[..., : pl.cdiv(size, 32)] for w, size in zip(words, sizes, strict=True))
    return chosen, own


def _run(q: Array, weight: Array, entries: IndexKeys, plan: Plan) -> list[Array]:
    batch, nodes, heads, dim = q.shape
    own = entries.own
    if isinstance(own, PackedKeys):  # few rows, and exact: three bits of mantissa, a power of two
        own = own.value.astype(q.dtype) * own.scale.astype(q.dtype)[..., None]
    own_bits = lax.bitcast_convert_type(entries.own_bits, jnp.int32)
    packed = isinstance(entries.keys, PackedKeys)
    keys: tuple[Array, ...] = (values(entries.keys),)
    if isinstance(entries.keys, PackedKeys):
        keys = *keys, lax.bitcast_convert_type(entries.keys.scale, jnp.uint8)[:, None]
    committed = entries.committed.astype(jnp.int32)
    # As many steps as the longest sequence needs; a shorter one stays at its last tile, which is
    # not read again.
    steps = jnp.maximum(pl.cdiv(committed.max(), plan.tile), 1)
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan, packed=packed),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(batch, plan.node_tiles, steps), **_blocks(plan, packed)
        ),
        out_shape=[jax.ShapeDtypeStruct((batch, nodes, n), jnp.int32) for n in plan.words],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_LIMIT,
        ),
        name="index_topk",
    )(committed, q.reshape(batch, nodes * heads, dim), weight, *keys, own, own_bits)


def _blocks(plan: Plan, packed: bool) -> dict[str, Any]:
    """Blocks and scratch of the kernel, in the order of `Refs`."""
    rows = plan.groups * GROUP

    def last_tile(b: Any, step: Any, committed: Any) -> Any:
        return jnp.minimum(step, jnp.maximum(pl.cdiv(committed[b], plan.tile), 1) - 1)

    def by_node(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, *block), lambda b, i, step, committed: (b, i, 0))

    scale = pl.BlockSpec((1, 1, plan.tile), lambda b, i, s, c: (b, 0, last_tile(b, s, c)))
    own_rows = pl.cdiv(plan.own, CHUNK) * CHUNK
    return {
        "in_specs": [
            by_node(rows * plan.heads, plan.dim),
            by_node(rows, plan.heads),
            pl.BlockSpec((1, plan.tile, plan.dim), lambda b, i, s, c: (b, last_tile(b, s, c), 0)),
            *([scale] if packed else []),
            pl.BlockSpec((1, own_rows, plan.dim), lambda b, i, step, committed: (b, 0, 0)),
            by_node(rows, plan.words[1]),
        ],
        "out_specs": [by_node(rows, words) for words in plan.words],
        "scratch_shapes": [
            pltpu.VMEM(plan.order_shape, jnp.int32),
            pltpu.VMEM((plan.groups, GROUP * plan.heads, CHUNK), jnp.float32),
        ],
    }


def _kernel(committed_ref: Any, *refs: Any, plan: Plan, packed: bool) -> None:
    """One key tile of one node tile: scores it, and after the last one chooses."""
    named = Refs._make(refs if packed else (*refs[:3], None, *refs[3:]))
    step, committed = pl.program_id(2), committed_ref[pl.program_id(0)]
    nodes = plan.nodes - pl.program_id(1) * (plan.groups * GROUP)
    groups = jnp.minimum(plan.groups, pl.cdiv(nodes, GROUP))

    @pl.when(step == 0)
    def _() -> None:
        _each(groups, lambda group: _spread_weights(named, plan, group))

    @pl.when(step * plan.tile < committed)
    def _() -> None:
        _each(groups, lambda group: _score_tile(named, plan, group, nodes, committed))

    @pl.when(step == pl.num_programs(2) - 1)
    def _() -> None:
        _each(groups, lambda group: _choose(named, plan, group, nodes, committed))


def _each(count: Any, body: Any) -> None:
    lax.fori_loop(0, count, lambda i, _: body(i), None)


def _spread_weights(refs: Refs, plan: Plan, group: Any) -> None:
    """Turns a group's weights from lanes to sublanes, where the products have their heads."""
    columns = refs.weight[0, pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP)].T
    for n in range(GROUP):
        wide = jnp.broadcast_to(columns[:, n : n + 1], (plan.heads, CHUNK))
        refs.spread[group, n * plan.heads : (n + 1) * plan.heads] = wide


def _scores(refs: Refs, plan: Plan, group: Any, keys: Array) -> list[Array]:
    """Scores of a group's nodes for `keys [M, ci]`, `[8, 128]` float32 for each chunk."""
    size = GROUP * plan.heads
    q = refs.q[0, pl.ds(pl.multiple_of(group * size, size), size)]
    dtype = q.dtype if refs.scale is not None else jnp.promote_types(q.dtype, keys.dtype)
    dots = lax.dot_general(
        q.astype(dtype),
        keys.astype(dtype),
        (((1,), (1,)), ((), ())),
        preferred_element_type=jnp.float32,
        precision=precision_of(dtype),
    )
    weight = refs.spread[group]
    chunks = []
    for first in range(0, len(keys), CHUNK):
        terms = jnp.maximum(dots[:, first : first + CHUNK], 0) * weight
        chunks.append(terms.reshape(GROUP, plan.heads, CHUNK).sum(1))
    return chunks


def _score_tile(refs: Refs, plan: Plan, group: Any, nodes: Any, committed: Any) -> None:
    first = pl.program_id(2) * plan.tile
    mine = _rows() < nodes - group * GROUP
    for c, scores in enumerate(_scores(refs, plan, group, refs.keys[0])):
        if refs.scale is not None:
            exponent = refs.scale[0, :, c * CHUNK : (c + 1) * CHUNK].astype(jnp.int32)
            scores = scores * lax.bitcast_convert_type(exponent << 23, jnp.float32)
        there = mine & (first + c * CHUNK + lane() < committed)
        refs.orders[group, first // CHUNK + c] = rising(scores, there)


def _choose(refs: Refs, plan: Plan, group: Any, nodes: Any, committed: Any) -> None:
    orders = refs.orders.at[group]
    spans = pl.cdiv(committed, PLACES)
    scored = pl.cdiv(committed, plan.tile) * (plan.tile // CHUNK)
    nobody = jnp.full((GROUP, CHUNK), LEAST, jnp.int32)

    def clear(chunk: Any, _: None) -> None:
        orders[chunk] = nobody

    lax.fori_loop(scored, spans * SPAN, clear, None)
    rows = pl.ds(pl.multiple_of(group * GROUP, GROUP), GROUP)
    bits = refs.own_bits[0, rows]
    chunks = pl.cdiv(plan.own, CHUNK)
    for c in range(chunks):
        (scores,) = _scores(refs, plan, group, refs.own[0, c * CHUNK : (c + 1) * CHUNK])
        there = unpack_chunk(bits, c) & (c * CHUNK + lane() < plan.own)
        order = rising(scores, there & (_rows() < nodes - group * GROUP))
        orders[spans * SPAN + c] = order
    lax.fori_loop(spans * SPAN + chunks, (spans + plan.own_spans) * SPAN, clear, None)
    bound = bisect(orders, spans + plan.own_spans, plan.topk)

    full, rest = divmod(plan.words[0], CHUNK)

    def write(span: Any, words: Array) -> None:
        refs.chosen[0, rows, pl.ds(pl.multiple_of(span * CHUNK, CHUNK), CHUNK)] = words

    used = jnp.minimum(spans, full)
    lax.fori_loop(0, used, lambda s, _: write(s, pack_span(orders, s, bound)), None)
    lax.fori_loop(used, full, lambda s, _: write(s, jnp.zeros_like(nobody)), None)
    if rest:
        words = jnp.where(full < spans, pack_span(orders, full, bound), 0)
        refs.chosen[0, rows, full * CHUNK :] = words[:, :rest]
    for s in range(plan.own_spans):
        words = pack_span(orders, spans + s, bound)[:, : plan.words[1] - s * CHUNK]
        refs.own_chosen[0, rows, s * CHUNK : s * CHUNK + words.shape[1]] = words


def _rows() -> Array:
    return lax.broadcasted_iota(jnp.int32, (GROUP, CHUNK), 0)


def _at_least_one(x: Any, axis: int) -> Any:
    """Zeros for leaves whose `axis` is empty."""
    if isinstance(x, PackedKeys):
        return PackedKeys(*(_at_least_one(leaf, axis) for leaf in x))
    if x.shape[axis]:
        return x
    return jnp.zeros((*x.shape[:axis], 1, *x.shape[axis + 1 :]), x.dtype)


def _all_visible(entries: IndexKeys, nodes: int) -> tuple[Array, Array]:
    """The selection where all entries together are no more than are chosen."""
    capacity, own = (values(keys).shape[1] for keys in (entries.keys, entries.own))
    seen = jnp.broadcast_to(entries.committed[:, None], (len(entries.committed), nodes))
    ours = leading(jnp.int32(own), pl.cdiv(own, WORD))
    return leading(seen, pl.cdiv(capacity, WORD)), entries.own_bits & ours
