"""The definition of the routed experts: pairs sorted by expert, ragged products."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.grouped_matmul.packed import (
    FP4_GROUP,
    FP8_BLOCK,
    Fp4Weights,
    Fp8Weights,
    Weights,
)
from pallas_kernels.precision import precision_of

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three bits below the sign


def grouped_matmul(
    x: Array,
    weights: tuple[Weights, Weights, Weights],
    routing: tuple[Array, Array, Array],
    *,
    limit: float,
) -> Array:
    """See `op.grouped_matmul`; `weights` is (w1, w3, w2), `routing` (expert, weight, live)."""
    expert, weight, live = routing
    w1, w3, w2 = (dequantise(w).astype(jnp.float32).swapaxes(1, 2) for w in weights)
    rows, choices = expert.shape
    product = partial(jax.lax.ragged_dot, precision=precision_of(w1.dtype))
    x = jnp.where(live[:, None], x, 0).astype(jnp.float32)
    weight = jnp.where(live[:, None], weight, 0)

    order = jnp.argsort(expert.reshape(-1), stable=True)
    sizes = jnp.bincount(expert.reshape(-1), length=len(w1))
    sorted_x = x[order // choices]
    gate = jnp.minimum(product(sorted_x, w1, sizes), limit)
    up = jnp.clip(product(sorted_x, w3, sizes), -limit, limit)
    hidden = weight.reshape(-1)[order][:, None] * jax.nn.silu(gate) * up
    down = product(hidden, w2, sizes)

    pairs = jnp.zeros_like(down).at[order].set(down)
    return jnp.where(live[:, None], pairs.reshape(rows, choices, -1).sum(1), 0)


def dequantise(w: Weights) -> Array:
    """The weights `[X, out, in]` that packed ones stand for, in float32; others as they are."""
    if isinstance(w, Fp8Weights):
        scale = w.scale.astype(jnp.float32)
        for axis in (1, 2):
            scale = jnp.repeat(scale, FP8_BLOCK, axis)
        return w.value.astype(jnp.float32) * scale[:, : w.shape[1], : w.shape[2]]
    if isinstance(w, Fp4Weights):
        code = jnp.stack([w.value & 15, w.value >> 4], -1).reshape(w.shape)
        size = jnp.array(E2M1, jnp.float32)[code & 7]
        value = jnp.where(code & 8, -size, size)
        return value * jnp.repeat(w.scale.astype(jnp.float32), FP4_GROUP, -1)
    return w
