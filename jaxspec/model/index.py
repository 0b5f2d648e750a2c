"""The lightning indexer of a CSA layer: which compressed entries each node attends to."""

from __future__ import annotations

import jax
from jax import Array

from jaxspec.cache import LayerCache
from jaxspec.config import ModelConfig
from jaxspec.model.basic import project, project_float32, rotate
from jaxspec.model.compress import Compressed
from jaxspec.model.layout import Layout
from jaxspec.model.params import IndexerParams
from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk.op import IndexKeys


@jax.named_scope("index.queries")
def index_queries(
    p: IndexerParams, cfg: ModelConfig, x: Array, q_latent: Array, layout: Layout
) -> tuple[Array, Array]:
    """Queries `[B, N, Hi, ci]` and head weights `[B, N, Hi]` float32 (spec, section 4).

    The release turns queries and keys by one Hadamard matrix before it rounds them to FP4. Without
    that rounding the turn cancels in every score, so it is left out.
    """
    heads, dim = cfg.index_n_heads, cfg.index_head_dim
    q = project(q_latent, p.wq).reshape(*x.shape[:2], heads, dim)
    cos, sin = layout.folded
    q = rotate(q, (cos[:, :, None], sin[:, :, None]))
    weight = project_float32(x, p.weight) * (dim**-0.5 * heads**-0.5)
    return q, weight


@jax.named_scope("index.select")
def select_entries(
    queries: tuple[Array, Array],
    cfg: ModelConfig,
    layer: LayerCache,
    keys: Compressed,
    own_bits: Array,
    *,
    length: Array,
    impl: str,
) -> tuple[Array, Array]:
    """Per-node top-k over committed entries and the block's own, packed (`index_topk`)."""
    q, weight = queries
    entries = IndexKeys(layer.keys, length // layer.ratio, keys.entry, own_bits)
    return index_topk(q, weight, entries, topk=cfg.index_topk, impl=impl)
