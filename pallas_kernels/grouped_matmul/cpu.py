"""The routed experts on CPUs: with few pairs it reads only the experts in use.

The pairs of a row and one of its experts are sorted by expert. A pair is one column of a product,
so its arithmetic does not depend on its mates. Two forms, after what XLA makes of them:

- few pairs an expert: a loop over the pairs. The product of a vector and a slice's transpose is
  one kernel, which reads the expert where it lies;
- many pairs, so that every expert is in use: a product batched over the experts, of as many pairs
  each as is common, reads the weights where they lie too. What an expert has beyond these is cut
  into tiles of as many, and a loop visits the tiles in use; XLA copies a tile's expert first, since
  a slice at a traced index is no operand of a matrix product. All products have the same number of
  columns, since some libraries of them sum in an order that depends on it.

Weights stand on the left and pairs are columns, or XLA would transpose the weights.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.grouped_matmul.packed import Weights
from pallas_kernels.grouped_matmul.ref import dequantise

SINGLE_PAIRS = 4  # mean pairs of an expert up to which they are visited one by one
LEAST_COLUMNS = 32  # of a matrix product: fewer cost as much
COLUMN_STEP = 16

Arrays = tuple[Array, Array, Array]  # w1 [X, I, E], w3 [X, I, E], w2 [X, E, I]
Routing = tuple[Array, Array, Array]  # expert, weight, live


class Tiles(NamedTuple):
    """The pairs of live rows, sorted by expert; those beyond the batch are cut into tiles.

    A pair is named by its index m * k + choice; its place is where it is after sorting.
    """

    pair: Array  # [P + T] int32: pair at each place; the last T places are padding
    place: Array  # [P] int32: place of each pair
    start: Array  # [X] int32: an expert's first place
    stop: Array  # [X] int32: one past its last place
    tile_stop: Array  # [X] int32: one past its last tile


class Tile(NamedTuple):
    """T places of one expert; those that are not valid belong to the next expert, or to nobody."""

    expert: Array  # int32
    first: Array  # int32: its first place
    pair: Array  # [T] int32
    valid: Array  # [T] bool


def grouped_matmul(
    x: Array, weights: tuple[Weights, Weights, Weights], routing: Routing, *, limit: float
) -> Array:
    """See `op.grouped_matmul`; `weights` is (w1, w3, w2), `routing` (expert, weight, live).

    Packed weights are all dequantised first: right, and no faster than the definition.
    """
    w1, w3, w2 = (dequantise(w) for w in weights)
    return _experts(limit, x, (w1, w3, w2), routing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(limit: float, x: Array, weights: Arrays, routing: Routing) -> Array:
    w1, w3, w2 = weights
    expert, weight, live = routing
    size = tile_size(expert.size, len(w1))
    batched = size if size > 1 else 0  # pairs of every expert that are one product
    tiles = cut_tiles(expert, live, (len(w1), size, batched))
    rows = x.astype(jnp.float32)[tiles.pair // expert.shape[1]]
    scale = weight.reshape(-1)[tiles.pair]

    def visit(i: Array, y: Array) -> Array:
        tile = select_tile(tiles, i, size, batched)
        mine = lax.dynamic_slice_in_dim(rows, tile.first, size)
        weigh = lax.dynamic_slice_in_dim(scale, tile.first, size)
        # The barriers keep XLA from turning the products around and the weights with them.
        columns = lax.optimization_barrier(mine.T)
        gate, up = _product(w1, tile.expert, columns), _product(w3, tile.expert, columns)
        down = _product(w2, tile.expert, _activate(gate, up, weigh, limit))
        down = lax.optimization_barrier(down).T
        # What lands beyond the expert's last place is overwritten by the next tile.
        return lax.dynamic_update_slice(y, down, (len(w1) * batched + tile.first, 0))

    index = tiles.start[:, None] + jnp.arange(batched)
    first = _run_batch(limit, rows.at[index].get(mode="clip"), weights, scale[index])
    y = jnp.pad(first, [(0, len(tiles.pair)), (0, 0)])
    y = lax.fori_loop(0, tiles.tile_stop[-1], visit, y)
    rank = tiles.place - tiles.start[expert.reshape(-1)]
    in_batch = expert.reshape(-1) * batched + rank
    slot = jnp.where(rank < batched, in_batch, len(w1) * batched + tiles.place)
    return _sum_choices(y, slot, live, expert.shape)


def _run_batch(limit: float, rows: Array, weights: Arrays, scale: Array) -> Array:
    """Rows `[X, T, E]` and their weights `[X, T]` through their experts, to `[X * T, E]`."""
    if rows.shape[1] == 0:
        return rows.reshape(0, rows.shape[2])
    w1, w3, w2 = (w.astype(jnp.float32) for w in weights)
    columns = lax.optimization_barrier(rows.swapaxes(1, 2))
    hidden = _activate(jnp.matmul(w1, columns), jnp.matmul(w3, columns), scale[:, None], limit)
    down = lax.optimization_barrier(jnp.matmul(w2, hidden))
    return down.swapaxes(1, 2).reshape(-1, rows.shape[2])


def tile_size(pairs: int, experts: int) -> int:
    """T, the pairs of an expert that are one product.

    1, or two standard deviations above the mean if routing were even: few experts have more.
    """
    mean = pairs / experts
    if mean <= SINGLE_PAIRS:
        return 1
    common = math.ceil(mean + 2 * math.sqrt(mean))
    return max(LEAST_COLUMNS, -(-common // COLUMN_STEP) * COLUMN_STEP)


def cut_tiles(expert: Array, live: Array, shape: tuple[int, int, int]) -> Tiles:
    """Sorts pairs by expert `[M, k]`; those of dead rows come last, in no tile.

    `shape` is (X, T, batched): the first `batched` pairs of an expert are in no tile either.
    """
    experts, size, batched = shape
    key = jnp.where(live[:, None], expert, experts).reshape(-1).astype(jnp.int32)
    pair = jnp.argsort(key, stable=True).astype(jnp.int32)
    count = (key[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    stop = jnp.cumsum(count)
    return Tiles(
        pair=jnp.pad(pair, (0, size)),
        place=jnp.zeros_like(pair).at[pair].set(jnp.arange(len(pair), dtype=jnp.int32)),
        start=stop - count,
        stop=stop,
        tile_stop=jnp.cumsum(-(-jnp.maximum(count - batched, 0) // size)),
    )


def select_tile(tiles: Tiles, i: Array, size: int, batched: int = 0) -> Tile:
    """Tile i of those in use."""
    expert = jnp.sum(tiles.tile_stop <= i, dtype=jnp.int32)
    first_tile = jnp.where(expert > 0, tiles.tile_stop[expert - 1], 0)
    first = tiles.start[expert] + batched + (i - first_tile) * size
    pair = lax.dynamic_slice(tiles.pair, (first,), (size,))
    return Tile(expert, first, pair, first + jnp.arange(size) < tiles.stop[expert])


def _take(a: Array, index: Array, valid: Array) -> Array:
    """Elements or rows of `a` in float32; 0 where not valid, whatever stands there."""
    valid = valid.reshape(-1, *[1] * (a.ndim - 1))
    return jnp.where(valid, a[index].astype(jnp.float32), 0)


def _activate(gate: Array, up: Array, scale: Array, limit: float) -> Array:
    """Weight times silu(gate) times up, clamped.

    The division comes last: XLA fuses anything cheaper into the product that follows, once for
    each of its outputs.
    """
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    # The bound keeps the gradient finite; silu(-80) is 0 in every sum of float32.
    return scale * gate * up / (1 + jnp.exp(jnp.minimum(-gate, 80.0)))


def _expert(w: Array, e: Array) -> Array:
    return lax.dynamic_index_in_dim(w, e, keepdims=False).astype(jnp.float32)


def _product(w: Array, e: Array, columns: Array) -> Array:
    """`w[e] [out, in]` times `columns [in, T]`."""
    if columns.shape[1] == 1:
        return (columns[:, 0] @ _expert(w, e).T)[:, None]
    return _expert(w, e) @ columns


def _sum_choices(rows: Array, slot: Array, live: Array, shape: tuple[int, ...]) -> Array:
    """Each pair's row at `slot [P]` of `rows [.., E]` to `[M, E]`, choices added in their order."""
    pairs = rows[slot].reshape(*shape, -1)
    return jnp.where(live[:, None], pairs.sum(1), 0)


