"""The definition of hyper-connections' mixing weights in plain jnp."""

from __future__ import annotations

import jax
from jax import Array


def hyper_mixing(
    features: Array, scale: Array, base: Array, *, streams: int, iterations: int, eps: float
) -> tuple[Array, Array, Array]:
    """See `op.hyper_mixing`."""
    s, u = streams, features
    pre = jax.nn.sigmoid(u[..., :s] * scale[0] + base[:s]) + eps
    post = 2.0 * jax.nn.sigmoid(u[..., s : 2 * s] * scale[1] + base[s : 2 * s])
    mix = (u[..., 2 * s :] * scale[2] + base[2 * s :]).reshape(*u.shape[:-1], s, s)
    return pre, post, sinkhorn(mix, iterations, eps)


def sinkhorn(logits: Array, iterations: int, eps: float) -> Array:
    """Makes `[..., S, S]` doubly stochastic: softmax over columns, then alternating division.

    The first iteration divides by the column sums only, since the softmax was the row step.
    """
    mix = jax.nn.softmax(logits, axis=-1) + eps
    mix = mix / (mix.sum(-2, keepdims=True) + eps)

    def alternate(_: int, mix: Array) -> Array:
        mix = mix / (mix.sum(-1, keepdims=True) + eps)
        return mix / (mix.sum(-2, keepdims=True) + eps)

    return jax.lax.fori_loop(0, iterations - 1, alternate, mix)
