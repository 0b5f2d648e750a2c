"""Attention of one layer: sliding window, CSA and HCA are one function over different sources."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxspec.cache import LayerCache, LayerRows
from jaxspec.config import ModelConfig
from jaxspec.model.basic import Rotation, per_head, project, rms_norm, rotate
from jaxspec.model.compress import Compressed, compress
from jaxspec.model.index import index_queries
from jaxspec.model.layout import Layout
from jaxspec.model.params import AttentionParams
from jaxspec.tree import pack_bits, unpack_bits
from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk.op import IndexKeys
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.forms import alike
from pallas_kernels.tree_attention.op import Committed, Own


class Scratch(struct.PyTreeNode):
    """Raw rows of the earlier levels of a tree that is drafted level by level.

    The nodes of the block at hand write theirs from `start` on; their ancestor bits count slots of
    the scratch.
    """

    kv: Array  # [B, M, K]
    position: Array  # [B, M] int32
    start: Array  # [] int32

    @staticmethod
    def empty(layer: LayerCache, slots: int) -> Scratch:
        """Room for `slots` rows beside the ring of `layer`."""
        batch, _, dim = layer.ring.shape
        return Scratch(
            kv=jnp.zeros((batch, slots, dim), layer.ring.dtype),
            position=jnp.zeros((batch, slots), jnp.int32),
            start=jnp.int32(0),
        )

    def insert(self, kv: Array, position: Array) -> Scratch:
        """The scratch with the rows of one more level; there must be room for them."""
        update = jax.lax.dynamic_update_slice_in_dim
        return Scratch(
            kv=update(self.kv, kv.astype(self.kv.dtype), self.start, axis=1),
            position=update(self.position, position, self.start, axis=1),
            start=self.start + kv.shape[1],
        )


class Attended(NamedTuple):
    """What attention makes of a block."""

    out: Array  # [B, N, E]
    rows: LayerRows
    scratch: Scratch | None
    q: Array  # [B, N, H, K] rotated queries
    indexer: Any  # the indexer's queries and head weights (CSA), or None


@jax.named_scope("attention")
def attend(
    p: AttentionParams,
    cfg: ModelConfig,
    x: Array,
    layer: LayerCache,
    layout: Layout,
    *,
    scratch: Scratch | None = None,
    impl: str = "auto",
) -> Attended:
    """Attention of a block `x [B, N, E]` over the committed layer and the block itself."""
    block, turn = layout.block, layout.turn(layer.ratio)
    q_latent, q, kv = project_inputs(p, cfg, x, turn)
    rows = LayerRows(kv, None, None, None, None, None, None)
    committed, own = Committed(layer.ring, block.length), Own(kv, block.position, block.ancestors)
    queries = None
    if scratch is not None:
        scratch = scratch.insert(kv, block.position)
        own = Own(scratch.kv, scratch.position, block.ancestors)
    if layer.ratio:
        folded = compress(p.compressor, cfg, x, layer.open, layout)
        rows = rows.replace(
            entry=alike(folded.entry, layer.entries),
            owner=folded.owner,
            complete=folded.complete,
            open=folded.open,
        )
        selected, entry_bits = None, _visible_entries(layout, folded)
        if p.indexer is not None:
            # The indexer learns from its own loss alone, hence the stops.
            alone = jax.lax.stop_gradient((x, q_latent))
            keys = compress(p.indexer.compressor, cfg, alone[0], layer.key_open, layout)
            queries = index_queries(p.indexer, cfg, *alone, layout)
            rows = rows.replace(key=keys.entry, key_open=keys.open)
            entries = IndexKeys(layer.keys, block.length // layer.ratio, keys.entry, entry_bits)
            selected, entry_bits = index_topk(*queries, entries, topk=cfg.index_topk, impl=impl)
        topk = 0 if selected is None else cfg.index_topk
        committed = committed._replace(
            entries=layer.entries, selected=selected, ratio=layer.ratio, topk=topk
        )
        own = own._replace(entries=folded.entry, entry_bits=entry_bits)
    out = tree_attention(q, p.sink, committed, own, position=block.position, impl=impl)
    return Attended(project_output(p, out.astype(x.dtype), turn), rows, scratch, q, queries)


def project_inputs(
    p: AttentionParams, cfg: ModelConfig, x: Array, turn: Rotation
) -> tuple[Array, Array, Array]:
    """Query latent `[B, N, Rq]`, rotated queries `[B, N, H, K]` and the raw row `[B, N, K]`."""
    eps = cfg.rms_norm_eps
    q_latent = rms_norm(project(x, p.wq_a), p.q_norm, eps)
    shape = (*x.shape[:2], cfg.num_attention_heads, cfg.head_dim)
    q = rms_norm(project(q_latent, p.wq_b).reshape(shape), None, eps)
    kv = rotate(rms_norm(project(x, p.wkv), p.kv_norm, eps), turn)
    return q_latent, rotate(q, per_head(turn)), kv


def _visible_entries(layout: Layout, folded: Compressed) -> Array:
    """Packed `[B, N, ceil(J / 32)]`: entry j is seen by its owner and the owner's descendants."""
    block = layout.block
    nodes = block.token.shape[1]
    if block.kind == "chain":
        seen = folded.owner[:, None] <= jnp.arange(nodes)[:, None]
    else:
        seen = unpack_bits(block.ancestors, nodes)  # a tree's entry j is owned by node j
    return pack_bits(seen & folded.complete[:, None])


@jax.named_scope("attention.output")
def project_output(p: AttentionParams, out: Array, turn: Rotation) -> Array:
    """Turns the heads back, then the grouped low-rank projection (spec, section 2)."""
    out = rotate(out, per_head(turn), inverse=True)
    groups = jnp.split(out.reshape(*out.shape[:2], -1), p.wo_a.shape[0], axis=-1)
    # One product a group: a batched one would first move the groups in front of the rows.
    latent = [project(group, weight) for group, weight in zip(groups, p.wo_a, strict=True)]
    return project(jnp.concatenate(latent, axis=-1), p.wo_b)
