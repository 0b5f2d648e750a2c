"""The routed experts on TPUs: a kernel over tiles of rows that share an expert.

Pairs of a row and one of its experts are sorted by expert, and each expert's pairs start a new tile
of T rows. The kernel visits the tiles in use and, within one, blocks of the hidden width: gate and
up, SwiGLU, and the block's share of down meet in VMEM, so hidden rows never leave it. An expert's
weights are read once for each of its tiles; T is chosen so that most experts have one.

A row's products depend on no other row: it is a row of a matrix product whose shape is static.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.grouped_matmul.packed import Fp4Weights, Fp8Weights, Weights
from pallas_kernels.grouped_matmul.tpu_plan import (
    BLOCK_BYTES,
    VMEM_LIMIT,
    Plan,
    Triple,
    make_plan,
    traffic,
)
from pallas_kernels.grouped_matmul.tpu_weights import WeightTile, multiply, split_parity

__all__ = ["grouped_matmul", "traffic"]

LANES = 128
PACKED = (Fp8Weights, Fp4Weights)
Operands = tuple[Array, Triple, tuple[Array, Array, Array]]


class Places(NamedTuple):
    """Where pairs stand after sorting, T places a tile; pair m * k + choice is choice of row m."""

    expert: Array  # [tiles] int32: of each tile
    used: Array  # int32: tiles in use
    row: Array  # [tiles * T] int32: the row of x at each place; 0 where nobody is
    place: Array  # [P] int32: of each pair; 0 for those of dead rows


def grouped_matmul(
    x: Array,
    weights: Triple,
    routing: tuple[Array, Array, Array],
    *,
    limit: float,
    block_bytes: int = BLOCK_BYTES,
) -> Array:
    """See `op.grouped_matmul`; forward only.

    Rows in bfloat16 meet weights in bfloat16, FP8 or FP4 as they are; hidden rows, in float32, are
    taken as sums of two bfloat16 numbers, which hold 16 bits of them. With x or a plain weight in
    float32 everything is.

    Args:
        x: `[M, E]`.
        weights: (w1, w3, w2), all plain, all FP8 or all FP4.
        routing: (expert, weight, live).
        limit: the clamp, static.
        block_bytes: of weights at a time, static; VMEM holds them twice, to read ahead.

    Raises:
        ValueError: weights of several kinds.
        NotImplementedError: on differentiation.
    """
    if len({type(w) if isinstance(w, PACKED) else Array for w in weights}) > 1:
        raise ValueError("the TPU kernel takes weights of one kind: all plain, all FP8 or all FP4")
    return _forward(limit, block_bytes, (x, weights, routing))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _forward(limit: float, block_bytes: int, operands: Operands) -> Array:
    x, weights, (expert, weight, live) = operands
    plan = make_plan(weights, expert.shape, block_bytes)
    places = sort_pairs(expert, live, weights[0].shape[0], plan)
    plain = [w.dtype for w in weights if not isinstance(w, PACKED)]
    x = x.astype(functools.reduce(jnp.promote_types, plain, x.dtype))
    if isinstance(weights[0], Fp4Weights):
        x = jnp.concatenate([x[:, ::2], x[:, 1::2]], axis=1)
    y = _run(x[places.row], weights, places, plan, limit)
    pairs = y[places.place].reshape(*expert.shape, -1)
    # Down is linear, so the weight may come after it, where no place needs one of its own.
    return jnp.where(live[:, None], (pairs * weight[..., None]).sum(1), 0)


def _no_gradient(*_: Any) -> Any:
    raise NotImplementedError(
        "the TPU kernel of grouped_matmul has no gradient; differentiate impl='ref'"
    )


_forward.defvjp(_no_gradient, _no_gradient)


def sort_pairs(expert: Array, live: Array, experts: int, plan: Plan) -> Places:
    """Places for the pairs of live rows, `expert [M, k]`; others have none."""
    key = jnp.where(live[:, None], expert, experts).reshape(-1).astype(jnp.int32)
    pair = jnp.argsort(key, stable=True).astype(jnp.int32)
    count = (key[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    stop_tile = jnp.cumsum(pl.cdiv(count, plan.rows))
    # Sorted pair i is the (i - start)-th of its expert.
    start = jnp.cumsum(count) - count
    first = (stop_tile - pl.cdiv(count, plan.rows)) * plan.rows
    mine = jnp.minimum(key[pair], experts - 1)
    place = first[mine] + jnp.arange(len(pair), dtype=jnp.int32) - start[mine]
    there = key[pair] < experts
    # A scatter drops what lies beyond the end.
    row = jnp.zeros(plan.tiles * plan.rows, jnp.int32)
    row = row.at[jnp.where(there, place, row.size)].set(pair // expert.shape[1], mode="drop")
    tile = jnp.arange(plan.tiles)[:, None]
    return Places(
        expert=jnp.minimum((stop_tile <= tile).sum(1, dtype=jnp.int32), experts - 1),
        used=stop_tile[-1],
        row=row,
        place=jnp.zeros_like(pair).at[pair].set(jnp.where(there, place, 0)),
    )


def _run(rows: Array, weights: Triple, places: Places, plan: Plan, limit: float) -> Array:
    """Sorted rows `[tiles * T, E]` through their experts; tiles that are not in use hold junk."""
    operands: list[Array] = [rows]
    specs = [pl.BlockSpec((plan.rows, plan.width), lambda t, i, expert: (t, 0))]
    for w, down in zip(weights, (False, False, True), strict=True):
        for leaf, spec in _weight_blocks(w, plan, down):
            operands.append(leaf)
            specs.append(spec)
    packed = isinstance(weights[0], PACKED)
    turned = tuple(_is_turned(w) for w in weights)
    return pl.pallas_call(
        functools.partial(_kernel, plan=plan, limit=limit, packed=packed, turned=turned),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(jnp.maximum(places.used, 1), plan.blocks),
            in_specs=specs,
            out_specs=pl.BlockSpec((plan.rows, plan.width), lambda t, i, expert: (t, 0)),
            scratch_shapes=[pltpu.VMEM((plan.rows, plan.block), jnp.float32)] * 2,
        ),
        out_shape=jax.ShapeDtypeStruct(rows.shape, jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="grouped_matmul",
    )(places.expert, *operands)


def _weight_blocks(w: Weights, plan: Plan, down: bool) -> list[tuple[Array, pl.BlockSpec]]:
    """What the kernel reads of a tile's expert: a block of the hidden width, and its scales.

    The hidden width is that of the rows of w1 and w3 and of the columns of w2 (`down`).
    """

    def block(leaf: Array, parts: int) -> tuple[Array, pl.BlockSpec]:
        shape = [1, *leaf.shape[1:]]
        shape[1 + down] //= parts

        def index(t: Any, i: Any, expert: Any) -> Any:
            part = i if parts > 1 else 0
            return (expert[t], 0, part) if down else (expert[t], part, 0)

        return leaf, pl.BlockSpec(tuple(shape), index)

    if not isinstance(w, PACKED):
        return [block(w, plan.blocks)]
    scale = w.scale.swapaxes(1, 2) if _is_turned(w) else w.scale
    # Scales of e2m1 follow the rows of w1 and w3; the other ones are few, and come whole.
    by_row = isinstance(w, Fp4Weights) and not down and not _is_turned(w)
    return [block(w.value, plan.blocks), block(scale, plan.blocks if by_row else 1)]


def _is_turned(w: Weights) -> bool:
    """Whether scales have the weights' rows in their lanes: always where groups fill none.

    XLA lays such an array out in this way, and would copy the scales of all experts otherwise.
    """
    return isinstance(w, Fp4Weights) and w.scale.shape[2] < LANES <= w.scale.shape[1]


def _kernel(
    expert: Any, x: Any, *refs: Any, plan: Plan, limit: float, packed: bool, turned: Any
) -> None:
    """One block of the hidden width of one tile of rows."""
    *leaves, y, gate, up = refs
    first = pl.program_id(1) * plan.block
    scales = leaves[1::2] if packed else [None] * 3
    values = leaves[::2] if packed else leaves
    w1, w3, w2 = (WeightTile(*parts) for parts in zip(values, scales, turned, strict=True))
    for w, out in ((w1, gate), (w3, up)):
        multiply(x[...], w._replace(row=first), functools.partial(_put, out))
    hidden = _activate(gate[...], up[...], limit)
    if x.dtype != jnp.float32:
        # The rest of the rounding to bfloat16 goes along as rows of their own: the weights, which
        # take the time of a product with few rows, pass once.
        high = hidden.astype(x.dtype)
        low = (hidden - high.astype(jnp.float32)).astype(x.dtype)
        hidden = jnp.concatenate([high, low], axis=0)
    if w2.kind == "fp4":
        hidden = split_parity(hidden)

    @pl.when(first == 0)
    def _() -> None:
        y[...] = jnp.zeros_like(y)

    def add(column: Any, part: Array) -> None:
        parts = part.reshape(-1, plan.rows, part.shape[1])
        y[:, pl.ds(column, part.shape[1])] += parts.sum(0)

    multiply(hidden, w2._replace(column=first), add)


def _put(out: Any, column: Any, part: Array) -> None:
    out[:, pl.ds(column, part.shape[1])] = part


def _activate(gate: Array, up: Array, limit: float) -> Array:
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate / (1 + jnp.exp(-gate)) * up
