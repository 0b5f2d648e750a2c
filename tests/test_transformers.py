"""The engine against transformers' DeepSeek-V4 on models that are drawn anew for each seed.

    python -m pytest -m transformers [--transformers-python PATH]

The weights are written by our writer and read by transformers' loader. Without a PATH, the Python
of the tests must have transformers (the extra of that name).

Where transformers 5.24 is known to differ, the comparison stays away from it:

- all in float32 and unquantised: it has no FP8 rounding of keys and values, no Hadamard turn and no
  FP4 in the indexer, and keeps rotations, router and mixing in the activations' dtype;
- sequences of one length, prompts one by one: on the left it pools padding into entries;
- nothing is cut back, branched or packed, which its compressors' buffers do not follow;
- no MTP logits: it has no such block. Our streams are drafted with the block all the same;
- one HCA ratio a model (`transformers_worker.py`), as it has one for each kind of layer;
- enough indexer heads that scores seldom tie at zero. The float64 oracle gives the gap at every
  top-k boundary; a row is compared up to the first position where one is below `NARROW`.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec import Engine, Request, RunConfig, score
from jaxspec.checkpoint import load_checkpoint, save_checkpoint
from tests.oracle import Oracle, random_checkpoint
from tests.oracle import save_checkpoint as save_released
from tests.oracle.random import TINY

SEEDS = range(16)
LENGTH, PROMPTS, STEPS = 144, (1, 5, 37, 130), 24
"""Tokens of a sequence: one entry of an HCA layer of the released ratio, and some more."""

TOLERANCE = 1e-4
"""On logits of standard deviation 1: two float32 programs that round differently."""

NARROW = 1e-5
"""A top-k that rests on a smaller gap than this may fall either way in float32."""


def draw_settings(seed: int) -> dict[str, Any]:
    """Overrides of the oracle's `TINY`, one MTP block included."""
    coin = random.Random(seed)
    folded = coin.choice([8, 16, 32, 128])
    ratios = [coin.choice([0, 4, folded]) for _ in range(coin.randint(1, 4))]
    heads, experts = coin.choice([2, 4, 6]), coin.randint(3, 9)
    yarn = {
        "factor": coin.choice([1.5, 4, 16, 40]),
        "original_max_position_embeddings": coin.choice([16, 64, 4096, 65536]),
        "beta_fast": coin.choice([8, 32]),
        "beta_slow": coin.choice([1, 2]),
        "type": "yarn",
    }
    return {
        "compress_ratios": [*ratios, 0],
        "num_nextn_predict_layers": 1,
        "num_hash_layers": coin.randint(0, len(ratios)),
        "hidden_size": coin.choice([32, 48]),
        "vocab_size": coin.choice([50, 64]),
        "num_attention_heads": heads,
        "o_groups": coin.choice([g for g in (1, 2, 3, 6) if heads % g == 0]),
        "o_lora_rank": coin.choice([8, 12]),
        "head_dim": coin.choice([8, 16, 32]),
        "qk_rope_head_dim": coin.choice([4, 8]),
        "q_lora_rank": coin.choice([16, 20]),
        "sliding_window": coin.choice([4, 8, 16, 128]),
        "index_n_heads": coin.choice([16, 24]),
        "index_head_dim": coin.choice([8, 16, 32]),
        "index_topk": coin.randint(1, 8),
        "n_routed_experts": experts,
        "num_experts_per_tok": coin.randint(1, min(4, experts)),
        "moe_intermediate_size": coin.choice([12, 24]),
        "routed_scaling_factor": coin.choice([1.0, 1.5, 2.5]),
        "swiglu_limit": coin.choice([0.5, 1.0, 10.0]),
        "hc_mult": coin.choice([2, 4]),
        "hc_sinkhorn_iters": coin.choice([1, 5, 20]),
        "rms_norm_eps": coin.choice([1e-6, 1e-5]),
        "rope_theta": coin.choice([1e4, 5e5]),
        "compress_rope_theta": coin.choice([4e4, 1.6e5]),
        "rope_scaling": yarn,
    }


Ask = Callable[[Path, np.ndarray, list[list[int]], int], dict[str, Any]]