def _keep(limit: float, x: Array, weights: Arrays, routing: Routing) -> tuple[Array, Any]:
    return _experts(limit, x, weights, routing), (x, weights, routing)


def _pull_back(limit: float, kept: Any, dy: Array) -> tuple[Any, ...]:
    """Gradients by a second loop over the same tiles; hidden layers are computed again."""
    x, weights, (expert, weight, live) = kept
    size = tile_size(expert.size, len(weights[0]))
    tiles = cut_tiles(expert, live, (len(weights[0]), size, 0))

    def visit(i: Array, grads: Any) -> Any:
        dx, dscale, dw = grads
        tile = select_tile(tiles, i, size)
        row = tile.pair // expert.shape[1]
        rows, dout = _take(x, row, tile.valid), _take(dy, row, tile.valid)
        scale = _take(weight.reshape(-1), tile.pair, tile.valid)
        w1, w3, w2 = (_expert(w, tile.expert) for w in weights)
        activate = functools.partial(_activate, limit=limit)
        hidden, pull = jax.vjp(activate, w1 @ rows.T, w3 @ rows.T, scale)
        dgate, dup, scale_grad = pull((dout @ w2).T)
        dw_tile = (dgate @ rows, dup @ rows, dout.T @ hidden.T)
        return (
            lax.dynamic_update_slice(dx, dgate.T @ w1 + dup.T @ w3, (tile.first, 0)),
            lax.dynamic_update_slice(dscale, scale_grad, (tile.first,)),
            tuple(_add_at(w, tile.expert, d) for w, d in zip(dw, dw_tile, strict=True)),
        )

    places = len(tiles.pair)
    zeros = (
        jnp.zeros((places, x.shape[1]), jnp.float32),
        jnp.zeros(places, jnp.float32),
        tuple(jnp.zeros(w.shape, jnp.float32) for w in weights),
    )
    dx, dscale, dw = lax.fori_loop(0, tiles.tile_stop[-1], visit, zeros)
    dx = _sum_choices(dx, tiles.place, live, expert.shape).astype(x.dtype)
    dweight = jnp.where(live[:, None], dscale[tiles.place].reshape(weight.shape), 0)
    dw = tuple(d.astype(w.dtype) for d, w in zip(dw, weights, strict=True))
    return dx, dw, (None, dweight.astype(weight.dtype), None)


def _add_at(total: Array, e: Array, part: Array) -> Array:
    return lax.dynamic_update_index_in_dim(total, _expert(total, e) + part, e, 0)


_experts.defvjp(_keep, _pull_back)
