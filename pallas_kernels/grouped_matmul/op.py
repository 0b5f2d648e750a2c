"""Signature and choice of the routed experts."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Backends, resolve
from pallas_kernels.grouped_matmul import cpu, ref

BACKENDS: Backends = {
    "ref": ref.grouped_matmul,
    "cpu": cpu.grouped_matmul,
    "tpu": "the TPU kernel is not built yet; use 'ref'",
    "gpu": "the GPU kernel is not built yet; use 'ref'",
}


def grouped_matmul(  # noqa: PLR0917 - the operands of one product, in the order of the equation
    x: Array,
    w1: Array,
    w3: Array,
    w2: Array,
    expert: Array,
    weight: Array,
    *,
    limit: float,
    live: Array | None = None,
    impl: str = "auto",
) -> Array:
    """Runs each row through its k experts (V4 report, section 2.1).

    y_m = sum_k W2_e (weight_mk silu(min(W1_e x_m, limit)) clip(W3_e x_m, -limit, limit)) with
    e = expert_mk. No pair is dropped, products accumulate in float32, and no bit of a row's result
    depends on other rows' content, routing or liveness. Differentiable in all float operands.

    Args:
        x: `[M, E]` rows.
        w1: `[X, I, E]` gate projections.
        w3: `[X, I, E]` up projections.
        w2: `[X, E, I]` down projections.
        expert: `[M, k]` int32 ids in [0, X).
        weight: `[M, k]` float32 routing weights, normalised and scaled.
        limit: the clamp of gate and up, static.
        live: `[M]` bool; the other rows read no expert and give exactly 0. None: all are live.
        impl: `auto`, `ref`, `cpu`, `tpu`, `gpu`.

    Returns:
        `[M, E]` float32.

    Raises:
        ValueError: shapes or dtypes that do not fit, or an `impl` that cannot run.
    """
    live = jnp.ones(x.shape[:1], bool) if live is None else live
    _check_weights(x, w1, w3, w2)
    _check_routing(x, expert, weight, live)
    run = resolve(impl, "grouped_matmul", BACKENDS)
    return run(x, (w1, w3, w2), (expert, weight, live), limit=limit)


def _check_weights(x: Array, w1: Array, w3: Array, w2: Array) -> None:
    if x.ndim != 2 or w1.ndim != 3 or w1.shape[2] != x.shape[1]:
        raise ValueError(f"x {x.shape} and w1 {w1.shape} must be [M, E] and [X, I, E]")
    experts, inner, width = w1.shape
    if w3.shape != w1.shape or w2.shape != (experts, width, inner):
        want = f"{w1.shape} and {(experts, width, inner)}"
        raise ValueError(f"w3 {w3.shape} and w2 {w2.shape} must be {want} to fit w1")


def _check_routing(x: Array, expert: Array, weight: Array, live: Array) -> None:
    if expert.ndim != 2 or len(expert) != len(x) or weight.shape != expert.shape:
        raise ValueError(f"expert {expert.shape} and weight {weight.shape} must both be [M, k]")
    if not jnp.issubdtype(expert.dtype, jnp.integer):
        raise ValueError(f"expert must hold integer ids, not {expert.dtype}")
    if live.shape != x.shape[:1] or live.dtype != bool:
        raise ValueError(f"live must be bool [M], not {live.dtype} {live.shape}")
