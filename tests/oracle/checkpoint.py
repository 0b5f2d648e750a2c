"""Names and shapes of the tensors of an unquantised checkpoint, and its two files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from .basic import Array, Tensors
from .config import CSA_RATIO, Config

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: Config) -> Shapes:
    """Every tensor that a checkpoint of this configuration holds, by its released name."""
    E, V = config.hidden_size, config.vocab_size
    shapes: Shapes = {"embed.weight": (V, E), "head.weight": (V, E), "norm.weight": (E,)}
    shapes |= _hyper_head(config)
    for layer in range(config.num_hidden_layers):
        hashed = layer < config.num_hash_layers
        block = _block(config, config.compress_ratios[layer], hashed)
        shapes |= _prefixed(f"layers.{layer}.", block)
    if config.num_nextn_predict_layers:
        block = _block(config, config.compress_ratios[-1], hashed=False)
        extra: Shapes = {"e_proj.weight": (E, E), "h_proj.weight": (E, E)}
        extra |= {f"{name}.weight": (E,) for name in ("enorm", "hnorm", "norm")}
        shapes |= _prefixed("mtp.0.", block | extra | _hyper_head(config))
    return shapes


def check_tensors(config: Config, tensors: Tensors) -> None:
    """Raise ValueError unless names and shapes are exactly those of the configuration."""
    expected = tensor_shapes(config)
    faults = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    faults += [f"unexpected {name}" for name in sorted(tensors.keys() - expected.keys())]
    faults += [
        f"{name} has shape {tensors[name].shape}, expected {shape}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if faults:
        raise ValueError("checkpoint does not fit its configuration: " + "; ".join(faults))


def read_checkpoint(folder: str | Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """The parsed `config.json` and the tensors of `model.safetensors`."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    if "quantization_config" in config:
        raise ValueError(f"{folder} is quantised; the oracle reads unquantised checkpoints only")
    return config, load_file(folder / "model.safetensors")


def save_checkpoint(folder: str | Path, config: Mapping[str, Any], tensors: Tensors) -> None:
    """Write `config.json` and `model.safetensors` in the released layout."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(dict(tensors), folder / "model.safetensors")


def _prefixed(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def _hyper_head(config: Config) -> Shapes:
    S = config.hc_mult
    return {"hc_head_fn": (S, S * config.hidden_size), "hc_head_base": (S,), "hc_head_scale": (1,)}


def _block(config: Config, ratio: int, hashed: bool) -> Shapes:
    E, S = config.hidden_size, config.hc_mult
    shapes: Shapes = {}
    for name in ("attn", "ffn"):
        shapes[f"{name}_norm.weight"] = (E,)
        shapes[f"hc_{name}_fn"] = (2 * S + S * S, S * E)
        shapes[f"hc_{name}_base"] = (2 * S + S * S,)
        shapes[f"hc_{name}_scale"] = (3,)
    return shapes | _prefixed("attn.", _attention(config, ratio)) | _ffn(config, hashed)


def _attention(config: Config, ratio: int) -> Shapes:
    E, H, K = config.hidden_size, config.num_attention_heads, config.head_dim
    latent, G, rank = config.q_lora_rank, config.o_groups, config.o_lora_rank
    shapes: Shapes = {
        "attn_sink": (H,),
        "wq_a.weight": (latent, E),
        "q_norm.weight": (latent,),
        "wq_b.weight": (H * K, latent),
        "wkv.weight": (K, E),
        "kv_norm.weight": (K,),
        "wo_a.weight": (G * rank, H * K // G),
        "wo_b.weight": (E, G * rank),
    }
    if ratio:
        shapes |= _prefixed("compressor.", _compressor(E, K, ratio))
    if ratio == CSA_RATIO:
        heads, dims = config.index_n_heads, config.index_head_dim
        shapes["indexer.wq_b.weight"] = (heads * dims, latent)
        shapes["indexer.weights_proj.weight"] = (heads, E)
        shapes |= _prefixed("indexer.compressor.", _compressor(E, dims, ratio))
    return shapes


def _compressor(width: int, dims: int, ratio: int) -> Shapes:
    rows = 2 * dims if ratio == CSA_RATIO else dims
    return {
        "ape": (ratio, rows),
        "wkv.weight": (rows, width),
        "wgate.weight": (rows, width),
        "norm.weight": (dims,),
    }


def _ffn(config: Config, hashed: bool) -> Shapes:
    E, X, inner = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    shapes: Shapes = {"ffn.gate.weight": (X, E)}
    if hashed:
        shapes["ffn.gate.tid2eid"] = (config.vocab_size, config.num_experts_per_tok)
    else:
        shapes["ffn.gate.bias"] = (X,)
    for expert in ("shared_experts", *(f"experts.{index}" for index in range(X))):
        shapes |= {
            f"ffn.{expert}.w1.weight": (inner, E),
            f"ffn.{expert}.w2.weight": (E, inner),
            f"ffn.{expert}.w3.weight": (inner, E),
        }
    return shapes
