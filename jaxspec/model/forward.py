"""The one forward: a block of tokens against a cache, nothing written.

A prefill chunk is a chain block, decoding a one-node block, verification a tree block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxspec.cache import Cache, LayerRows
from jaxspec.config import ModelConfig
from jaxspec.model.attention import Attended, attend
from jaxspec.model.basic import project_float32, rms_norm
from jaxspec.model.hyper import collapse, collect, spread, weigh
from jaxspec.model.layout import make_layout
from jaxspec.model.moe import mix_experts
from jaxspec.model.params import HyperParams, LayerParams, ModelParams
from jaxspec.tree import TokenBlock

Features = Literal["none", "streams", "trace"]


class LayerOut(NamedTuple):
    """What one layer makes of a block."""

    streams: Array  # [B, N, S, E]
    attended: Attended
    expert: Array  # [B, N, k] int32: the routed experts of each row


class ForwardOut(struct.PyTreeNode):
    """What a pass knows about its block; it holds no cache."""

    logits: Array  # [B, N, V] float32, or [B, 1, V] for the last valid row
    features: Any  # None, the last streams [B, N, S, E], or a LayerOut for every layer
    rows: tuple[LayerRows, ...]


def run_layer(
    p: LayerParams,
    cfg: ModelConfig,
    streams: Array,
    block: TokenBlock,
    *,
    attention: Callable[[Array], Attended],
    impl: str = "auto",
) -> LayerOut:
    """One block of the model on `streams [B, N, S, E]`: attention, then experts."""
    mixing = weigh(p.hc_attn, cfg, streams, impl=impl)
    attended = attention(rms_norm(collect(streams, mixing.pre), p.attn_norm, cfg.rms_norm_eps))
    streams = spread(streams, attended.out, mixing)
    mixing = weigh(p.hc_ffn, cfg, streams, impl=impl)
    x = rms_norm(collect(streams, mixing.pre), p.ffn_norm, cfg.rms_norm_eps)
    y, expert = mix_experts(p.moe, cfg, x, block.token, block.valid, impl=impl)
    return LayerOut(spread(streams, y, mixing), attended, expert)


def embed(params: ModelParams, cfg: ModelConfig, token: Array) -> Array:
    """S copies of the embedding: `[B, N]` to `[B, N, S, E]`."""
    x = params.embed[token]
    return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], cfg.hc_mult, x.shape[-1]))


@jax.named_scope("head")
def read_logits(
    params: ModelParams, cfg: ModelConfig, head: HyperParams, norm: Array, streams: Array
) -> Array:
    """Logits `[B, N, V]` float32 from streams, with a block's own hyper-head and norm."""
    hidden = rms_norm(collapse(head, cfg, streams), norm, cfg.rms_norm_eps)
    return project_float32(hidden, params.head)


def last_valid(block: TokenBlock, x: Array) -> Array:
    """The last valid row of `x [B, N, ...]`, `[B, 1, ...]` (row 0 where none is)."""
    last = jnp.where(block.valid, jnp.arange(block.valid.shape[1]), 0).max(-1)
    return jnp.take_along_axis(x, last.reshape(-1, *([1] * (x.ndim - 1))), axis=1)


def forward(
    params: ModelParams,
    cfg: ModelConfig,
    cache: Cache,
    block: TokenBlock,
    *,
    logits: Literal["all", "last"] = "all",
    features: Features = "none",
    impl: str = "auto",
) -> ForwardOut:
    """Runs `block` on top of the committed `cache`.

    Args:
        params: the model.
        cfg: its configuration, static.
        cache: what is committed.
        block: the tokens to run.
        logits: of all rows, or of the last valid one.
        features: `streams`, what an MTP block reads; `trace`, everything that each layer made, for
            training and checks.
        impl: of the kernels, `auto` or `ref`.

    Returns:
        Logits, features, and per layer the rows that `extend` may commit.
    """
    layout = make_layout(cfg, block)
    streams = embed(params, cfg, block.token)
    layers = []
    for index, (p, layer) in enumerate(zip(params.layers, cache.layers, strict=True)):
        attention = partial(attend, p.attn, cfg, layer=layer, layout=layout, impl=impl)
        with jax.named_scope(f"layer{index}"):
            layers.append(run_layer(p, cfg, streams, block, attention=attention, impl=impl))
        streams = layers[-1].streams
    head_input = last_valid(block, streams) if logits == "last" else streams
    out = read_logits(params, cfg, params.hc_head, params.norm, head_input)
    chosen = {"none": None, "streams": streams, "trace": tuple(layers)}[features]
    return ForwardOut(out, chosen, tuple(layer.attended.rows for layer in layers))
