"""The configurations of the released models that ship: `configs/model/{flash,pro}.toml`.

The counts that they are held to are those of the published checkpoints' own headers.
"""

import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxspec.checkpoint import released_tensors
from jaxspec.config import ModelConfig, config_from_released, layer_kind, read_model_toml
from jaxspec.model.params import abstract, count_parameters
from jaxspec.resources import packaged_config

SIZES = {
    "flash": {
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "index_topk": 512,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 1.5,
    },
    "pro": {
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "index_topk": 1024,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
    },
}
SHARED = {
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "max_position_embeddings": 2**20,
    "swiglu_limit": 10.0,
    "rope_theta": 1e4,
    "compress_rope_theta": 1.6e5,
    "yarn_factor": 16.0,
    "yarn_original_length": 65536,
}
FP8 = re.compile(
    r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.|\.shared_experts\.|\.[eh]_proj\."
)
"""Tensors of one byte a number and one scale for each block of 128 x 128."""
FP4 = re.compile(r"\.experts\.")
"""Tensors of two numbers a byte and one scale for each 32 of the last axis."""


def read(name: str) -> ModelConfig:
    return read_model_toml(packaged_config(f"model/{name}.toml"))


def stored_elements(name: str, shape: tuple[int, ...]) -> list[int]:
    """Elements of a tensor as the release stores it, and of its scales if it has them."""
    size = math.prod(shape)
    if FP4.search(name):
        return [size // 2, size // 32]
    if FP8.search(name):
        return [size, math.prod(-(-side // 128) for side in shape)]
    return [size]


def stored(cfg: ModelConfig) -> dict[str, list[int]]:
    leaves = jax.tree.leaves(abstract(cfg))
    tensors = {name: shape for leaf in leaves for name, shape in released_tensors(leaf).items()}
    return {name: stored_elements(name, shape) for name, shape in tensors.items()}


def count_tensors(stored: dict[str, list[int]], prefix: str = "") -> int:
    return sum(len(parts) for name, parts in stored.items() if name.startswith(prefix))


def test_layers_are_of_the_published_kinds() -> None:
    """Flash: two sliding-window layers, then CSA and HCA in turn; Pro: two HCA layers, then so."""
    flash, pro = read("flash"), read("pro")
    assert flash.compress_ratios == (0, 0) + (4, 128) * 20 + (4,)
    assert pro.compress_ratios == (128, 128) + (4, 128) * 29 + (4,)
    assert flash.mtp_ratios == pro.mtp_ratios == (0,)
    kinds = [[layer_kind(ratio) for ratio in cfg.compress_ratios] for cfg in (flash, pro)]
    counts = [[each.count(kind) for kind in ("sliding", "csa", "hca")] for each in kinds]
    assert counts == [[2, 21, 20], [0, 30, 31]]


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_the_published_ones(name: str) -> None:
    cfg = read(name)
    for field, value in (SIZES[name] | SHARED).items():
        assert getattr(cfg, field) == value, field


@pytest.mark.parametrize(("name", "billions", "digits"), [("flash", 284.33, 2), ("pro", 1600, -2)])
def test_parameters_add_up_to_the_published_count(name: str, billions: float, digits: int) -> None:
    """Tensors of the main model; the hash layers' token tables and the MTP block are left out."""
    table = abstract(read(name))
    main = [leaf for leaf in jax.tree.leaves(table.replace(mtp=())) if leaf.dtype != jnp.int32]
    count = sum(math.prod(leaf.shape) for leaf in main)
    assert round(count / 1e9, digits) == billions
    mtp = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(table.mtp))
    assert count + mtp == count_parameters(read(name))


def test_tensors_are_those_of_the_published_headers() -> None:
    """Every tensor of the checkpoint counts, scales too; elements are those that are stored."""
    flash, pro = stored(read("flash")), stored(read("pro"))
    assert count_tensors(flash) == 69_187
    assert count_tensors(flash, "mtp.0.") == 1_575
    assert count_tensors(pro) == 145_116
    assert sum(sum(parts) for parts in pro.values()) == 861_608_274_846


@pytest.mark.parametrize("name", SIZES)
def test_it_equals_the_released_config_json(name: str) -> None:
    path = Path(__file__).parents[2] / "shared" / "v4" / f"{name}.json"
    if not path.exists():
        pytest.skip(f"no released configuration at {path}")
    assert read(name) == config_from_released(json.loads(path.read_text())["config"])
    assert config_from_released(read(name).to_released()) == read(name)
