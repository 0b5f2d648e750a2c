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

from pallas_kernels.precision import precision_of
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


def scores(q: Array, keys: Array, mask: Array) -> Array:
    """Scaled scores `[B, N, H, M]` float32, finite where masked."""
    dots = jnp.einsum(
        "bnhk,bmk->bnhm",
        q,
        keys,
        precision=precision_of(jnp.promote_types(q.dtype, keys.dtype)),
        preferred_element_type=jnp.float32,
    )
    return jnp.where(mask[:, :, None], dots * q.shape[-1] ** -0.5, LOWEST)


class Source(NamedTuple):
    """Scores against some keys, and the weighted sum of these keys."""

    scores: Array  # [B, N, H, M]
    sum: Callable[[Array], Array]  # weights [B, N, H, M] to [B, N, H, K] float32


def source(q: Array, keys: Array, mask: Array) -> Source:
    """Keys `[B, M, K]` under a mask `[B, N, M]`, which may hold anything where nobody sees them."""
    seen = _seen(keys, mask)
    return Source(scores(q, seen, mask), partial(weighted_sum, seen))


def weighted_sum(keys: Array, weight: Array) -> Array:
    """Keys `[B, M, K]`, which are values too, under weights `[B, N, H, M]`: `[B, N, H, K]`."""
    return jnp.einsum(
        "bnhm,bmk->bnhk",
        weight.astype(keys.dtype),
        keys,
        precision=precision_of(keys.dtype),
        preferred_element_type=jnp.float32,
    )


def blend(sources: list[Source], sink: Array) -> Array:
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


def committed_source(q: Array, committed: Committed) -> Source:
    """The committed entries, under the selection if there is one."""
    entries = plain(committed.entries, q.dtype)
    capacity = entries.shape[1]
    there = jnp.arange(capacity) < (committed.length // committed.ratio)[:, None]
    mask = jnp.broadcast_to(there[:, None], (*q.shape[:2], capacity))
    if committed.selected is not None:
        mask = mask & bits(committed.selected, capacity)
    return source(q, entries, mask)


def tree_attention(
    q: Array, sink: Array, committed: Committed, own: Own, *, position: Array
) -> Array:
    """See `op.tree_attention`."""
    window = committed.ring.shape[1]
    slots = ring_positions(committed.length, window)[:, None]
    ring_mask = (slots >= 0) & (slots > position[..., None] - window)
    rows = own.rows.shape[1]
    if own.row_bits is None:
        row_mask = jnp.tril(jnp.ones((rows, rows), bool))[None]
    else:
        row_mask = bits(own.row_bits, rows)
    row_mask = row_mask & (own.row_position[:, None] > position[..., None] - window)
    sources = [source(q, committed.ring, ring_mask), source(q, own.rows, row_mask)]
    if committed.entries is not None:
        entry_mask = bits(own.entry_bits, own.entries.shape[1])
        sources += [committed_source(q, committed), source(q, own.entries, entry_mask)]
    return blend(sources, sink)
