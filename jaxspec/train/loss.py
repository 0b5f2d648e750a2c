"""What training minimises: next tokens, drafts several tokens deep, and the indexer's choice."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxspec.cache import Cache, LayerCache, init_cache, init_layer
from jaxspec.config import ModelConfig
from jaxspec.model.attention import Attended, Scratch
from jaxspec.model.backends import differentiable_impl
from jaxspec.model.forward import ForwardOut, forward
from jaxspec.model.index import index_scores
from jaxspec.model.mtp import mtp_logits, run_mtp
from jaxspec.model.params import ModelParams
from jaxspec.train.recipe import Recipe
from jaxspec.tree import TokenBlock, pack_bits

LOWEST = jnp.finfo(jnp.float32).min


class Loss(NamedTuple):
    """The parts of the loss, nats a token, and what is measured on the way."""

    lm: Array
    draft: Array  # [depths]
    indexer: Array  # mean over CSA layers
    agree: Array  # [depths]: how often the draft's first choice is the model's own
    load: tuple[Array, ...]  # [X] a layer: tokens sent to each expert


def cross_entropy(logits: Array, label: Array) -> Array:
    """-log p(label): `[..., V]`, `[...]` to `[...]`."""
    picked = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def mean_over(value: Array, mask: Array) -> Array:
    """Mean of the entries that count."""
    return jnp.where(mask, value, 0.0).sum() / jnp.maximum(mask.sum(), 1)


class Blank(struct.PyTreeNode):
    """Empty caches that sequences start from; an argument, so that nothing is folded at compile."""

    cache: Cache
    draft: LayerCache

    @staticmethod
    def create(cfg: ModelConfig, batch: int) -> Blank:
        """For `batch` sequences; nothing is ever committed, so the least capacity will do."""
        return Blank(init_cache(cfg, batch, 1), init_layer(cfg, cfg.mtp_ratios[0], batch, 1))


def measure(
    params: ModelParams,
    cfg: ModelConfig,
    blank: Blank,
    tokens: Array,
    *,
    key: Array,
    recipe: Recipe,
) -> Loss:
    """All parts for `tokens [B, T]`, -1 where there is none."""
    there = tokens >= 0
    token = jnp.maximum(tokens, 0)
    block = TokenBlock.chain(token, blank.cache.length, there.sum(-1, dtype=jnp.int32))
    impl = differentiable_impl()
    out = forward(params, cfg, blank.cache, block, features="trace", impl=impl)
    lm = mean_over(cross_entropy(out.logits[:, :-1], token[:, 1:]), there[:, 1:])
    draft, agree, drafted = measure_draft(
        params, cfg, blank.draft, out, (token, there), key=key, recipe=recipe
    )
    index = [
        index_divergence(layer.attended, there)
        for layer in out.features
        if layer.attended.indexer is not None
    ]
    experts = [layer.expert for layer in out.features] + [drafted]
    return Loss(
        lm=lm,
        draft=draft,
        indexer=sum(index, start=jnp.zeros(())) / max(len(index), 1),
        agree=agree,
        load=tuple(_load(cfg, expert, there) for expert in experts),
    )


def _load(cfg: ModelConfig, expert: Array, there: Array) -> Array:
    chosen = jax.nn.one_hot(expert, cfg.n_routed_experts) * there[..., None, None]
    return jax.lax.stop_gradient(chosen.sum((0, 1, 2)))


def index_divergence(attended: Attended, there: Array) -> Array:
    """KL from the layer's attention over compressed entries to the indexer's (V3.2, section 2.1).

    The target is detached: the mean over heads of the softmax over all visible entries.
    """
    rows, (q, weight) = attended.rows, attended.indexer
    nodes = attended.q.shape[1]
    visible = rows.complete[:, None] & (rows.owner[:, None] <= jnp.arange(nodes)[:, None])
    scores = jnp.einsum("bnhk,bjk->bnhj", attended.q, rows.entry) * attended.q.shape[-1] ** -0.5
    target = jax.nn.softmax(jnp.where(visible[:, :, None], scores, LOWEST), axis=-1).mean(2)
    target = jax.lax.stop_gradient(target)
    guess = jnp.where(visible, index_scores(q, weight, rows.key), LOWEST)
    guess = jax.nn.log_softmax(guess, axis=-1)
    divergence = jnp.where(
        visible, target * (jnp.log(jnp.maximum(target, 1e-20)) - guess), 0.0
    ).sum(-1)
    return mean_over(divergence, visible.any(-1) & there)


def measure_draft(
    params: ModelParams,
    cfg: ModelConfig,
    layer: LayerCache,
    out: ForwardOut,
    tokens: tuple[Array, Array],
    *,
    key: Array,
    recipe: Recipe,
) -> tuple[Array, Array, Array]:
    """Drafts of several depths from random anchors, their rows attending as in drafting.

    A draft from anchor t has at depth d one row at position t + d - 1, which reads the token at
    t + d and the previous depth's streams (the model's own at depth 1), sees the verified rows up
    to t and its own earlier ones, and predicts the token at t + d + 1.

    Returns:
        Loss `[depths]`, agreement `[depths]`, and depth 1's experts `[B, T, k]`.
    """
    token, there = tokens
    batch, length = token.shape
    depths, count = recipe.draft_depths, recipe.draft_anchors
    impl = differentiable_impl()
    zero = jnp.zeros(batch, jnp.int32)
    following = jnp.concatenate([token[:, 1:], token[:, :1]], axis=1)
    block = TokenBlock.chain(following, zero, there.sum(-1, dtype=jnp.int32) - 1)
    first = run_mtp(params, cfg, out.features[-1].streams, layer, block, impl=impl)

    drawn = jax.vmap(lambda k: jax.random.permutation(k, length - depths - 1)[:count])
    anchor = drawn(jax.random.split(key, batch)).astype(jnp.int32)  # [B, A]
    kv = first.attended.rows.kv
    room = jnp.zeros((batch, (depths - 1) * count, kv.shape[-1]), kv.dtype)
    place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    scratch = Scratch(
        kv=jnp.concatenate([kv, room], axis=1),
        position=jnp.pad(place, ((0, 0), (0, room.shape[1]))),
        start=jnp.int32(length),
    )
    streams = _rows(first.streams, anchor)
    losses, agrees = [], []
    for depth in range(1, depths + 1):
        if depth > 1:
            block = _draft_block(_rows(token, anchor + depth), anchor, depth, (length, depths))
            drafted = run_mtp(params, cfg, streams, layer, block, scratch=scratch, impl=impl)
            streams, scratch = drafted.streams, drafted.attended.scratch or scratch
        labels = _rows(out.logits, anchor + depth), _rows(token, anchor + depth + 1)
        mask = _rows(there, anchor + depth + 1)
        logits = mtp_logits(params, cfg, streams)
        loss, agree = _draft_loss(logits, labels, recipe.soft_labels)
        losses.append(mean_over(loss, mask))
        agrees.append(mean_over(agree, mask))
    return jnp.stack(losses), jnp.stack(agrees), first.expert


def _rows(x: Array, index: Array) -> Array:
    """Rows `index [B, A]` of `x [B, T, ...]`."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *([1] * (x.ndim - 2))), axis=1)


