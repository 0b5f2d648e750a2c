"""Tree attention on CPUs: the definition, and for a long chain no dense scores of its rows.

A chain longer than the window goes through tiles of queries, each against the raw rows around it.
Committed entries are left out while there are none, so that the first chunk of a prefill, often the
only one, does not pay for their capacity.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.tree_attention import ref
from pallas_kernels.tree_attention.ref import Source
from pallas_kernels.tree_attention.sources import Committed, Own


def tree_attention(
    q: Array, sink: Array, committed: Committed, own: Own, *, position: Array
) -> Array:
    """See `op.tree_attention`."""
    if own.row_bits is None and q.shape[1] > committed.ring.shape[1]:
        return chain_attention(q, sink, committed, own)
    return ref.tree_attention(q, sink, committed, own, position=position)


def chain_attention(q: Array, sink: Array, committed: Committed, own: Own) -> Array:
    """Attention of a chain longer than the window, whose positions need not be told."""

    def attend(entries: bool) -> Array:
        sources = [_raw_source(q, committed, own)]
        if entries:
            sources.append(ref.committed_source(q, committed))
        if own.entries is not None:
            mask = ref.bits(own.entry_bits, own.entries.shape[1])
            sources.append(ref.source(q, own.entries, mask))
        return ref.blend(sources, sink)

    if committed.entries is None:
        return attend(entries=False)
    held = committed.length // committed.ratio
    return lax.cond(held.max() > 0, lambda: attend(entries=True), lambda: attend(entries=False))


def _raw_source(q: Array, committed: Committed, own: Own) -> Source:
    """The raw rows, by tiles of queries.

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
    return Source(
        scores=untile(ref.scores(tile(q), rows, near)),
        sum=lambda weight: untile(ref.weighted_sum(rows, tile(weight))),
    )
