"""Norm, softmax, rotary position and Hadamard rotation, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import ceil, floor, log, pi

import numpy as np

from .config import Config

Array = np.ndarray
Tensors = Mapping[str, Array]


def under(tensors: Tensors, prefix: str) -> dict[str, Array]:
    """The tensors whose name starts with `prefix`, with the prefix taken off."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def rms_norm(x: Array, eps: float, weight: Array | float = 1.0) -> Array:
    """Divide by the root mean square of the last axis, then scale by `weight`."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def softmax(x: Array, axis: int) -> Array:
    weights = np.exp(x - x.max(axis=axis, keepdims=True))
    return weights / weights.sum(axis=axis, keepdims=True)


def rope_frequencies(config: Config, ratio: int) -> Array:
    """Angle per position of every rotated pair, [rope dims / 2].

    Sliding layers (ratio 0) use the plain base frequencies. Layers with compression use their own
    base and YaRN at every length: pairs that turn more than `beta_fast` times over the original
    length stay, pairs that turn less than `beta_slow` times are slowed down by `factor`, with a
    linear ramp between the two.
    """
    dims = config.qk_rope_head_dim
    pair = np.arange(dims // 2)
    if ratio == 0:
        return config.rope_theta ** (-2.0 * pair / dims)

    theta, yarn = config.compress_rope_theta, config.rope_scaling

    def pair_that_turns(times: float) -> float:
        length = yarn.original_max_position_embeddings
        return dims * log(length / (2 * pi * times)) / (2 * log(theta))

    low = max(floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(ceil(pair_that_turns(yarn.beta_slow)), dims - 1)
    if high <= low:
        raise ValueError(f"rope_scaling gives an empty YaRN ramp: pairs {low} to {high}")
    ramp = np.clip((pair - low) / (high - low), 0.0, 1.0)
    base = theta ** (-2.0 * pair / dims)
    return base * (1.0 - ramp) + base / yarn.factor * ramp


def rotate(x: Array, angles: Array) -> Array:
    """Turn the pairs (2i, 2i+1) of the last `2 * len(angles)` dims of x by `angles`."""
    start = x.shape[-1] - 2 * len(angles)
    pairs = x[..., start::2] + 1j * x[..., start + 1 :: 2]
    pairs = pairs * np.exp(1j * angles)
    out = x.copy()
    out[..., start::2] = pairs.real
    out[..., start + 1 :: 2] = pairs.imag
    return out


@cache
def hadamard(dims: int) -> Array:
    """Sylvester's Hadamard matrix of a power of two, scaled to be orthogonal, [dims, dims]."""
    matrix = np.ones((1, 1))
    while len(matrix) < dims:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(dims)
