"""The loader accounts for every tensor and every setting, and says in one line what is wrong.

Writing and reading are inverse to each other, bit for bit.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import checkpoint
from jaxspec.checkpoint import checkpoint_bytes, load_checkpoint, save_checkpoint
from jaxspec.config import config_from_released, read_config
from jaxspec.errors import UsageError
from tests.oracle import random_checkpoint
from tests.oracle import save_checkpoint as save_released

ALL_KINDS = {"compress_ratios": [0, 4, 8, 0], "num_nextn_predict_layers": 1}
RAW, TENSORS = random_checkpoint(ALL_KINDS)
TENSOR_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def write(folder: Path, config: dict[str, Any] | None = None, **tensors: np.ndarray | None) -> Path:
    """The checkpoint with some settings and tensors changed, or left out where None."""
    changed = {name: x for name, x in (TENSORS | tensors).items() if x is not None}
    settings = {key: value for key, value in (RAW | (config or {})).items() if value is not None}
    save_released(folder, settings, changed)
    return folder


def refusal(folder: Path) -> str:
    """The one line with which the loader refuses."""
    with pytest.raises(UsageError) as error:
        load_checkpoint(folder)
    line = str(error.value)
    assert "\n" not in line
    return line


def same_bits(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


def kind_of(name: str) -> str:
    return re.sub(r"\.\d+", "", name)


# Tensors.


def test_every_fault_is_named_in_one_line(tmp_path):
    missing = "layers.1.attn.indexer.compressor.ape", "mtp.0.enorm.weight", "hc_head_base"
    extra = "layers.0.attn.compressor.ape", "layers.3.attn_norm.weight", "rotary.inv_freq"
    misshapen = "layers.2.attn.wo_a.weight", "layers.1.ffn.experts.3.w2.weight", "norm.weight"
    wrong_type = "layers.0.ffn.gate.tid2eid", "head.weight"
    changes: dict[str, np.ndarray | None] = dict.fromkeys(missing)
    changes |= {name: np.zeros(3, np.float32) for name in (*extra, *misshapen)}
    changes |= {wrong_type[0]: TENSORS[wrong_type[0]].astype(np.float32)}
    changes |= {wrong_type[1]: TENSORS[wrong_type[1]].astype(np.int32)}
    line = refusal(write(tmp_path, **changes))
    assert str(tmp_path) in line
    for words, names in (("missing", missing), ("extra", extra)):
        assert f"{words} {', '.join(sorted(names))}" in line
    for name in misshapen:
        assert f"{name} has shape [3], not {[*TENSORS[name].shape]}" in line
    for name in wrong_type:
        assert re.search(rf"{name} is [FI]\d+, not ", line)


@pytest.mark.parametrize("kind", sorted({kind_of(name) for name in TENSORS}))
def test_any_tensor_is_missed(tmp_path, kind):
    name = [name for name in TENSORS if kind_of(name) == kind][-1]
    assert f"missing {name}" in refusal(write(tmp_path, **{name: None}))
    assert f"{name} has shape" in refusal(write(tmp_path, **{name: TENSORS[name][..., :-1]}))
    assert f"{name} has shape" in refusal(write(tmp_path, **{name: TENSORS[name][None]}))


def test_a_table_of_experts_that_do_not_exist_is_refused(tmp_path):
    """A gather would take the last expert without a word."""
    name = "layers.0.ffn.gate.tid2eid"
    for wrong in (RAW["n_routed_experts"], -1, 2**40):
        table = TENSORS[name].copy()
        table[5, 1] = wrong
        assert re.search(f"{name} .*{wrong}.*0 to 3", refusal(write(tmp_path, **{name: table})))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int8, np.uint8])
def test_only_the_formats_that_it_says_are_taken(tmp_path, dtype):
    line = refusal(write(tmp_path, **{"embed.weight": TENSORS["embed.weight"].astype(dtype)}))
    assert re.search(r"embed.weight is [FUI]\d+, not F32 or BF16", line)


# Files.


@pytest.mark.parametrize("keep", [0, 4, 8, 200, 0.5, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    file = write(tmp_path) / TENSOR_FILE
    content = file.read_bytes()
    file.write_bytes(content[: int(keep * len(content)) if isinstance(keep, float) else keep])
    assert f"{file} is truncated or not a safetensors file" in refusal(tmp_path)


@pytest.mark.parametrize("content", [b"PK\x03\x04" + bytes(99), b"\xff" * 64, b"{}" * 20])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    file = write(tmp_path) / TENSOR_FILE
    file.write_bytes(content)
    assert f"{file} is truncated or not a safetensors file" in refusal(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path):
    file = write(tmp_path) / TENSOR_FILE
    file.unlink()
    file.mkdir()
    assert str(file) in refusal(tmp_path)


def test_the_tensors_of_another_architecture_are_refused(tmp_path):
    write(tmp_path)
    foreign = {"model.embed_tokens.weight": np.zeros((4, 4), np.float32)}
    save_file(foreign, tmp_path / TENSOR_FILE)
    line = refusal(tmp_path)
    assert "holds no tensor of DeepSeek-V4's released layout" in line
    assert "model.embed_tokens.weight" in line


def test_missing_files_are_named(tmp_path):
    assert "no such directory" in refusal(tmp_path / "nowhere")
    assert "config.json" in refusal(tmp_path)
    (write(tmp_path) / TENSOR_FILE).unlink()
    assert f"{tmp_path / TENSOR_FILE} does not exist" in refusal(tmp_path)


# Shards.


def shard(folder: Path, parts: int = 3) -> dict[str, str]:
    """Splits the checkpoint's file into shards with an index."""
    file = folder / TENSOR_FILE
    tensors = load_file(file)
    file.unlink()
    weight_map = {name: f"part-{i % parts}.safetensors" for i, name in enumerate(tensors)}
    for part in set(weight_map.values()):
        save_file({n: x for n, x in tensors.items() if weight_map[n] == part}, folder / part)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_shards_are_the_same_model(tmp_path):
    whole, _ = load_checkpoint(write(tmp_path))
    shard(tmp_path)
    assert same_bits(load_checkpoint(tmp_path)[0], whole)


