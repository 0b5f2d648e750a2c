"""The committed state of a sequence and the one function that changes it.

`forward` returns rows and no cache; `extend` selects the accepted path's rows by index and appends
them. It moves rows and never computes, so it needs no weights. Written for one sequence and
`vmap`ped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxspec.config import CSA_RATIO, ModelConfig


class LayerCache(struct.PyTreeNode):
    """One layer's committed state; one type for all three layer kinds (leaves `[B, ...]`).

    Position p's raw row lies in ring slot `p mod W`. Entry e folds the tokens up to
    `(e + 1) R - 1` and is written when the last of them is committed. `open` holds the pools of
    the unfinished windows: P slots of (running maximum, denominator, numerator) a channel, slot s
    for entry `length // R + s` (P = 2 for CSA, whose tokens feed two entries, 1 for HCA).
    """

    ring: Array  # [B, W, K] raw KV rows
    entries: Any  # [B, C, K], or a form of it (`model/entries.py`); None on sliding layers
    open: Any  # [B, P, 3, K] float32, or None
    keys: Any  # [B, C, ci] the indexer's keys (CSA), or None
    key_open: Any  # [B, P, 3, ci] float32, or None
    ratio: int = struct.field(pytree_node=False)


class Cache(struct.PyTreeNode):
    """The committed state of a batch of sequences."""

    layers: tuple[LayerCache, ...]
    length: Array  # [B] int32: committed tokens


class LayerRows(struct.PyTreeNode):
    """What the nodes of a block would add to one layer (leaves `[B, ...]`).

    A tree has one entry and one open state a node (J = O = N). A chain, which commits whole or not
    at all, has one entry per window end and only its final open state (O = 1).
    """

    kv: Array  # [B, N, K]
    entry: Any  # [B, J, K] in the form of the cache's entries, or None on sliding layers
    key: Any  # [B, J, ci], or None
    owner: Any  # [B, J] int32: the node that completes entry j
    complete: Any  # [B, J] bool: whether entry j is one
    open: Any  # [B, O, P, 3, K] float32: after the node
    key_open: Any  # [B, O, P, 3, ci] float32


def pools(ratio: int) -> int:
    """Unfinished entries that a token feeds: 2 with CSA's overlapping windows, 1 for HCA."""
    return 2 if ratio == CSA_RATIO else 1


def empty_pool(shape: tuple[int, ...], dim: int) -> Array:
    """The identity of pooling `[*shape, 3, dim]`: (finfo.min, 0, 0) a channel, never -inf."""
    zero = jnp.zeros((*shape, dim), jnp.float32)
    return jnp.stack([zero + jnp.finfo(jnp.float32).min, zero, zero], axis=-2)


def plain(entries: Array) -> Array:
    """Entries `[B, C, K]` in the plain form: as they are."""
    return entries


