"""Signature and choice of the routed experts."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Backends, resolve
from pallas_kernels.grouped_matmul import cpu, ref, tpu
from pallas_kernels.grouped_matmul.packed import (
    FP4_GROUP,
    FP8_BLOCK,
    Fp4Weights,
    Fp8Weights,
    Weights,
    pack_fp4,
    pack_fp8,
)

__all__ = ["Fp4Weights", "Fp8Weights", "Weights", "grouped_matmul", "pack_fp4", "pack_fp8"]

BACKENDS: Backends = {
    "ref": ref.grouped_matmul,
    "cpu": cpu.grouped_matmul,
    "tpu": tpu.grouped_matmul,
    "gpu": "there is no kernel for GPUs; use 'auto' or 'ref'",
}


def grouped_matmul(  # noqa: PLR0917 - the operands of one product, in the order of the equation
    x: Array,
    w1: Weights,
    w3: Weights,
    w2: Weights,
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
    depends on other rows' content, routing or liveness. `ref` and `cpu` are differentiable in all
    float operands; a packed weight is dequantised and has no gradient.

    Args:
        x: `[M, E]` rows.
        w1: `[X, I, E]` gate projections, arrays or packed (`Fp8Weights`, `Fp4Weights`).
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
    run = resolve(impl, "grouped_matmul", BACKENDS, sizes={"rows": x.shape[0]})
    return run(x, (w1, w3, w2), (expert, weight, live), limit=limit)


def _check_weights(x: Array, w1: Weights, w3: Weights, w2: Weights) -> None:
    if x.ndim != 2 or len(w1.shape) != 3 or w1.shape[2] != x.shape[1]:
        raise ValueError(f"x {x.shape} and w1 {w1.shape} must be [M, E] and [X, I, E]")
    experts, inner, width = w1.shape
    if w3.shape != w1.shape or w2.shape != (experts, width, inner):
        want = f"{w1.shape} and {(experts, width, inner)}"
        raise ValueError(f"w3 {w3.shape} and w2 {w2.shape} must be {want} to fit w1")

    for name, w in {"w1": w1, "w3": w3, "w2": w2}.items():
        _check_scale(name, w)


def _check_scale(name: str, w: Weights) -> None:
    experts, rows, columns = w.shape
    if isinstance(w, Fp8Weights):
        want = experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    elif isinstance(w, Fp4Weights):
        want = experts, rows, columns // FP4_GROUP
        if columns % FP4_GROUP:
            raise ValueError(f"{name} in FP4 needs inputs in groups of {FP4_GROUP}, not {columns}")
    else:
        return
    if w.scale.shape != want:
        raise ValueError(f"scales of {name} {w.scale.shape} must be {want}")


def _check_routing(x: Array, expert: Array, weight: Array, live: Array) -> None:
    if expert.ndim != 2 or len(expert) != len(x) or weight.shape != expert.shape:
        raise ValueError(f"expert {expert.shape} and weight {weight.shape} must both be [M, k]")
    if not jnp.issubdtype(expert.dtype, jnp.integer):
        raise ValueError(f"expert must hold integer ids, not {expert.dtype}")
    if live.shape != x.shape[:1] or live.dtype != bool:
        raise ValueError(f"live must be bool [M], not {live.dtype} {live.shape}")