def test_faulty_shards_are_named(tmp_path):
    weight_map = shard(write(tmp_path))
    part = tmp_path / "part-1.safetensors"
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    assert f"{part} is truncated" in refusal(tmp_path)
    part.unlink()
    assert f"{part} does not exist" in refusal(tmp_path)
    other = load_file(tmp_path / "part-0.safetensors")
    save_file(other, part)
    assert f"{part} repeats tensors of another shard: {min(other)}" in refusal(tmp_path)
    del weight_map
    for text in ("", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"norm.weight": 3}}', "\0"):
        (tmp_path / INDEX_FILE).write_text(text)
        assert f"{tmp_path / INDEX_FILE} is not a safetensors index" in refusal(tmp_path)


# Settings.


NUMBERS = sorted(key for key, value in RAW.items() if type(value) in (int, float))
USED = [key for key in NUMBERS if key not in ("num_nextn_predict_layers", "num_key_value_heads")]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", sorted({kind_of(name) for name in TENSORS}))
def test_a_weight_that_is_no_number_is_refused(tmp_path, kind, value):
    name = next(name for name in TENSORS if kind_of(name) == kind)
    if np.issubdtype(TENSORS[name].dtype, np.integer):
        return  # integers are all finite
    tensor = TENSORS[name].copy()
    tensor.flat[-1] = value
    assert f"{name} holds NaN or infinity" in refusal(write(tmp_path, **{name: tensor}))


