"""Pieces that every layer uses: normalisation, projection, rotary position embedding."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.config import ModelConfig
from pallas_kernels.precision import precision_of

Rotation = tuple[Array, Array]
"""Cosine and sine `[..., r / 2]`, float32."""


def rms_norm(x: Array, weight: Array | None, eps: float) -> Array:
    """X / sqrt(mean(x^2) + eps) * weight over the last axis, in float32, cast back once."""
    y = x.astype(jnp.float32)
    y = y * (1.0 / jnp.sqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps))
    if weight is not None:
        y = y * weight.astype(jnp.float32)
    return y.astype(x.dtype)


def project(x: Array, weight: Array) -> Array:
    """`x [..., in] @ weight [in, out]`, accumulated in float32, returned in x's dtype."""
    return project_float32(x, weight).astype(x.dtype)


def project_float32(x: Array, weight: Array) -> Array:
    """`x [..., in] @ weight [in, out]` accumulated and returned in float32."""
    rows = x.reshape(-1, x.shape[-1])
    out = jnp.matmul(
        rows,
        weight.astype(x.dtype),
        precision=precision_of(x.dtype),
        preferred_element_type=jnp.float32,
    )
    return out.reshape(*x.shape[:-1], weight.shape[-1])


def rotary_frequencies(cfg: ModelConfig, *, compressed: bool) -> np.ndarray:
    """Angles per position `[r / 2]`.

    Sliding layers and MTP use theta plainly. Compressed layers use their own theta with YaRN, at
    every length (V4 report, section 2.3; YaRN, arXiv 2309.00071, section 3.2).
    """
    dims = cfg.qk_rope_head_dim
    theta = cfg.compress_rope_theta if compressed else cfg.rope_theta
    frequency = theta ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)
    if not compressed:
        return frequency.astype(np.float32)

    def correction(beta: float) -> float:
        turns = cfg.yarn_original_length / (2 * math.pi * beta)
        return dims * math.log(turns) / (2 * math.log(theta))

    low = max(math.floor(correction(cfg.yarn_beta_fast)), 0)
    high = min(math.ceil(correction(cfg.yarn_beta_slow)), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
    return (frequency * (1 - ramp) + frequency / cfg.yarn_factor * ramp).astype(np.float32)


def rotation(cfg: ModelConfig, position: Array, *, compressed: bool) -> Rotation:
    """Cosine and sine at `position [...]`."""
    angle = position[..., None].astype(jnp.float32) * rotary_frequencies(cfg, compressed=compressed)
    return jnp.cos(angle), jnp.sin(angle)


def per_head(turn: Rotation) -> Rotation:
    """The rotation of `[B, N]` positions, to turn `[B, N, H, d]`."""
    cos, sin = turn
    return cos[:, :, None], sin[:, :, None]


def rotate(x: Array, turn: Rotation, *, inverse: bool = False) -> Array:
    """Rotates the interleaved pairs of the last r dims of `x [..., d]`; the others pass.

    `turn` broadcasts against x's leading axes. The inverse turns back (conjugate).
    """
    cos, sin = turn
    sin = -sin if inverse else sin
    plain = x.shape[-1] - 2 * cos.shape[-1]
    # One multiply-add over all dims, the plain ones at angle 0: slices and joins would cost more.
    keep = [(0, 0)] * (cos.ndim - 1) + [(plain, 0)]
    cos = jnp.pad(jnp.repeat(cos, 2, axis=-1), keep, constant_values=1.0)
    sin = jnp.pad(jnp.stack([-sin, sin], axis=-1).reshape(*sin.shape[:-1], -1), keep)
    y = x.astype(jnp.float32)
    swapped = y.reshape(*y.shape[:-1], -1, 2)[..., ::-1].reshape(y.shape)
    return (y * cos + swapped * sin).astype(x.dtype)
