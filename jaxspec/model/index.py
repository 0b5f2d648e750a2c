"""The lightning indexer of a CSA layer: what each node asks of the compressed entries."""

from __future__ import annotations

import jax
from jax import Array

from jaxspec.config import ModelConfig
from jaxspec.model.basic import per_head, project, project_float32, rotate
from jaxspec.model.layout import Layout
from jaxspec.model.params import IndexerParams
from pallas_kernels.index_topk.ref import index_scores

__all__ = ["index_queries", "index_scores"]


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
    q = rotate(q, per_head(layout.folded))
    weight = project_float32(x, p.weight) * (dim**-0.5 * heads**-0.5)
    return q, weight
