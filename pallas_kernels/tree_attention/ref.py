"""The definition of tree attention in plain jnp: dense masks, one softmax.

Masked scores are finite and masked values are zeroed, so a buffer may hold anything, NaN included,
where nothing is committed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import Array

if TYPE_CHECKING:
    from pallas_kernels.tree_attention.op import Committed, Own

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


def _weigh(scores: list[Array], sink: Array) -> list[Array]:
    """One softmax over all sources and the sink: scores `[B, N, H, *]` to weights."""
    top = sink[:, None]
    for part in scores:
        top = jnp.maximum(top, part.max(-1, keepdims=True))
    parts = [jnp.exp(part - top) for part in scores]
    total = jnp.exp(sink[:, None] - top)
    for part in parts:
        total = total + part.sum(-1, keepdims=True)
    return [part / total for part in parts]


def _blend(weight: Array, keys: Array) -> Array:
    return jnp.einsum(
        "bnhm,bmk->bnhk", weight.astype(keys.dtype), keys, preferred_element_type=jnp.float32
    )


def entry_sources(committed: Committed, own: Own, nodes: int) -> list[tuple[Array, Array]]:
    """Compressed keys with their masks `[B, N, M]`: committed ones, then the block's own."""
    if committed.entries is None:
        return []
    batch, capacity, _ = committed.entries.shape
    there = jnp.arange(capacity) < (committed.length // committed.ratio)[:, None]
    mask = jnp.broadcast_to(there[:, None], (batch, nodes, capacity))
    if committed.selected is not None:
        mask = mask & bits(committed.selected, capacity)
    own_mask = bits(own.entry_bits, own.entries.shape[1])
    return [(committed.entries, mask), (own.entries, own_mask)]


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
    sources = [(committed.ring, ring_mask), (own.rows, row_mask)]
    sources += entry_sources(committed, own, q.shape[1])
    seen = [_seen(keys, mask) for keys, mask in sources]
    scores = [_scores(q, keys, mask) for keys, (_, mask) in zip(seen, sources, strict=True)]
    parts = zip(_weigh(scores, sink), seen, strict=True)
    return sum((_blend(weight, keys) for weight, keys in parts), start=jnp.zeros((), jnp.float32))


def chain_attention(
    q: Array, sink: Array, committed: Committed, own: Own, *, position: Array
) -> Array:
    """A chain longer than the window, in tiles of W queries against the 2 W rows around them.

    With the ring in order of position in front of the block's rows, query r of a tile sees exactly
    columns r < c <= r + W, whatever the committed length.
    """
    batch, tokens, heads, dim = q.shape
    window = committed.ring.shape[1]
    tiles = -(-tokens // window)
    pad = tiles * window - tokens
    order = (committed.length[:, None] + jnp.arange(window)) % window
    held = committed.length[:, None] - window + jnp.arange(window) >= 0
    ring = jnp.take_along_axis(committed.ring, order[..., None], axis=1)
    rows = jnp.concatenate([jnp.where(held[..., None], ring, 0), own.rows], axis=1)
    there = jnp.concatenate([held, jnp.ones((batch, tokens), bool)], axis=1)

    def band(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, tiles + 1, window, *x.shape[2:])
        x = jnp.concatenate([x[:, :-1], x[:, 1:]], axis=2)
        return x.reshape(batch * tiles, 2 * window, *x.shape[3:])

    def tile(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch * tiles, window, *x.shape[2:])

    def untile(x: Array) -> Array:
        return x.reshape(batch, tiles * window, *x.shape[2:])[:, :tokens]

    offset = jnp.arange(2 * window) - jnp.arange(window)[:, None]
    near = (offset > 0) & (offset <= window)
    keys, tiled = band(rows), tile(q)
    raw = untile(_scores(tiled, keys, near & band(there)[:, None]))
    sources = entry_sources(committed, own, tokens)
    seen = [_seen(entry, mask) for entry, mask in sources]
    scores = [raw] + [_scores(q, k, mask) for k, (_, mask) in zip(seen, sources, strict=True)]
    weights = _weigh(scores, sink)
    out = untile(_blend(tile(weights[0]), keys))
    for weight, entry in zip(weights[1:], seen, strict=True):
        out = out + _blend(weight, entry)
    return out
