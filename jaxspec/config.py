"""What a checkpoint is: the hyperparameters of one DeepSeek-V4 model, as data."""

from __future__ import annotations

import dataclasses
import json
import reprlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeGuard

from jaxspec.errors import UsageError
from jaxspec.limits import INT32_MAX

LayerKind = Literal["sliding", "csa", "hca"]
CSA_RATIO = 4
"""The ratio that means overlapping windows and an indexer; any other non-zero ratio is HCA."""


def layer_kind(ratio: int) -> LayerKind:
    """Attention kind of a layer that folds `ratio` tokens into an entry (V4 report, 2.3)."""
    if ratio == 0:
        return "sliding"
    return "csa" if ratio == CSA_RATIO else "hca"


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Hyperparameters under the names of the released `config.json`; no defaults, all are facts.

    `compress_ratios` has one entry per decoder layer, `mtp_ratios` one per MTP block.
    """

    vocab_size: int
    hidden_size: int
    compress_ratios: tuple[int, ...]
    mtp_ratios: tuple[int, ...]
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
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn_factor: float
    yarn_original_length: int
    yarn_beta_fast: float
    yarn_beta_slow: float
    max_position_embeddings: int
    bos_token_id: int
    eos_token_id: int

    @property
    def num_layers(self) -> int:
        """Decoder layers, MTP blocks not counted."""
        return len(self.compress_ratios)

    @property
    def ratios(self) -> tuple[int, ...]:
        """Ratios of all blocks: the decoder's, then the MTP blocks'."""
        return self.compress_ratios + self.mtp_ratios

    def to_released(self) -> dict[str, Any]:
        """The released `config.json` that `config_from_released` reads back as this."""
        raw = dataclasses.asdict(self)
        yarn = {theirs: raw.pop(ours) for ours, theirs in _YARN.items()}
        raw |= _BUILT | {
            "architectures": ["DeepseekV4ForCausalLM"],
            "compress_ratios": [*self.ratios],
            "num_hidden_layers": self.num_layers,
            "num_nextn_predict_layers": len(self.mtp_ratios),
            "rope_scaling": {**yarn, "type": "yarn"},
        }
        del raw["mtp_ratios"]
        return raw

    def __post_init__(self) -> None:
        for ratio in self.ratios:
            if not isinstance(ratio, int) or isinstance(ratio, bool) or ratio < 0:
                raise UsageError(
                    f"compress_ratios holds {ratio!r}; each must be an integer >= 0 "
                    "(0 sliding window, 4 CSA, any other HCA)"
                )
        for field in dataclasses.fields(self):
            if field.type in ("int", "float"):
                _check_number(field.name, getattr(self, field.name))
        for name in ("bos_token_id", "eos_token_id"):
            if getattr(self, name) >= self.vocab_size:
                raise UsageError(f"{name} must be below vocab_size, {self.vocab_size}")
        for whole, part in _DIVISIBLE:
            if _size(self, whole) % getattr(self, part):
                raise UsageError(f"{part} must divide {whole}, {_size(self, whole)}")
        for name in ("head_dim", "index_head_dim", "qk_rope_head_dim"):
            if getattr(self, name) % 2:
                raise UsageError(f"{name} must be even: rotary embedding turns pairs")
        if self.qk_rope_head_dim > min(self.head_dim, self.index_head_dim):
            raise UsageError("qk_rope_head_dim must not exceed head_dim or index_head_dim")
        if self.num_experts_per_tok > self.n_routed_experts:
            raise UsageError("num_experts_per_tok must not exceed n_routed_experts")


_BUILT: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "hidden_act": "silu",
    "attention_bias": False,
    "num_key_value_heads": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""Settings of the released `config.json` that have one value in every DeepSeek-V4."""
