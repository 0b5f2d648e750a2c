"""Mixture of experts: routing by token table or by biased affinity, routed and shared experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config import ModelConfig
from jaxspec.model.basic import project_float32
from jaxspec.model.params import ExpertParams, MoeParams
from pallas_kernels.grouped_matmul import grouped_matmul


@jax.named_scope("moe.route")
def route(p: MoeParams, cfg: ModelConfig, x: Array, token: Array) -> tuple[Array, Array]:
    """Experts `[M, k]` int32 and their weights `[M, k]` float32 for rows `x [M, E]` (spec, 5).

    The bias steers the choice alone. Weights are the chosen affinities, normalised and scaled.
    """
    affinity = jnp.sqrt(jax.nn.softplus(project_float32(x.astype(jnp.float32), p.gate)))
    if p.table is not None:
        expert = p.table[token]
    else:
        _, expert = jax.lax.top_k(affinity + p.bias, cfg.num_experts_per_tok)
    weight = jnp.take_along_axis(affinity, expert, axis=-1)
    return expert, weight / weight.sum(-1, keepdims=True) * cfg.routed_scaling_factor


@jax.named_scope("moe.shared")
def gated_mlp(p: ExpertParams, x: Array, limit: float) -> Array:
    """W2(silu(min(W1 x, limit)) * clip(W3 x, limit)), activation in float32."""
    gate = jnp.minimum(project_float32(x, p.w1), limit)
    up = jnp.clip(project_float32(x, p.w3), -limit, limit)
    return project_float32((jax.nn.silu(gate) * up).astype(x.dtype), p.w2)


@jax.named_scope("moe")
def mix_experts(
    p: MoeParams, cfg: ModelConfig, x: Array, token: Array, valid: Array, *, impl: str = "auto"
) -> tuple[Array, Array]:
    """Routed plus shared experts for `x [B, N, E]`; summed in float32, cast once.

    Rows that are not `valid [B, N]` reach no expert.

    Returns:
        The output `[B, N, E]` and the experts that each row was routed to, `[B, N, k]`.
    """
    rows = x.reshape(-1, x.shape[-1])
    expert, weight = route(p, cfg, rows, token.reshape(-1))
    routed = grouped_matmul(
        rows,
        p.experts.w1,
        p.experts.w3,
        p.experts.w2,
        expert,
        weight,
        live=valid.reshape(-1),
        limit=cfg.swiglu_limit,
        impl=impl,
    )
    out = routed + gated_mlp(p.shared, rows, cfg.swiglu_limit)
    return out.astype(x.dtype).reshape(x.shape), expert.reshape(*x.shape[:2], -1)
