"""The definition of tree attention in plain jnp: dense masks, one softmax.

Masked scores are finite and masked values are zeroed, so a buffer may hold anything, NaN included,
where nothing is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.tree_attention.forms import plain, quantise
from pallas_kernels.tree_attention.sources import Committed, Own

__all__ = ["bits", "quantise", "ring_positions", "tree_attention"]

LOWEST = jnp.finfo(jnp.float32).min


def bits(words: Array, size: int) -> Array:
    """Packed `[..., ceil(size / 32)]` uint32 to bool `[..., size]`."""
    every = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    return every.reshape(*words.shape[:-1], -1)[..., :size] == 1


def ring_positions(length: Array, window: int) -> Array:
    """Position held by each ring slot, `[B]` to `[B, W]`; negative where nothing is."""
    newest = length[:, None] - 1
    return newest - (newest - jnp.arange(window)) % window


def _seen(keys: Array, mask: Array) -> Array:
    """Keys `[B, M, K]` with those that no query of `mask [B, N, M]` sees set to zero."""
    return jnp.where(mask.any(1)[..., None], keys, 0)


def _scores(q: Array, keys: Array, mask: Array) -> Array:
    """Scaled scores `[B, N, H, M]` float32, finite where masked."""
    scores = jnp.einsum("bnhk,bmk->bnhm", q, keys, preferred_element_type=jnp.float32)
    return jnp.where(mask[:, :, None], scores * q.shape[-1] ** -0.5, LOWEST)


class Source(NamedTuple):
    """Scores against some keys, and the weighted sum of these keys."""

    scores: Array  # [B, N, H, M]
    sum: Callable[[Array], Array]  # weights [B, N, H, M] to [B, N, H, K] float32


def _source(q: Array, keys: Array, mask: Array) -> Source:
    seen = _seen(keys, mask)
    return Source(_scores(q, seen, mask), partial(_sum, seen))


def _sum(keys: Array, weight: Array) -> Array:
    return jnp.einsum(
        "bnhm,bmk->bnhk", weight.astype(keys.dtype), keys, preferred_element_type=jnp.float32
    )


def _blend(sources: list[Source], sink: Array) -> Array:
    """One softmax over all sources and the sink; the mean of the keys under it.

    The sum is divided instead of the weights: it is smaller.
    """
    top = sink[:, None]
    for source in sources:
        top = jnp.maximum(top, source.scores.max(-1, keepdims=True))
    total, out = jnp.exp(sink[:, None] - top), jnp.zeros((), jnp.float32)
    for source in sources:
        weight = jnp.exp(source.scores - top)
        total = total + weight.sum(-1, keepdims=True)
        out = out + source.sum(weight)
    return out / total


def _entry_sources(q: Array, committed: Committed, own: Own) -> list[Source]:
    """Compressed entries: committed ones, then the block's own."""
    if committed.entries is None:
        return []
    batch, nodes = q.shape[:2]
    entries = plain(committed.entries, q.dtype)
    capacity = entries.shape[1]
    there = jnp.arange(capacity) < (committed.length // committed.ratio)[:, None]
    mask = jnp.broadcast_to(there[:, None], (batch, nodes, capacity))
    if committed.selected is not None:
        mask = mask & bits(committed.selected, capacity)
    own_mask = bits(own.entry_bits, own.entries.shape[1])
    return [_source(q, entries, mask), _source(q, own.entries, own_mask)]


def tree_attention(
    q: Array, sink: Array, committed: Committed, own: Own, *, position: Array
) -> Array:
    """See `op.tree_attention`."""
    if own.row_bits is None and q.shape[1] > committed.ring.shape[1]:
        return chain_attention(q, sink, committed, own)
    return block_attention(q, sink, committed, own, position=position)


def block_attention(
    q: Array, sink: Array, committed: Committed, own: Own, *, position: Array
) -> Array:
    """A tree, or a chain no longer than the window: every key against every query."""
    window = committed.ring.shape[1]
    slots = ring_positions(committed.length, window)[:, None]
    ring_mask = (slots >= 0) & (slots > position[..., None] - window)
    rows = own.rows.shape[1]
    if own.row_bits is None:
        row_mask = jnp.tril(jnp.ones((rows, rows), bool))[None]
    else:
        row_mask = bits(own.row_bits, rows)
    row_mask = row_mask & (own.row_position[:, None] > position[..., None] - window)
    sources = [_source(q, committed.ring, ring_mask), _source(q, own.rows, row_mask)]
    return _blend(sources + _entry_sources(q, committed, own), sink)


def chain_attention(q: Array, sink: Array, committed: Committed, own: Own) -> Array:
    """A chain longer than the window: tiles of queries, each against the rows around it.

    With the ring in order of position in front of the block's rows, query r of a tile sees exactly
    columns r < c <= r + W of the W + tile that its tile gets, whatever the committed length.
    """
    batch, tokens = q.shape[:2]
    window = committed.ring.shape[1]
    size = window // 2 if window % 2 == 0 else window
    tiles, reach = -(-tokens // size), window // size
    pad = tiles * size - tokens

    def tile(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch * tiles, size, *x.shape[2:])

    def untile(x: Array) -> Array:
        return x.reshape(batch, tiles * size, *x.shape[2:])[:, :tokens]

    def band(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, reach + tiles, size, *x.shape[2:])
        x = jnp.concatenate([x[:, i : i + tiles] for i in range(reach + 1)], axis=2)
        return x.reshape(batch * tiles, window + size, *x.shape[3:])

    order = (committed.length[:, None] + jnp.arange(window)) % window
    held = committed.length[:, None] - window + jnp.arange(window) >= 0
    ring = jnp.take_along_axis(committed.ring, order[..., None], axis=1)
    rows = band(jnp.concatenate([jnp.where(held[..., None], ring, 0), own.rows], axis=1))
    there = band(jnp.concatenate([held, jnp.ones((batch, tokens), bool)], axis=1))
    offset = jnp.arange(window + size) - jnp.arange(size)[:, None]
    near = (offset > 0) & (offset <= window) & there[:, None]
    raw = Source(
        scores=untile(_scores(tile(q), rows, near)),
        sum=lambda weight: untile(_sum(rows, tile(weight))),
    )
    return _blend([raw, *_entry_sources(q, committed, own)], sink)
