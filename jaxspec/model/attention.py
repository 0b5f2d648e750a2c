"""Attention of one layer: sliding window, CSA and HCA are one function over different sources."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxspec.cache import LayerCache, LayerRows
from jaxspec.config import ModelConfig
from jaxspec.model.basic import project, rms_norm, rotate
from jaxspec.model.compress import Compressed, compress
from jaxspec.model.index import index_queries, select_entries
from jaxspec.model.layout import Layout
from jaxspec.model.params import AttentionParams
from jaxspec.tree import pack_bits, unpack_bits
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.op import Committed, Own


@struct.dataclass
class Scratch:
    """Raw rows of the earlier levels of a tree that is drafted level by level.

    The nodes of the block at hand write theirs from `start` on; their ancestor bits count slots of
    the scratch.
    """

    kv: Array  # [B, M, K]
    position: Array  # [B, M] int32
    start: int = struct.field(pytree_node=False)

    def insert(self, kv: Array, position: Array) -> Scratch:
        """The scratch with the rows of one more level."""
        stop = self.start + kv.shape[1]
        return Scratch(
            kv=self.kv.at[:, self.start : stop].set(kv.astype(self.kv.dtype)),
            position=self.position.at[:, self.start : stop].set(position),
            start=stop,
        )


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
) -> tuple[Array, LayerRows, Scratch | None]:
    """Attention output `[B, N, E]` for `x [B, N, E]`, and the rows it would add to the cache."""
    block = layout.block
    q_latent = rms_norm(project(x, p.wq_a), p.q_norm, cfg.rms_norm_eps)
    q = _queries(p, cfg, q_latent, layout, layer.ratio)
    turn = layout.turn(layer.ratio)
    kv = rotate(rms_norm(project(x, p.wkv), p.kv_norm, cfg.rms_norm_eps), turn)
    rows = LayerRows(kv, None, None, None, None, None, None)
    committed, own = Committed(layer.ring, block.length), Own(kv, block.position, block.ancestors)
    if scratch is not None:
        scratch = scratch.insert(kv, block.position)
        own = Own(scratch.kv, scratch.position, block.ancestors)
    if layer.ratio:
        rows, committed, own = _fold(p, cfg, (x, q_latent, kv), layer, layout, impl)
    out = tree_attention(q, p.sink, committed, own, position=block.position, impl=impl)
    return _output(p, out.astype(x.dtype), turn), rows, scratch


def _queries(
    p: AttentionParams, cfg: ModelConfig, q_latent: Array, layout: Layout, ratio: int
) -> Array:
    shape = (*q_latent.shape[:2], cfg.num_attention_heads, cfg.head_dim)
    q = rms_norm(project(q_latent, p.wq_b).reshape(shape), None, cfg.rms_norm_eps)
    cos, sin = layout.turn(ratio)
    return rotate(q, (cos[:, :, None], sin[:, :, None]))


def _fold(
    p: AttentionParams,
    cfg: ModelConfig,
    inputs: tuple[Array, Array, Array],
    layer: LayerCache,
    layout: Layout,
    impl: str,
) -> tuple[LayerRows, Committed, Own]:
    """Compressed entries of the block and, on CSA layers, the selection among all entries."""
    x, q_latent, kv = inputs
    block = layout.block
    folded = compress(p.compressor, cfg, x, layer.open, layout)
    rows = LayerRows(
        kv, folded.entry, None, folded.owner, folded.complete, folded.open, None
    )
    own_bits, selected = _visible_entries(layout, folded), None
    if p.indexer is not None:
        keys = compress(p.indexer.compressor, cfg, x, layer.key_open, layout)
        rows = rows.replace(key=keys.entry, key_open=keys.open)
        queries = index_queries(p.indexer, cfg, x, q_latent, layout)
        selected, own_bits = select_entries(
            queries, cfg, layer, keys, own_bits, length=block.length, impl=impl
        )
    committed = Committed(layer.ring, block.length, layer.entries, selected, layer.ratio)
    own = Own(kv, block.position, block.ancestors, folded.entry, own_bits)
    return rows, committed, own


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
def _output(p: AttentionParams, out: Array, turn: tuple[Array, Array]) -> Array:
    """Turns the heads back, then the grouped low-rank projection (spec, section 2)."""
    cos, sin = turn
    out = rotate(out, (cos[:, :, None], sin[:, :, None]), inverse=True)
    groups = p.wo_a.shape[0]
    grouped = out.reshape(*out.shape[:2], groups, -1)
    latent = jnp.einsum("bngi,gio->bngo", grouped, p.wo_a, preferred_element_type=jnp.float32)
    return project(latent.astype(out.dtype).reshape(*out.shape[:2], -1), p.wo_b)
