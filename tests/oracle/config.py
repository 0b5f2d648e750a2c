"""Hyperparameters of a DeepSeek-V4 checkpoint, under the names of the released `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

LayerKind = Literal["sliding", "csa", "hca"]

CSA_RATIO = 4
"""The one ratio whose windows overlap and whose entries an indexer selects."""


@dataclass(frozen=True)
class Yarn:
    """YaRN extension of the rotary frequencies (`rope_scaling`)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class Config:
    """What the oracle needs of `config.json`. Field names are the released keys."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    compress_ratios: tuple[int, ...]
    """Tokens per compressed entry, one number per layer and then per MTP block; 0: sliding."""
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    num_hash_layers: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    rope_scaling: Yarn

    @classmethod
    def from_released(cls, raw: Mapping[str, Any]) -> Config:
        """Read a parsed `config.json`.

        Raises:
          KeyError: a key that the model needs is absent.
          ValueError: the keys contradict each other (see `_check`).
        """
        values = {field.name: raw[field.name] for field in fields(cls)}
        values["compress_ratios"] = tuple(values["compress_ratios"])
        values["rope_scaling"] = Yarn(
            **{field.name: raw["rope_scaling"][field.name] for field in fields(Yarn)}
        )
        config = cls(**values)
        config._check()
        return config

    def kind(self, layer: int) -> LayerKind:
        """Attention kind of a layer; layer L is the MTP block."""
        ratio = self.compress_ratios[layer]
        if ratio == 0:
            return "sliding"
        return "csa" if ratio == CSA_RATIO else "hca"

    def _check(self) -> None:
        blocks = self.num_hidden_layers + self.num_nextn_predict_layers
        rules = {
            f"compress_ratios has {len(self.compress_ratios)} entries, expected one per block "
            f"({blocks})": len(self.compress_ratios) == blocks,
            "num_nextn_predict_layers must be 0 or 1": self.num_nextn_predict_layers in (0, 1),
            "qk_rope_head_dim must be even": self.qk_rope_head_dim % 2 == 0,
            "head_dim and index_head_dim must be at least qk_rope_head_dim": self.qk_rope_head_dim
            <= min(self.head_dim, self.index_head_dim),
            "index_head_dim must be a power of two": self.index_head_dim.bit_count() == 1,
            "o_groups must divide num_attention_heads * head_dim": self.num_attention_heads
            * self.head_dim
            % self.o_groups
            == 0,
            "num_experts_per_tok must not exceed n_routed_experts": self.num_experts_per_tok
            <= self.n_routed_experts,
        }
        for message, holds in rules.items():
            if not holds:
                raise ValueError(message)
