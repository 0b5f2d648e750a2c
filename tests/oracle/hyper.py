"""Manifold-constrained hyper-connections: S residual streams instead of one (report 2.2)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .basic import Array, rms_norm, sigmoid
from .config import Config


class Mixing(NamedTuple):
    """How one sub-layer reads from and writes to the streams of one token."""

    pre: Array
    """[S] weight of each stream in the sub-layer's input."""
    post: Array
    """[S] weight of the sub-layer's output in each stream."""
    comb: Array
    """[S, S] weight of the old stream j (first axis) in the new stream k (second axis)."""


def mixing(streams: Array, fn: Array, base: Array, scale: Array, config: Config) -> Mixing:
    """Mixing weights of a token's streams [S, E] by `hc_*_fn`, `hc_*_base` and `hc_*_scale`."""
    u = fn @ rms_norm(streams.reshape(-1), config.rms_norm_eps)
    return mixing_of(u, base, scale, config)


def mixing_of(u: Array, base: Array, scale: Array, config: Config) -> Mixing:
    """Mixing weights from the projected streams u [2 S + S S]: pre, post, comb row by row."""
    S = config.hc_mult
    pre, post, comb = np.split(u, [S, 2 * S])
    pre_base, post_base, comb_base = np.split(base, [S, 2 * S])
    return Mixing(
        pre=sigmoid(pre * scale[0] + pre_base) + config.hc_eps,
        post=2.0 * sigmoid(post * scale[1] + post_base),
        comb=sinkhorn((comb * scale[2] + comb_base).reshape(S, S), config),
    )


def sinkhorn(logits: Array, config: Config) -> Array:
    """Make exp(logits) [S, S] doubly stochastic, up to the eps that every step adds.

    The order matters to the result: the softmax normalises rows, and every later step ends with
    the columns.
    """
    eps = config.hc_eps
    comb = np.exp(logits - logits.max(axis=1, keepdims=True))
    comb = comb / comb.sum(axis=1, keepdims=True) + eps
    comb = comb / (comb.sum(axis=0, keepdims=True) + eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(axis=1, keepdims=True) + eps)
        comb = comb / (comb.sum(axis=0, keepdims=True) + eps)
    return comb


def collapse(streams: Array, mix: Mixing) -> Array:
    """Input [E] of the sub-layer."""
    return mix.pre @ streams


def spread(streams: Array, y: Array, mix: Mixing) -> Array:
    """New streams [S, E] after the sub-layer returned y [E]: X'_k = post_k y + sum_j M_jk X_j."""
    return np.outer(mix.post, y) + mix.comb.T @ streams


def head_collapse(streams: Array, fn: Array, base: Array, scale: Array, config: Config) -> Array:
    """The hidden state [E] that the output head sees (`hc_head_*`)."""
    u = fn @ rms_norm(streams.reshape(-1), config.rms_norm_eps)
    return (sigmoid(u * scale[0] + base) + config.hc_eps) @ streams