@pytest.fixture(scope="module")
def ask(pytestconfig: pytest.Config) -> Iterator[Ask]:
    """Puts a question to transformers in the Python of `--transformers-python`."""
    python = pytestconfig.getoption("--transformers-python")
    worker = [python, str(Path(__file__).with_name("transformers_worker.py"))]
    with subprocess.Popen(
        worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        first = process.stdout.readline()
        if not first:
            process.wait()
            pytest.fail(f"{python} has no transformers with DeepSeek-V4; see --transformers-python")
        print(*(f"{name} {version}" for name, version in json.loads(first).items()))

        def put(model: Path, tokens: np.ndarray, prompts: list[list[int]], steps: int) -> dict:
            question = {
                "model": str(model),
                "tokens": tokens.tolist(),
                "prompts": prompts,
                "steps": steps,
            }
            print(json.dumps(question), file=process.stdin, flush=True)
            found = json.loads(process.stdout.readline())
            assert "error" not in found, found["error"]
            return found

        try:
            yield put
        finally:
            process.stdin.close()


def first_narrow(oracle: Oracle, tokens: np.ndarray) -> int:
    """The first position at which a top-k of one sequence rests on almost nothing."""
    _, outs = oracle.run(tokens)
    return next((t for t, out in enumerate(outs) if out.margin < NARROW), len(outs))


@pytest.mark.transformers
@pytest.mark.parametrize("seed", SEEDS)
def test_logits_and_greedy_streams_are_those_of_transformers(ask, tmp_path, seed):
    raw, tensors = random_checkpoint(draw_settings(seed), seed)
    save_released(tmp_path / "drawn", raw, tensors)
    params, cfg = load_checkpoint(tmp_path / "drawn")
    save_checkpoint(tmp_path / "written", params, cfg)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(2, cfg.vocab_size, (2, LENGTH), dtype=np.int32)
    prompts = [tokens[i % 2, :length].tolist() for i, length in enumerate(PROMPTS)]
    theirs = ask(tmp_path / "written", tokens, prompts, STEPS)
    oracle = Oracle(raw, tensors)

    ours = np.asarray(score(params, cfg, tokens))
    assert ours.std() > 0.5
    gap = np.abs(ours - np.asarray(theirs["logits"])).max(-1)
    end = [first_narrow(oracle, row) for row in tokens]
    for row, stop in enumerate(end):
        assert gap[row, :stop].max(initial=0) < TOLERANCE, (row, int(gap[row].argmax()))
    worst = max(gap[row, :stop].max(initial=0) for row, stop in enumerate(end))

    run = RunConfig(method="tree", budget=16, batch_size=3, max_new_tokens=STEPS, dtype="float32")
    engine = Engine(params, cfg, run)
    requests = [Request(id, tuple(prompt)) for id, prompt in enumerate(prompts)]
    same = 0
    for prompt, theirs_row, ours_row in zip(
        prompts, theirs["greedy"], engine.generate(requests), strict=True
    ):
        stream = until_end(theirs_row, cfg.eos_token_id)
        same += stream == [*ours_row.token_ids]
        if stream != [*ours_row.token_ids]:
            assert parts_at_a_tie(oracle, prompt, stream, [*ours_row.token_ids])
    print(
        f"seed {seed}: {cfg.compress_ratios}, {sum(end)} of {tokens.size} positions, worst gap "
        f"{worst:.1e}, {same} of {len(prompts)} streams, "
        f"accepted length {engine.statistics.accepted_length:.2f}"
    )
    assert sum(end) > tokens.size / 4


def until_end(stream: list[int], end: int) -> list[int]:
    """Up to and with the first end token."""
    return stream[: stream.index(end) + 1] if end in stream else stream


def parts_at_a_tie(oracle: Oracle, prompt: list[int], a: list[int], b: list[int]) -> bool:
    """Whether the first difference of two streams rests on a near-tie of the float64 oracle's."""
    at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    _, outs = oracle.run(np.array(prompt + a[:at]))
    best = np.sort(outs[-1].logits)
    return best[-1] - best[-2] < TOLERANCE or min(out.margin for out in outs) < NARROW


@pytest.mark.transformers
def test_a_change_of_any_tensor_shows(ask, tmp_path):
    """Or the comparison above would not have compared it."""
    raw, tensors = random_checkpoint({"compress_ratios": [0, 4, 8], "num_hash_layers": 1}, 3)
    save_released(tmp_path, raw, tensors)
    params, cfg = load_checkpoint(tmp_path)
    tokens = np.random.default_rng(3).integers(2, cfg.vocab_size, (1, 64), dtype=np.int32)
    ours = np.asarray(score(params, cfg, tokens))
    file = tmp_path / "model.safetensors"
    written = load_file(file)

    def gap_with(name: str | None) -> float:
        changed = dict(written)
        if name is not None:
            changed[name] = np.roll(written[name], 1, axis=-1) + written[name]
            if name.endswith("tid2eid"):
                changed[name] = (written[name] + 1) % cfg.n_routed_experts
        save_file(changed, file)
        theirs = np.asarray(ask(tmp_path, tokens, [], 0)["logits"])
        return float(np.abs(theirs - ours).max())

    assert gap_with(None) < TOLERANCE
    kinds = {re.sub(r"(layers|experts)\.\d+", r"\1", name): name for name in written}
    kinds |= {f"{name} in each layer": name for name in written if "experts" not in name}
    unseen = [name for name in {*kinds.values()} if gap_with(name) < 10 * TOLERANCE]
    assert unseen == []


def test_the_draws_are_valid_and_cover_what_they_promise():
    """So that a change of the ranges above does not leave a kind out."""
    drawn = [draw_settings(seed) for seed in SEEDS]
    ratios = [tuple(each["compress_ratios"][:-1]) for each in drawn]
    assert {r for each in ratios for r in each} == {0, 4, 8, 16, 32, 128}
    assert {len(each) for each in ratios} >= {1, 2, 3, 4}
    for key in drawn[0].keys() - {"compress_ratios", "num_nextn_predict_layers", "rope_scaling"}:
        assert len({each[key] for each in drawn}) > 1, key
    hashed = [each["num_hash_layers"] for each in drawn]
    assert 0 in hashed
    assert any(0 < count < len(each) for count, each in zip(hashed, ratios, strict=True))
    assert drawn[0].keys() <= TINY.keys()
