"""The definition of the routed experts: pairs sorted by expert, ragged products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def grouped_matmul(
    x: Array,
    weights: tuple[Array, Array, Array],
    routing: tuple[Array, Array, Array],
    *,
    limit: float,
) -> Array:
    """See `op.grouped_matmul`; `weights` is (w1, w3, w2), `routing` (expert, weight, live)."""
    expert, weight, live = routing
    w1, w3, w2 = (w.astype(jnp.float32).swapaxes(1, 2) for w in weights)
    rows, choices = expert.shape
    x = jnp.where(live[:, None], x, 0).astype(jnp.float32)
    weight = jnp.where(live[:, None], weight, 0)

    order = jnp.argsort(expert.reshape(-1), stable=True)
    sizes = jnp.bincount(expert.reshape(-1), length=len(w1))
    sorted_x = x[order // choices]
    gate = jnp.minimum(jax.lax.ragged_dot(sorted_x, w1, sizes), limit)
    up = jnp.clip(jax.lax.ragged_dot(sorted_x, w3, sizes), -limit, limit)
    hidden = weight.reshape(-1)[order][:, None] * jax.nn.silu(gate) * up
    down = jax.lax.ragged_dot(hidden, w2, sizes)

    pairs = jnp.zeros_like(down).at[order].set(down)
    return jnp.where(live[:, None], pairs.reshape(rows, choices, -1).sum(1), 0)
