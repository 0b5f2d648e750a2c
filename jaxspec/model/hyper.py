"""Manifold-constrained hyper-connections: S residual streams mixed by a doubly stochastic matrix.

V4 report, section 2.2. With X the streams, a sub-layer F becomes
X'_k = post_k F(sum_j pre_j X_j) + sum_j M_jk X_j, M made doubly stochastic by Sinkhorn's iteration.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec.config import ModelConfig
from jaxspec.model.basic import project_float32
from jaxspec.model.params import HyperParams
from pallas_kernels.dispatch import target_platform
from pallas_kernels.hyper_mixing import Mixing, hyper_mixing


def _features(p: HyperParams, cfg: ModelConfig, streams: Array) -> Array:
    flat = streams.astype(jnp.float32).reshape(*streams.shape[:-2], -1)
    scale = 1.0 / jnp.sqrt(jnp.mean(flat * flat, axis=-1, keepdims=True) + cfg.rms_norm_eps)
    return project_float32(flat, p.fn) * scale


@jax.named_scope("hyper.weigh")
def weigh(p: HyperParams, cfg: ModelConfig, streams: Array, *, impl: str = "auto") -> Mixing:
    """Mixing weights of one sub-layer from the streams `[B, N, S, E]`, leaves `[B, N, ...]`."""
    return hyper_mixing(
        _features(p, cfg, streams),
        p.scale,
        p.base,
        streams=cfg.hc_mult,
        iterations=cfg.hc_sinkhorn_iters,
        eps=cfg.hc_eps,
        impl=impl,
    )


def collect(streams: Array, weight: Array) -> Array:
    """sum_j weight_j X_j: `[B, N, S, E]`, `[B, N, S]` to `[B, N, E]` in the streams' dtype."""
    old = streams.astype(jnp.float32)
    total = (old * weight[..., None]).sum(-2) if _reduces() else _add_up(old, weight)
    return total.astype(streams.dtype)


@jax.named_scope("hyper.spread")
def spread(streams: Array, update: Array, mixing: Mixing) -> Array:
    """X'_k = post_k y + sum_j M_jk X_j for `update` y `[B, N, E]`, in float32, cast once."""
    old, y = streams.astype(jnp.float32), update.astype(jnp.float32)
    if _reduces():
        new = mixing.post[..., None] * y[..., None, :]
        # A product and a sum: XLA has no fast product of many small matrices on a CPU.
        mixed = (mixing.mix[..., None] * old[..., None, :]).sum(-3)
        return (new + mixed).astype(streams.dtype)
    each = [
        (mixing.post[..., k, None] * y + _add_up(old, mixing.mix[..., k])).astype(streams.dtype)
        for k in range(streams.shape[-2])
    ]
    return jnp.stack(each, axis=-2)


def _reduces() -> bool:
    """Whether sums over streams are reductions, which are fast on a CPU.

    On TPUs and GPUs XLA makes a pass of its own of each, through float32 streams in memory.
    """
    return target_platform() == "cpu"


def _add_up(streams: Array, weight: Array) -> Array:
    """sum_j weight_j X_j, written out: `[..., S, E]` and `[..., S]` to `[..., E]`."""
    parts = (weight[..., j, None] * streams[..., j, :] for j in range(streams.shape[-2]))
    return functools.reduce(jnp.add, parts)


@jax.named_scope("hyper.head")
def collapse(p: HyperParams, cfg: ModelConfig, streams: Array) -> Array:
    """The final head: streams `[B, N, S, E]` to the hidden state `[B, N, E]`, no Sinkhorn."""
    weight = jax.nn.sigmoid(_features(p, cfg, streams) * p.scale[0] + p.base) + cfg.hc_eps
    return collect(streams, weight)