def init_layer(
    cfg: ModelConfig,
    ratio: int,
    batch: int,
    max_len: int,
    dtype: Any = jnp.float32,
    *,
    form: Callable[[Array], Any] = plain,
) -> LayerCache:
    """An empty layer that holds up to `max_len` committed tokens; `form` is that of its entries."""
    ring = jnp.zeros((batch, cfg.sliding_window, cfg.head_dim), dtype)
    if ratio == 0:
        return LayerCache(ring, None, None, None, None, ratio)
    capacity = max(max_len // ratio, 1)
    entries = form(jnp.zeros((batch, capacity, cfg.head_dim), dtype))
    opened = empty_pool((batch, pools(ratio)), cfg.head_dim)
    if ratio != CSA_RATIO:
        return LayerCache(ring, entries, opened, None, None, ratio)
    keys = jnp.zeros((batch, capacity, cfg.index_head_dim), dtype)
    key_open = empty_pool((batch, pools(ratio)), cfg.index_head_dim)
    return LayerCache(ring, entries, opened, keys, key_open, ratio)


def init_cache(
    cfg: ModelConfig,
    batch: int,
    max_len: int,
    dtype: Any = jnp.float32,
    *,
    form: Callable[[Array], Any] = plain,
) -> Cache:
    """An empty cache for `batch` sequences of up to `max_len` committed tokens (>= 1).

    `form` brings plain entries `[B, C, K]` to the form in which they are held (`model/entries.py`).
    """
    if batch < 1 or max_len < 1:
        raise ValueError(f"batch {batch} and max_len {max_len} must be at least 1")
    layers = tuple(
        init_layer(cfg, ratio, batch, max_len, dtype, form=form) for ratio in cfg.compress_ratios
    )
    return Cache(layers, jnp.zeros(batch, jnp.int32))


def extend(cache: Cache, rows: tuple[LayerRows, ...], path: Array | None, count: Array) -> Cache:
    """Appends the rows of the accepted path: the only writer of a cache.

    Args:
        cache: committed state.
        rows: of the pass that verified the block, one per layer.
        path: `[B, P]` int32 nodes from the root down; None for a chain.
        count: `[B]` how many of them to commit, the root included. 0 changes nothing. A chain
            commits its valid length or 0; anything else is undefined, as its open state is known
            at its end alone.

    Returns:
        The cache with `count` more tokens.
    """
    layers = tuple(
        extend_layer(layer, row, path, cache.length, count)
        for layer, row in zip(cache.layers, rows, strict=True)
    )
    return Cache(layers, cache.length + count)


@jax.named_scope("cache.extend")
def extend_layer(
    layer: LayerCache, rows: LayerRows, path: Array | None, length: Array, count: Array
) -> LayerCache:
    """`extend` for one layer; `length [B]` is the committed length before."""
    if path is None:
        nodes = jnp.arange(rows.kv.shape[1], dtype=jnp.int32)
        path = jnp.broadcast_to(nodes, rows.kv.shape[:2])
    return jax.vmap(_extend_one)(layer, rows, path, length, count)


def _extend_one(
    layer: LayerCache, rows: LayerRows, path: Array, length: Array, count: Array
) -> LayerCache:
    layer = layer.replace(ring=_extend_ring(layer.ring, rows.kv, path, length, count))
    if layer.ratio == 0:
        return layer
    first = length // layer.ratio
    index = first + jnp.arange(-(-path.shape[0] // layer.ratio))
    depth = (index + 1) * layer.ratio - 1 - length  # of the node that ends window `index`
    accepted = depth < count
    node = path[jnp.minimum(depth, path.shape[0] - 1)]
    hit = (rows.owner == node[:, None]) & rows.complete & accepted[:, None]  # [written, J]
    row = jnp.argmax(hit, axis=1)
    # A place past the end is dropped; the engine admits nothing that would need one.
    capacity = jax.tree.leaves(layer.entries)[0].shape[0]
    place = jnp.where(hit.any(1), index, capacity)
    last = path[jnp.maximum(count - 1, 0)]

    def write(store: Array, new: Array) -> Array:
        return store.at[place].set(new[row], mode="drop")

    def replace(old: Any, new: Any) -> Any:
        if old is None:
            return None
        return jnp.where(count > 0, new[jnp.minimum(last, new.shape[0] - 1)], old)

    return layer.replace(
        entries=jax.tree.map(write, layer.entries, rows.entry),
        keys=jax.tree.map(write, layer.keys, rows.key),
        open=replace(layer.open, rows.open),
        key_open=replace(layer.key_open, rows.key_open),
    )


def _extend_ring(ring: Array, kv: Array, path: Array, length: Array, count: Array) -> Array:
    """Writes the last W accepted rows, so that no slot is written twice."""
    window = ring.shape[0]
    reach = min(path.shape[0], window)
    depth = count - reach + jnp.arange(reach)
    slot = jnp.where(depth >= 0, (length + depth) % window, window)
    return ring.at[slot].set(kv[path[jnp.maximum(depth, 0)]], mode="drop")