@pytest.mark.parametrize("key", USED)
def test_any_setting_is_missed_and_its_type_is_checked(tmp_path, key):
    assert key in refusal(write(tmp_path, {key: None}))
    for wrong in ("8", [8], True, float("nan"), float("inf"), -1, 10**400):
        line = refusal(write(tmp_path, {key: wrong}))
        assert key in line
        assert str(tmp_path / "config.json") in line


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compress_ratios": [0, 4, -8, 0]}, "compress_ratios holds -8; each must be an integer"),
        ({"compress_ratios": [0, 4, 8.0, 0]}, "compress_ratios holds 8.0; each must be an integer"),
        ({"compress_ratios": [0, "4", 8, 0]}, "compress_ratios holds '4'; each must be an integer"),
        ({"compress_ratios": [0, True, 8, 0]}, "compress_ratios holds True"),
        ({"compress_ratios": [0, None, 8, 0]}, "compress_ratios holds None"),
        ({"compress_ratios": [0, 4, 8]}, "3 compress_ratios; 3 layers and 1 MTP blocks need 4"),
        ({"compress_ratios": [0, 4, 8, 0, 0]}, "5 compress_ratios"),
        ({"compress_ratios": []}, "0 compress_ratios"),
        ({"compress_ratios": 4}, "list compress_ratios"),
        ({"compress_ratios": "0480"}, "list compress_ratios"),
        ({"num_hidden_layers": 2}, "4 compress_ratios; 2 layers and 1 MTP"),
        ({"num_hidden_layers": 0, "compress_ratios": [0]}, "num_hidden_layers"),
        ({"rope_scaling": None}, "rope_scaling"),
        ({"rope_scaling": RAW["rope_scaling"] | {"factor": "x"}}, "yarn_factor"),
        ({"rope_scaling": RAW["rope_scaling"] | {"factor": 0}}, "yarn_factor"),
        ({"rope_scaling": RAW["rope_scaling"] | {"type": "linear"}}, "rope_scaling.type"),
        ({"o_groups": 3}, "o_groups must divide"),
        ({"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim must not exceed"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok must not exceed"),
        ({"eos_token_id": 64}, "eos_token_id"),
        ({"model_type": "deepseek_v3"}, "model_type is 'deepseek_v3'"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; only 'sqrtsoftplus' is built"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"attention_bias": True}, "attention_bias"),
    ],
    ids=lambda value: None if isinstance(value, str) else json.dumps(value),
)
def test_settings_that_contradict_are_refused_in_words(tmp_path, settings, words):
    line = refusal(write(tmp_path, settings))
    assert words in line
    assert str(tmp_path / "config.json") in line


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "7", "null", '"x"', "\ufeff{}", "{\0}"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
    (write(tmp_path) / "config.json").write_text(text)
    assert str(tmp_path / "config.json") in refusal(tmp_path)


def test_a_config_that_is_no_text_is_refused(tmp_path):
    (write(tmp_path) / "config.json").write_bytes(b"\xff\xfe\x00{")
    assert str(tmp_path / "config.json") in refusal(tmp_path)


def test_the_number_of_mtp_blocks_follows_from_the_tensors(tmp_path):
    """`num_nextn_predict_layers` is stale in some releases."""
    for stated in (0, 3, None):
        _, cfg = load_checkpoint(write(tmp_path, {"num_nextn_predict_layers": stated}))
        assert (cfg.compress_ratios, cfg.mtp_ratios) == ((0, 4, 8), (0,))
    for wrong in ("one", -1, 1.5, None, [1]):
        with pytest.raises(UsageError, match=r"num_nextn_predict_layers|compress_ratios"):
            config_from_released(RAW | {"num_nextn_predict_layers": wrong})


# Round trips.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_writing_and_reading_are_inverse(tmp_path, dtype):
    first, second = tmp_path / "first", tmp_path / "second"
    params, cfg = load_checkpoint(write(tmp_path / "released"), dtype=dtype)
    save_checkpoint(first, params, cfg)
    again, same_cfg = load_checkpoint(first)
    assert same_cfg == cfg == read_config(first / "config.json")
    assert same_bits(params, again)
    save_checkpoint(second, again, same_cfg)
    for file in (TENSOR_FILE, "config.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes()
    assert sorted(path.name for path in first.iterdir()) == ["config.json", TENSOR_FILE]


def test_float32_comes_back_as_it_was_released(tmp_path):
    params, cfg = load_checkpoint(write(tmp_path / "released"))
    save_checkpoint(tmp_path / "ours", params, cfg)
    ours = load_file(tmp_path / "ours" / TENSOR_FILE)
    assert ours.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert ours[name].dtype == tensor.dtype, name
        assert np.array_equal(ours[name], tensor), name


def test_bfloat16_rounds_what_the_release_keeps_in_it(tmp_path):
    wide, cfg = load_checkpoint(write(tmp_path / "released"))
    save_checkpoint(tmp_path / "ours", wide, cfg, dtype="bfloat16")
    file = tmp_path / "ours" / TENSOR_FILE
    stored = load_file(file)
    kept = [name for name, x in stored.items() if x.dtype == np.float32]
    assert {kind_of(name).split(".")[-1] for name in kept} == {
        "attn_sink", "ape", "bias", "hc_head_fn", "hc_head_base", "hc_head_scale",
        *(f"hc_{a}_{b}" for a in ("attn", "ffn") for b in ("fn", "base", "scale")),
    }  # fmt: skip
    for name, tensor in TENSORS.items():
        want = tensor if tensor.dtype == np.int64 or name in kept else tensor.astype(BF16)
        assert stored[name].dtype == want.dtype, name
        assert stored[name].tobytes() == want.tobytes(), name
    assert sum(x.nbytes for x in stored.values()) == checkpoint_bytes(cfg)
    narrow, _ = load_checkpoint(tmp_path / "ours")
    assert narrow.embed.dtype == jnp.bfloat16
    assert narrow.layers[0].hc_attn.fn.dtype == jnp.float32
    widened, _ = load_checkpoint(tmp_path / "ours", dtype="float32")
    up = jax.tree.map(lambda x, y: x.astype(y.dtype), narrow, widened)
    assert same_bits(widened, up)


BF16 = ml_dtypes.bfloat16


def test_no_stored_bit_is_lost_by_default(tmp_path):
    """One float32 tensor among bfloat16 ones keeps the model in float32."""
    narrow = {
        name: x.astype(BF16)
        for name, x in TENSORS.items()
        if x.dtype == np.float32 and not re.search("hc_|ape$|attn_sink|bias$", name)
    }
    params, _ = load_checkpoint(write(tmp_path, **narrow))
    assert params.embed.dtype == jnp.bfloat16
    narrow["layers.1.attn.wq_a.weight"] = TENSORS["layers.1.attn.wq_a.weight"]
    params, _ = load_checkpoint(write(tmp_path, **narrow))
    assert np.array_equal(params.layers[1].attn.wq_a, narrow["layers.1.attn.wq_a.weight"].T)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    params, cfg = load_checkpoint(write(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(tensors, path):
        Path(path).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(checkpoint, "save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(tmp_path, params, cfg)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert same_bits(load_checkpoint(tmp_path)[0], params)


@pytest.mark.parametrize("name", ["", ".", "x" * 5000, "x\0", "b.safetensors"])
def test_an_index_of_a_file_that_cannot_be_is_refused(tmp_path, name):
    write(tmp_path)
    (tmp_path / TENSOR_FILE).unlink()
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"norm.weight": name}}))
    assert str(tmp_path) in refusal(tmp_path)


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "{", None], ids=["deep", "list", "cut", "dir"]
)
def test_an_index_that_is_none_is_refused(tmp_path, text):
    write(tmp_path)
    (tmp_path / TENSOR_FILE).unlink()
    index = tmp_path / INDEX_FILE
    index.mkdir() if text is None else index.write_text(text)
    assert "is not a safetensors index" in refusal(tmp_path)
