"""The lightning indexer: which compressed entries a CSA query attends to (report 2.3)."""

from __future__ import annotations

import numpy as np

from .basic import Array, Tensors, hadamard, rotate
from .config import Config


def index_scores(weights: Tensors, config: Config, x: Array, query: Array, keys: Array) -> Array:
    """Score of every key for one token: I_i = sum_h w_h relu(q_h . k_i).

    Args:
      weights: the tensors under `attn.indexer.`.
      x: [E] the attention's input, which weighs the heads.
      query: [Hi, Ki] after rotary position.
      keys: [C, Ki] after norm and rotary position.

    Returns:
      [C] scores.
    """
    rotation = hadamard(config.index_head_dim)
    similarity = np.maximum((query @ rotation) @ (keys @ rotation).T, 0.0)
    scale = (config.index_head_dim * config.index_n_heads) ** -0.5
    return (weights["weights_proj.weight"] @ x) * scale @ similarity


def index_query(weights: Tensors, config: Config, latent: Array, angles: Array) -> Array:
    """Query heads [Hi, Ki] from the attention's own low-rank query [Rq]."""
    heads = (weights["wq_b.weight"] @ latent).reshape(config.index_n_heads, config.index_head_dim)
    return rotate(heads, angles)
