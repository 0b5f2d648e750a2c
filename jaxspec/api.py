"""Public functions that are compiled here: batched, `cfg` and keyword arguments static.

`prefill`, `speculative_step`, `generate`, `insert` and `init_state` are compiled where they are
defined.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxspec import cache, sample, verify
from jaxspec.cache import Cache, LayerCache, init_cache, init_layer
from jaxspec.config import ModelConfig
from jaxspec.errors import UsageError
from jaxspec.model import forward as model
from jaxspec.model.mtp import mtp_logits, run_mtp
from jaxspec.model.params import ModelParams
from jaxspec.tree import TokenBlock

forward = jax.jit(model.forward, static_argnames=("cfg", "logits", "features", "impl"))
extend = jax.jit(cache.extend)
choose = jax.jit(sample.choose)
walk = jax.jit(verify.walk, static_argnames="depth")


def score(params: ModelParams, cfg: ModelConfig, tokens: Array, *, impl: str = "auto") -> Array:
    """Logits `[B, T, V]` float32 of whole sequences `tokens [B, T]`; row t predicts t + 1."""
    tokens = jnp.asarray(tokens, jnp.int32)
    return _score(params, cfg, _blank(params, cfg, tokens), tokens, impl=impl)


def mtp_score(params: ModelParams, cfg: ModelConfig, tokens: Array, *, impl: str = "auto") -> Array:
    """Logits `[B, T - 1, V]` of the MTP block; row t predicts t + 2.

    Raises:
        UsageError: the model has no MTP block, or T is below 2.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    if not cfg.mtp_ratios:
        raise UsageError("the model has no MTP block; mtp_score needs one")
    if tokens.shape[1] < 2:
        raise UsageError(f"mtp_score needs at least 2 tokens a sequence, not {tokens.shape[1]}")
    blank = _blank(params, cfg, tokens)
    layer = init_layer(cfg, cfg.mtp_ratios[0], tokens.shape[0], 1, params.embed.dtype)
    return _mtp_score(params, cfg, (blank, layer), tokens, impl=impl)


def _blank(params: ModelParams, cfg: ModelConfig, tokens: Array) -> Cache:
    """What whole sequences start from; nothing is committed, so the least capacity will do.

    It is made outside of the compiled functions: XLA would fold what it could of constants.
    """
    return init_cache(cfg, tokens.shape[0], 1, params.embed.dtype)


@jax.jit(static_argnames=("cfg", "impl"))
def _score(
    params: ModelParams, cfg: ModelConfig, blank: Cache, tokens: Array, *, impl: str
) -> Array:
    block = TokenBlock.chain(tokens, blank.length)
    return model.forward(params, cfg, blank, block, impl=impl).logits


@jax.jit(static_argnames=("cfg", "impl"))
def _mtp_score(
    params: ModelParams,
    cfg: ModelConfig,
    blank: tuple[Cache, LayerCache],
    tokens: Array,
    *,
    impl: str,
) -> Array:
    start, layer = blank
    block = TokenBlock.chain(tokens, start.length)
    out = model.forward(params, cfg, start, block, logits="last", features="streams", impl=impl)
    rows = TokenBlock.chain(tokens[:, 1:], start.length)
    streams = run_mtp(params, cfg, out.features[:, :-1], layer, rows, impl=impl).streams
    return mtp_logits(params, cfg, streams)
