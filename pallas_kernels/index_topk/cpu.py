"""The indexer's selection on CPUs: the definition without its sort."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.index_topk import ref

if TYPE_CHECKING:
    from pallas_kernels.index_topk.op import IndexKeys

SIGN = np.uint32(1 << 31)


def index_topk(q: Array, weight: Array, entries: IndexKeys, *, topk: int) -> tuple[Array, Array]:
    """See `op.index_topk`."""
    return ref.index_topk(q, weight, entries, topk=topk, largest=largest)


def largest(scores: Array, count: int) -> Array:
    """See `ref.largest`.

    Bisects the bits of the least score that is chosen: 32 counts over the entries, where a prefill
    of 512 tokens spent a third of its time in sorts.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.uint32)
    bits = jnp.where(scores == 0, 0, bits)  # -0 becomes 0, its equal
    order = jnp.where(bits < SIGN, bits | SIGN, ~bits)  # rises with the score

    def refine(step: int, least: Array) -> Array:
        trial = least | (SIGN >> step)
        enough = (order >= trial).sum(-1, keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough, trial, least)

    zero = jnp.zeros_like(order[..., :1])
    least = jax.lax.fori_loop(0, 32, lambda i, x: refine(i.astype(jnp.uint32), x), zero)
    above, tie = order > least, order == least
    room = count - above.sum(-1, keepdims=True, dtype=jnp.int32)
    return above | tie & (jnp.cumsum(tie, axis=-1, dtype=jnp.int32) <= room)
