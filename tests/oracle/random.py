"""Random tiny checkpoints in the released layout, for any hyperparameters.

The scales are chosen so that every part of the model shows in its outputs: logits of standard
deviation about 1, sinks and position biases as large as the scores that they compete with, hidden
activations that reach the SwiGLU clamp, routing biases that change the choice of experts, and
enough indexer heads that scores do not tie at zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .basic import Array
from .checkpoint import tensor_shapes
from .config import Config

TINY: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": 4096,
    "vocab_size": 64,
    "hidden_size": 32,
    "num_nextn_predict_layers": 0,
    "compress_ratios": [0, 4, 8, 4],
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
"""A `config.json` of one sliding, two CSA and one HCA layer; without `num_hidden_layers`."""


def random_checkpoint(
    config_overrides: Mapping[str, Any] | None = None, seed: int = 0
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Draw a checkpoint.

    Args:
      config_overrides: keys of `config.json` that differ from `TINY`. `compress_ratios` sets the
        number of layers: one entry per layer, then one per MTP block (`num_nextn_predict_layers`).
      seed: of all weights.

    Returns:
      The content of `config.json`, and float32 tensors (int64 for `tid2eid`) by released name.

    Raises:
      ValueError: an override is no key of the configuration, or the values contradict each other.
    """
    overrides = dict(config_overrides or {})
    unknown = overrides.keys() - TINY.keys() - {"num_hidden_layers"}
    if unknown:
        raise ValueError(f"no such configuration key: {', '.join(sorted(unknown))}")
    raw = TINY | overrides
    raw["compress_ratios"] = list(raw["compress_ratios"])
    raw.setdefault(
        "num_hidden_layers", len(raw["compress_ratios"]) - raw["num_nextn_predict_layers"]
    )
    config = Config.from_released(raw)
    rng = np.random.default_rng(seed)
    tensors = {
        name: draw(rng, name, shape, config) for name, shape in tensor_shapes(config).items()
    }
    return raw, tensors


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...], config: Config) -> Array:
    """One tensor, by the last part of its name that says what it is."""
    if name.endswith("tid2eid"):
        experts = np.arange(config.n_routed_experts)
        rows = [rng.permutation(experts)[: shape[1]] for _ in range(shape[0])]
        return np.stack(rows).astype(np.int64)
    noise = rng.standard_normal(shape)
    if name.endswith("embed.weight"):
        values = noise
    elif name.endswith("norm.weight"):
        values = 1.0 + 0.2 * noise
    elif name.endswith("scale"):
        values = 1.0 + 0.3 * noise
    elif name.endswith("gate.bias"):
        values = 0.2 * noise
    elif name.endswith(("base", "attn_sink", "ape")):
        values = noise
    else:
        values = noise / np.sqrt(shape[-1])
    return values.astype(np.float32)
