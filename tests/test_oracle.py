"""The oracle against recorded outputs: fixtures of the released model, and golden files.

Fixtures are tiny checkpoints with outputs of the released model code. They are looked for in
`shared/fixtures` beside the checkout; without them these tests are skipped, the rest still runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.oracle import Config, Oracle, mtp_logits, random_checkpoint, tensor_shapes
from tests.oracle.basic import hadamard, rope_frequencies
from tests.oracle.golden import FOLDER, compute_golden, read_golden
from tests.oracle.hyper import mixing_of
from tests.oracle.moe import route

FIXTURES = Path(__file__).parents[2] / "shared" / "fixtures"
FLOAT32_FIXTURES = ("mixed", "small", "csa", "hca", "pro", "mtp")
KNOWN_TIES = {("mtp", 0): 268}
"""(fixture, row) -> first position whose top-k set is undetermined, by two exactly equal scores."""

TOLERANCE = 2e-5
TIE = 1e-6
FAST_TOKENS = 48


def fixture(name: str) -> Path:
    folder = FIXTURES / name
    if not folder.exists():
        pytest.skip(f"no fixture at {folder}: put the fixtures beside the checkout to run this")
    return folder


def check_fixture(name: str, row: int, length: int) -> None:
    folder = fixture(name)
    oracle = Oracle.load(folder)
    reference = load_file(folder / "reference.safetensors")
    run = "dequant" if oracle.has_mtp else "full"
    tokens = reference["tokens"][row, :length]
    state, outs = oracle.run(tokens)

    tied = [t for t, out in enumerate(outs) if out.margin < TIE]
    expected_tie = KNOWN_TIES.get((name, row), length)
    assert tied[:1] == [expected_tie][: expected_tie < length]
    end = min(length, expected_tie)

    logits = np.stack([out.logits for out in outs])
    streams = np.stack([out.streams for out in outs])
    errors = {"logits": logits[:end] - reference[f"{run}.logits"][row, :end]}
    for layer in range(oracle.config.num_hidden_layers):
        key = f"{run}.layer{layer}"
        if key in reference:
            errors[key] = streams[:end, layer + 1] - reference[key][row, :end]
        if f"{key}.route.idx" in reference:
            check_sets([out.experts[layer] for out in outs], reference[f"{key}.route.idx"][row])
        if f"{key}.idx" in reference:
            check_sets([out.topk[layer] for out in outs], reference[f"{key}.idx"][row])
        for part, entries in entries_of(state.layers[layer]).items():
            if f"{key}.{part}" in reference:
                errors[f"{key}.{part}"] = entries - reference[f"{key}.{part}"][row, : len(entries)]
    if oracle.has_mtp:
        got = mtp_logits(oracle, streams[:, -1], tokens)[:end]
        errors["mtp"] = got - reference[f"{run}.mtp_logits"][row, : len(got)]
    worst = {key: float(np.abs(error).max(initial=0.0)) for key, error in errors.items()}
    assert max(worst.values()) < TOLERANCE, worst


def check_sets(got: list, expected: np.ndarray) -> None:
    for t, ids in enumerate(got):
        assert sorted(ids) == sorted(i for i in expected[t] if i >= 0), f"position {t}"


def entries_of(layer) -> dict[str, np.ndarray]:
    parts = {"comp": layer.compressed, "idxcomp": layer.index}
    return {name: part.entries for name, part in parts.items() if part is not None}


@pytest.mark.parametrize("name", FLOAT32_FIXTURES)
def test_reproduces_the_start_of_every_fixture(name):
    check_fixture(name, row=0, length=FAST_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("name", FLOAT32_FIXTURES)
def test_reproduces_every_fixture(name, row):
    check_fixture(name, row, length=300)


@pytest.mark.parametrize("name", FLOAT32_FIXTURES)
def test_knows_the_tensors_of_every_fixture(name):
    folder = fixture(name)
    config = Oracle.load(folder).config
    with safe_open(folder / "model.safetensors", "np") as file:
        names = file.keys()
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    assert tensor_shapes(config) == stored


def test_operations_agree_with_their_fixture():
    with safe_open(fixture("mixed").parent / "ops.safetensors", "np") as file:
        names = file.keys()
        plain = [name for name in names if file.get_slice(name).get_dtype() in ("F32", "I64")]
        ops = {name: file.get_tensor(name) for name in plain}
    raw, _ = random_checkpoint({"head_dim": 64, "index_head_dim": 64, "qk_rope_head_dim": 64})
    raw["rope_scaling"] = raw["rope_scaling"] | {"original_max_position_embeddings": 65536}
    config = Config.from_released(raw)
    for ratio, name in ((0, "sliding"), (4, "compress"), (128, "compress")):
        expected = ops[f"rope.inv_freq_{name}"]
        np.testing.assert_allclose(rope_frequencies(config, ratio), expected, rtol=1e-6)
    rotated = ops["hadamard.in"] @ hadamard(128)
    np.testing.assert_allclose(rotated, ops["hadamard.out"], atol=2e-6)
    for i, u in enumerate(ops["hc.mixes"][0]):
        mix = mixing_of(u.astype(np.float64), ops["hc.base"], ops["hc.scale"], config)
        for part in ("pre", "post", "comb"):
            np.testing.assert_allclose(getattr(mix, part), ops[f"hc.{part}"][0, i], atol=1e-6)
    config = Config.from_released(raw | {"n_routed_experts": 16, "num_experts_per_tok": 6})
    gate = {"gate.weight": np.eye(16), "gate.bias": ops["router.bias"]}
    for logits, ids, weights in zip(
        ops["router.logits"], ops["router.idx"], ops["router.w"], strict=True
    ):
        chosen, got = route(gate, config, logits.astype(np.float64), token=0)
        assert list(chosen.ids) == list(ids)
        np.testing.assert_allclose(got, weights, rtol=1e-6)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.npz")), ids=lambda path: path.stem)
@pytest.mark.parametrize("length", [24, pytest.param(None, marks=pytest.mark.slow)])
def test_reproduces_golden_files(path, length):
    golden = read_golden(path)
    tokens = golden.tokens[:length]
    positions = golden.positions[golden.positions < len(tokens)]
    again = compute_golden(golden.config, golden.tensors, tokens, positions)
    # Stored as float32: half a unit in the last place of values below 8.
    close = {"atol": 1e-6, "rtol": 0.0}
    np.testing.assert_allclose(again.logits, golden.logits[: len(tokens)], **close)
    np.testing.assert_allclose(again.streams, golden.streams[: len(positions)], **close)
    if golden.mtp_logits is not None:
        np.testing.assert_allclose(again.mtp_logits, golden.mtp_logits[: len(tokens) - 1], **close)
    assert again.topk_margin >= golden.topk_margin * (1 - 1e-6)
