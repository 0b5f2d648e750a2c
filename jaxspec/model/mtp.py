"""The multi-token-prediction block: one more V4 layer that predicts the token after next."""

from __future__ import annotations

from functools import partial

import jax
from jax import Array

from jaxspec.cache import LayerCache
from jaxspec.config import ModelConfig
from jaxspec.model.attention import Scratch, attend
from jaxspec.model.basic import project, rms_norm
from jaxspec.model.forward import LayerOut, read_logits, run_layer
from jaxspec.model.layout import make_layout
from jaxspec.model.params import ModelParams, MtpParams
from jaxspec.tree import TokenBlock


@jax.named_scope("mtp")
def run_mtp(
    params: ModelParams,
    cfg: ModelConfig,
    streams: Array,
    layer: LayerCache,
    block: TokenBlock,
    *,
    scratch: Scratch | None = None,
    impl: str = "auto",
) -> LayerOut:
    """One pass of the MTP block (V4 report, section 2; spec, section 6).

    Row t reads the streams at position t and the embedding of the token at t + 1, which is
    `block.token`; its position is t and it predicts t + 2.

    Args:
        params: the model.
        cfg: its configuration, static.
        streams: `[B, N, S, E]`: the main model's before its head, or, deeper in a draft, the MTP
            block's own of the parent row.
        layer: the MTP block's ring.
        block: the rows' tokens and positions.
        scratch: rows of the draft's earlier levels, if there are any.
        impl: of the kernels.
    """
    p = params.mtp[0]
    attention = partial(
        attend,
        p.layer.attn,
        cfg,
        layer=layer,
        layout=make_layout(cfg, block),
        scratch=scratch,
        impl=impl,
    )
    x = fuse(p, cfg, streams, params.embed[block.token])
    return run_layer(p.layer, cfg, x, block, attention=attention, impl=impl)


def fuse(p: MtpParams, cfg: ModelConfig, streams: Array, embedding: Array) -> Array:
    """W_e enorm(embedding) + W_h hnorm(streams), the second for each stream alone."""
    token = project(rms_norm(embedding, p.enorm, cfg.rms_norm_eps), p.e_proj)
    return token[..., None, :] + project(rms_norm(streams, p.hnorm, cfg.rms_norm_eps), p.h_proj)


def mtp_logits(params: ModelParams, cfg: ModelConfig, streams: Array) -> Array:
    """Logits `[B, N, V]` of the MTP block's streams: own hyper-head and norm, shared head."""
    p = params.mtp[0]
    return read_logits(params, cfg, p.hc_head, p.norm, streams)
