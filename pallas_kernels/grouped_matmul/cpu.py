"""The routed experts on CPUs: reads only the experts in use.

The pairs of a row and one of its experts are sorted by expert and cut into tiles of at most T
pairs of one expert; a loop visits the tiles in use. A pair is one row of its tile's products, so
its arithmetic does not depend on its mates. Inside a tile a product takes one of two forms:

- few pairs: the weights are streamed, `acc += x[:, e] * w[e]` over the rows of the matrix. XLA
  makes one kernel of this loop, which reads the expert where it lies;
- many pairs: a `dot`, which XLA gives a copy of the expert, since a slice at a traced index is no
  operand of its matrix product.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

STREAMED_PAIRS = 16  # the largest tile that streams; a larger one gains more from a dot
LARGEST_TILE = 128

Weights = tuple[Array, Array, Array]  # w1, w3, w2
Routing = tuple[Array, Array, Array]  # expert, weight, live


class Tiles(NamedTuple):
    """The pairs of live rows, sorted by expert and cut into tiles.

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


def grouped_matmul(x: Array, weights: Weights, routing: Routing, *, limit: float) -> Array:
    """See `op.grouped_matmul`; `weights` is (w1, w3, w2), `routing` (expert, weight, live)."""
    return _experts(limit, x, weights, routing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(limit: float, x: Array, weights: Weights, routing: Routing) -> Array:
    w1, w3, w2 = weights
    expert, weight, live = routing
    size = tile_size(expert.size, len(w1))
    tiles = cut_tiles(expert, live, len(w1), size)

    def visit(i: Array, y: Array) -> Array:
        tile = select_tile(tiles, i, size)
        rows = _take(x, tile.pair // expert.shape[1], tile.valid)
        scale = _take(weight.reshape(-1), tile.pair, tile.valid)
        gate, up = _product(rows, w1, tile.expert), _product(rows, w3, tile.expert)
        down = _product(_activate(gate, up, scale, limit), w2, tile.expert)
        # What lands beyond the expert's last place is overwritten by the next tile.
        return lax.dynamic_update_slice(y, down, (tile.first, 0))

    y = jnp.zeros((len(tiles.pair), x.shape[1]), jnp.float32)
    y = lax.fori_loop(0, tiles.tile_stop[-1], visit, y)
    return _sum_choices(y, tiles, live, expert.shape)


def tile_size(pairs: int, experts: int) -> int:
    """T, the power of two at or above the mean number of pairs of an expert."""
    mean = -(-pairs // experts)
    return min(LARGEST_TILE, 1 << (mean - 1).bit_length())


def cut_tiles(expert: Array, live: Array, experts: int, size: int) -> Tiles:
    """Sorts pairs by expert `[M, k]`; those of dead rows come last, in no tile."""
    key = jnp.where(live[:, None], expert, experts).reshape(-1).astype(jnp.int32)
    pair = jnp.argsort(key, stable=True).astype(jnp.int32)
    count = (key[:, None] == jnp.arange(experts)).sum(0, dtype=jnp.int32)
    stop = jnp.cumsum(count)
    return Tiles(
        pair=jnp.pad(pair, (0, size)),
        place=jnp.zeros_like(pair).at[pair].set(jnp.arange(len(pair), dtype=jnp.int32)),
        start=stop - count,
        stop=stop,
        tile_stop=jnp.cumsum(-(-count // size)),
    )


def select_tile(tiles: Tiles, i: Array, size: int) -> Tile:
    """Tile i of those in use."""
    expert = jnp.sum(tiles.tile_stop <= i, dtype=jnp.int32)
    first_tile = jnp.where(expert > 0, tiles.tile_stop[expert - 1], 0)
    first = tiles.start[expert] + (i - first_tile) * size
    pair = lax.dynamic_slice(tiles.pair, (first,), (size,))
    return Tile(expert, first, pair, first + jnp.arange(size) < tiles.stop[expert])


def _take(a: Array, index: Array, valid: Array) -> Array:
    """Elements or rows of `a` in float32; 0 where not valid, whatever stands there."""
    valid = valid.reshape(-1, *[1] * (a.ndim - 1))
    return jnp.where(valid, a[index].astype(jnp.float32), 0)


def _activate(gate: Array, up: Array, scale: Array, limit: float) -> Array:
    hidden = jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)
    return scale[:, None] * hidden


def _expert(w: Array, e: Array) -> Array:
    return lax.dynamic_index_in_dim(w, e, keepdims=False).astype(jnp.float32)


def _product(x: Array, w: Array, e: Array) -> Array:
    """`x [T, E]` times `w[e] [E, I]`."""
    if len(x) > STREAMED_PAIRS:
        return x @ _expert(w, e)
    unroll = next(n for n in (4, 2, 1) if x.shape[1] % n == 0)

    def add_rows(i: Array, acc: Array) -> Array:
        for r in [i * unroll + n for n in range(unroll)]:
            row = lax.dynamic_slice(w, (e, r, 0), (1, 1, w.shape[2]))[0]
            acc = acc + lax.dynamic_slice_in_dim(x, r, 1, axis=1) * row.astype(jnp.float32)
        return acc

    zero = jnp.zeros((len(x), w.shape[2]), jnp.float32)
    return lax.fori_loop(0, x.shape[1] // unroll, add_rows, zero)


def _sum_choices(sorted_rows: Array, tiles: Tiles, live: Array, shape: tuple[int, ...]) -> Array:
    """Sorted rows `[P + T, E]` to `[M, E]`, a row's choices added in their order."""
    pairs = sorted_rows[tiles.place].reshape(*shape, -1)
    return jnp.where(live[:, None], pairs.sum(1), 0)


def _keep(limit: float, x: Array, weights: Weights, routing: Routing) -> tuple[Array, Any]:
    return _experts(limit, x, weights, routing), (x, weights, routing)


def _pull_back(limit: float, kept: Any, dy: Array) -> tuple[Any, ...]:
    """Gradients by a second loop over the same tiles; hidden layers are computed again."""
    x, weights, (expert, weight, live) = kept
    size = tile_size(expert.size, len(weights[0]))
    tiles = cut_tiles(expert, live, len(weights[0]), size)

    def visit(i: Array, grads: Any) -> Any:
        dx, dscale, dw = grads
        tile = select_tile(tiles, i, size)
        row = tile.pair // expert.shape[1]
        rows, dout = _take(x, row, tile.valid), _take(dy, row, tile.valid)
        scale = _take(weight.reshape(-1), tile.pair, tile.valid)
        w1, w3, w2 = (_expert(w, tile.expert) for w in weights)
        activate = functools.partial(_activate, limit=limit)
        hidden, pull = jax.vjp(activate, rows @ w1, rows @ w3, scale)
        dgate, dup, scale_grad = pull(dout @ w2.T)
        dw_tile = (rows.T @ dgate, rows.T @ dup, hidden.T @ dout)
        return (
            lax.dynamic_update_slice(dx, dgate @ w1.T + dup @ w3.T, (tile.first, 0)),
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
    dx = _sum_choices(dx, tiles, live, expert.shape).astype(x.dtype)
    dweight = jnp.where(live[:, None], dscale[tiles.place].reshape(weight.shape), 0)
    dw = tuple(d.astype(w.dtype) for d, w in zip(dw, weights, strict=True))
    return dx, dw, (None, dweight.astype(weight.dtype), None)


def _add_at(total: Array, e: Array, part: Array) -> Array:
    return lax.dynamic_update_index_in_dim(total, _expert(total, e) + part, e, 0)


_experts.defvjp(_keep, _pull_back)
