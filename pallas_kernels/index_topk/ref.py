"""The definition of the indexer's selection in plain jnp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.index_topk.packed import unpack_keys
from pallas_kernels.precision import precision_of

if TYPE_CHECKING:
    from pallas_kernels.index_topk.op import IndexKeys

LOWEST = jnp.finfo(jnp.float32).min


def index_scores(q: Array, weight: Array, keys: Array) -> Array:
    """sum_h weight_h relu(q_h . key): `[B, N, M]` float32."""
    dots = jnp.einsum(
        "bnhc,bmc->bnhm",
        q,
        keys,
        precision=precision_of(jnp.promote_types(q.dtype, keys.dtype)),
        preferred_element_type=jnp.float32,
    )
    return (jax.nn.relu(dots) * weight[..., None]).sum(2)


def largest(scores: Array, count: int) -> Array:
    """The `count` largest along the last axis as a mask; of equal ones those of lowest index."""
    # -0 becomes 0, its equal; XLA drops the addition of a zero. The sort is stable.
    _, best = jax.lax.top_k(jnp.where(scores == 0, jnp.abs(scores), scores), count)
    return (best[..., None] == jnp.arange(scores.shape[-1])).any(-2)


def index_topk(
    q: Array,
    weight: Array,
    entries: IndexKeys,
    *,
    topk: int,
    largest: Callable[[Array, int], Array] = largest,
) -> tuple[Array, Array]:
    """See `op.index_topk`; `largest` is what chooses."""
    batch, nodes = q.shape[:2]
    keys, own_keys = unpack_keys(entries.keys), unpack_keys(entries.own)
    capacity, own = keys.shape[1], own_keys.shape[1]
    there = jnp.arange(capacity) < entries.committed[:, None]
    visible = jnp.concatenate(
        [
            jnp.broadcast_to(there[:, None], (batch, nodes, capacity)),
            _unpack(entries.own_bits, own),
        ],
        axis=-1,
    )
    if capacity + own > topk:
        parts = [index_scores(q, weight, k) for k in (keys, own_keys)]
        scores = jnp.where(visible, jnp.concatenate(parts, axis=-1), LOWEST)
        visible = visible & largest(scores, topk)
    return _pack(visible[..., :capacity]), _pack(visible[..., capacity:])


def _unpack(words: Array, size: int) -> Array:
    every = (words[..., None] >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    return every.reshape(*words.shape[:-1], -1)[..., :size] == 1


def _pack(mask: Array) -> Array:
    words = -(-mask.shape[-1] // 32)
    padded = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, words * 32 - mask.shape[-1])])
    every = padded.reshape(*mask.shape[:-1], words, 32).astype(jnp.uint32)
    return (every << jnp.arange(32, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
