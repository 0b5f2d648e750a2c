"""Signature and choice of the mixing weights of hyper-connections."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Backends, resolve
from pallas_kernels.hyper_mixing import gpu, ref, tpu

__all__ = ["Mixing", "hyper_mixing"]

BACKENDS: Backends = {
    "ref": ref.hyper_mixing,
    "cpu": ref.hyper_mixing,  # XLA makes one program of it there, without launches to save
    "tpu": tpu.hyper_mixing,
    "gpu": gpu.hyper_mixing,
}


class Mixing(NamedTuple):
    """How one sub-layer reads and writes its S streams."""

    pre: Array  # [..., S]
    post: Array  # [..., S]
    mix: Array  # [..., S, S]: from stream (first S) to stream (second S)


def hyper_mixing(
    features: Array,
    scale: Array,
    base: Array,
    *,
    streams: int,
    iterations: int,
    eps: float,
    impl: str = "auto",
) -> Mixing:
    """Makes a sub-layer's mixing weights from projected features (V4 report, section 2.2).

    With l = scale * features + base, one scale for each of the three parts: pre = sigmoid(l) + eps,
    post = 2 sigmoid(l), and mix is softmax(l) + eps made doubly stochastic by Sinkhorn's iteration:
    columns, then `iterations - 1` times rows and columns, each divided by its sum + eps. Rows of
    features do not depend on each other. `ref` and `cpu` are differentiable.

    Args:
        features: `[..., S (2 + S)]` float32: of pre, of post, of the matrix by rows.
        scale: `[3]` float32.
        base: `[S (2 + S)]` float32.
        streams: S, static.
        iterations: of Sinkhorn, static, at least 1.
        eps: static.
        impl: `auto`, `ref`, `cpu`, `tpu` or `gpu`, static.

    Returns:
        The weights, float32.

    Raises:
        ValueError: sizes or dtypes that do not fit, or an `impl` that cannot run.
    """
    if streams < 1:
        raise ValueError(f"there must be at least 1 stream, not {streams}")
    width = streams * (2 + streams)
    if features.shape[-1:] != (width,) or base.shape != (width,) or scale.shape != (3,):
        got = f"{features.shape}, {scale.shape} and {base.shape}"
        want = f"[..., {width}], [3] and [{width}]"
        raise ValueError(f"features, scale and base {got} must be {want} for {streams} streams")
    for name, x in {"features": features, "scale": scale, "base": base}.items():
        if x.dtype != jnp.float32:
            raise ValueError(f"{name} must be float32, not {x.dtype}")
    if iterations < 1:
        raise ValueError(f"Sinkhorn needs at least 1 iteration, not {iterations}")
    sizes = {"rows": math.prod(features.shape[:-1])}
    run = resolve(impl, "hyper_mixing", BACKENDS, sizes=sizes)
    if not sizes["rows"]:
        run = ref.hyper_mixing  # a kernel would have no step
    return Mixing(*run(features, scale, base, streams=streams, iterations=iterations, eps=eps))