_MAY_BE_ZERO = {"num_hash_layers", "bos_token_id", "eos_token_id", "n_shared_experts"}
_DIVISIBLE = (("num_attention_heads * head_dim", "o_groups"),)
_YARN = {
    "yarn_factor": "factor",
    "yarn_original_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def _check_number(name: str, value: int | float) -> None:
    least = "at least" if name in _MAY_BE_ZERO else "above"
    in_range = 0 <= value <= INT32_MAX  # false for NaN
    if not in_range or (value == 0 and name not in _MAY_BE_ZERO):
        shown = reprlib.repr(value)
        raise UsageError(f"{name} is {shown}; it must be {least} 0 and finite, {INT32_MAX} at most")


def _size(cfg: ModelConfig, product: str) -> int:
    size = 1
    for name in product.split(" * "):
        size *= getattr(cfg, name)
    return size


def read_config(path: Path, *, mtp_blocks: int | None = None) -> ModelConfig:
    """Reads the released layout's `config.json`.

    Args:
        path: the file.
        mtp_blocks: how many MTP blocks the checkpoint holds, if that is known better than from
            `num_nextn_predict_layers` (the field is stale in some releases).

    Raises:
        UsageError: the file is missing, is not JSON, or lacks or contradicts a field.
    """
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; a model directory holds config.json") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None
    return config_from_released(raw, source=str(path), mtp_blocks=mtp_blocks)


def config_from_released(
    raw: Mapping[str, Any], *, source: str = "config.json", mtp_blocks: int | None = None
) -> ModelConfig:
    """Translates the released `config.json` (a mapping) into a `ModelConfig`."""
    if not isinstance(raw, Mapping):
        raise UsageError(f"{source} must hold a JSON object")
    flat = dict(raw)
    yarn = flat.get("rope_scaling")
    if not isinstance(yarn, Mapping):
        raise UsageError(f"{source} lacks rope_scaling, the YaRN settings of compressed layers")
    _check_built(flat, source)
    flat |= {ours: yarn[theirs] for ours, theirs in _YARN.items() if theirs in yarn}
    layers = flat.get("num_hidden_layers")
    ratios = flat.get("compress_ratios")
    if not _is_count(layers) or not isinstance(ratios, list):
        raise UsageError(
            f"{source} must hold num_hidden_layers, an integer >= 0, and the list compress_ratios"
        )
    if mtp_blocks is None:
        mtp_blocks = flat.get("num_nextn_predict_layers", 0)
        if not _is_count(mtp_blocks):
            raise UsageError(f"{source}: num_nextn_predict_layers must be an integer >= 0")
    if len(ratios) != layers + mtp_blocks:
        raise UsageError(
            f"{source} has {len(ratios)} compress_ratios; {layers} layers and {mtp_blocks} MTP "
            f"blocks need {layers + mtp_blocks}"
        )
    flat["compress_ratios"], flat["mtp_ratios"] = tuple(ratios[:layers]), tuple(ratios[layers:])
    return _build(flat, source, strict=False)


def _check_built(raw: Mapping[str, Any], source: str) -> None:
    """Refuses what is no DeepSeek-V4, before it gives wrong answers."""
    stated = {key: raw[key] for key in _BUILT if key in raw}
    built = _BUILT | {"rope_scaling.type": "yarn"}
    if "type" in raw["rope_scaling"]:
        stated["rope_scaling.type"] = raw["rope_scaling"]["type"]
    for key, value in stated.items():
        if value != built[key]:
            raise UsageError(f"{source}: {key} is {value!r}; only {built[key]!r} is built")


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= INT32_MAX


def read_model_toml(path: Path) -> ModelConfig:
    """Reads `configs/model/*.toml`: exactly the fields of `ModelConfig`, no unknown key."""
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from None
    return _build(raw, str(path), strict=True)


def _build(raw: Mapping[str, Any], source: str, *, strict: bool) -> ModelConfig:
    fields = {field.name: field.type for field in dataclasses.fields(ModelConfig)}
    if missing := sorted(fields.keys() - raw.keys()):
        raise UsageError(f"{source} lacks {', '.join(missing)}")
    if strict and (unknown := sorted(raw.keys() - fields.keys())):
        raise UsageError(f"{source} has unknown keys {', '.join(unknown)}")
    values: dict[str, Any] = {}
    for name, kind in fields.items():
        value = raw[name]
        if str(kind).startswith("tuple"):
            if not isinstance(value, list | tuple):
                raise UsageError(f"{source}: {name} must be a list of integers")
            values[name] = tuple(value)
        elif kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
            # What is too large for a float is refused with the other ranges.
            values[name] = float(value) if abs(value) <= INT32_MAX else value
        elif kind == "int" and isinstance(value, int) and not isinstance(value, bool):
            values[name] = value
        else:
            raise UsageError(f"{source}: {name} must be {kind}, not {value!r}")
    if not values["compress_ratios"]:
        raise UsageError(f"{source}: num_hidden_layers is 0; a model has at least one layer")
    try:
        return ModelConfig(**values)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