def _draft_block(token: Array, anchor: Array, depth: int, sizes: tuple[int, int]) -> TokenBlock:
    """The rows of one depth; of the scratch's slots, `sizes[0]` are verified, then one a draft."""
    length, depths = sizes
    count = anchor.shape[1]
    verified = jnp.arange(length) <= anchor[..., None]
    own = jnp.broadcast_to(jnp.eye(count, dtype=bool), (anchor.shape[0], count, count))
    written = [own if d <= depth else jnp.zeros_like(own) for d in range(2, depths + 1)]
    return TokenBlock(
        token=token,
        position=anchor + depth - 1,
        valid=jnp.ones_like(anchor, bool),
        length=jnp.zeros(anchor.shape[0], jnp.int32),
        parent=None,
        ancestors=pack_bits(jnp.concatenate([verified, *written], axis=-1)),
        kind="tree",
    )


def _draft_loss(logits: Array, labels: tuple[Array, Array], soft: float) -> tuple[Array, Array]:
    """Cross-entropy against the model's own distribution (detached) and the data; agreement."""
    own, token = jax.lax.stop_gradient(labels[0]), labels[1]
    guess = jax.nn.log_softmax(logits, axis=-1)
    distilled = -(jax.nn.softmax(own, axis=-1) * guess).sum(-1)
    loss = soft * distilled + (1 - soft) * cross_entropy(logits, token)
    return loss, (own.argmax(-1) == logits.argmax(-1)).astype(jnp.float32)
