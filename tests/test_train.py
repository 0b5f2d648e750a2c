"""Training: the data's order, the parts of the loss, and going on after a kill."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import load_checkpoint
from jaxspec.errors import UsageError
from jaxspec.model import backends
from jaxspec.resources import packaged_config
from jaxspec.train.__main__ import main
from jaxspec.train.data import Batches, pack
from jaxspec.train.loop import Run
from jaxspec.train.loss import Blank, measure
from jaxspec.train.optimizer import balance, join, split_trainable
from jaxspec.train.recipe import Recipe, read_recipe
from pallas_kernels import grouped_matmul, hyper_mixing, index_topk, tree_attention
from pallas_kernels.dispatch import resolve
from tests.oracle import Mtp, Oracle, random_checkpoint, save_checkpoint

SMALL = {
    "compress_ratios": [4, 8, 0],
    "num_hidden_layers": 2,
    "num_nextn_predict_layers": 1,
    "num_hash_layers": 1,
    "sliding_window": 8,
    "index_topk": 2,
    "qk_rope_head_dim": 4,
}
LENGTH, DEPTHS = 24, 3


def recipe(**changes: object) -> Recipe:
    base = read_recipe(packaged_config("train/nano.toml"))
    small = {"sequence": LENGTH, "batch": 2, "micro": 1, "draft_depths": DEPTHS, "draft_anchors": 1}
    return dataclasses.replace(base, **(small | {"soft_labels": 0.0} | changes))


quick_measure = jax.jit(measure, static_argnames=("cfg", "recipe"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory):
    """A random two-layer model with an MTP block: (oracle, params, cfg)."""
    folder = tmp_path_factory.mktemp("small")
    config, tensors = random_checkpoint(SMALL, seed=5)
    save_checkpoint(folder, config, tensors)
    params, cfg = load_checkpoint(folder, dtype="float32")
    return Oracle(config, tensors), params, cfg


@pytest.mark.parametrize("sequence", [1, 7, 64])
def test_packing_keeps_every_token_in_order(sequence: int) -> None:
    rng = np.random.default_rng(sequence)
    documents = [rng.integers(0, 99, rng.integers(1, 30)).astype(np.int32) for _ in range(50)]
    rows = pack(documents, sequence)
    assert rows.shape[1] == sequence
    starts = [document[: min(len(document), sequence)] for document in documents]
    for row in rows:  # each row begins with some document's beginning
        assert any(np.array_equal(row[: len(start)], start) for start in starts)
    assert len(rows) >= (sum(map(len, starts)) - sum(map(len, documents)) // 2) // sequence


def test_a_batch_is_the_same_whenever_it_is_asked_for() -> None:
    rng = np.random.default_rng(0)
    sets = {"a": [rng.integers(0, 99, 20).astype(np.int32) for _ in range(40)]}

    def batches() -> Batches:
        return Batches(sets, {"a": 2}, sequence=16, batch=4, seed=3)

    forwards = [batches()[step] for step in range(60)]
    other = batches()
    for step in reversed(range(60)):
        np.testing.assert_array_equal(other[step], forwards[step])
    assert not np.array_equal(forwards[0], forwards[-1])


def test_drafts_in_training_are_the_drafts_of_decoding(small) -> None:
    """Each depth's loss is that of the oracle's serial MTP chain from the same anchor."""
    oracle, params, cfg = small
    chosen = recipe()
    rng = np.random.default_rng(1)
    for seed in range(3):
        token = rng.integers(0, cfg.vocab_size, LENGTH)
        key = jax.random.key(seed)
        batch = Blank.create(cfg, 1), jnp.asarray(token[None])
        loss = quick_measure(params, cfg, *batch, key=key, recipe=chosen)
        drawn = jax.random.permutation(jax.random.split(key, 1)[0], LENGTH - DEPTHS - 1)
        np.testing.assert_allclose(
            loss.draft, serial_draft(oracle, token, int(drawn[0])), atol=2e-5
        )


def serial_draft(oracle: Oracle, token: np.ndarray, anchor: int) -> list[float]:
    """-log p of the token at anchor + depth + 1, for each depth of a chain that is fed the data."""
    mtp = Mtp(oracle)
    _, steps = oracle.run(token[: anchor + 1])
    state = mtp.start()
    for position, step in enumerate(steps):
        state, out = mtp.step(state, step.streams[-1], token[position + 1])
    losses = []
    for depth in range(1, DEPTHS + 1):
        if depth > 1:
            state, out = mtp.step(state, out.streams, token[anchor + depth])
        shifted = out.logits - out.logits.max()
        losses.append(np.log(np.exp(shifted).sum()) - shifted[token[anchor + depth + 1]])
    return losses


@pytest.mark.parametrize(("platform", "impl"), [("cpu", "auto"), ("gpu", "ref")])
def test_training_takes_what_has_gradients(small, monkeypatch, platform: str, impl: str) -> None:
    """In every op, drafts of all depths included."""
    _, params, cfg = small
    monkeypatch.setattr(backends, "target_platform", lambda: platform)
    asked = set()

    def spy(impl: str, op_name: str, *args: Any, **keywords: Any) -> Callable[..., Any]:
        asked.add((op_name, impl))
        return resolve(impl, op_name, *args, **keywords)

    for op in (tree_attention, index_topk, grouped_matmul, hyper_mixing):
        monkeypatch.setattr(op.op, "resolve", spy)
    jax.eval_shape(
        functools.partial(measure, params, cfg, recipe=recipe()),
        Blank.create(cfg, 1),
        jnp.zeros((1, LENGTH), jnp.int32),
        key=jax.random.key(0),
    )
    names = ("tree_attention", "index_topk", "grouped_matmul", "hyper_mixing")
    assert asked == {(name, impl) for name in names}


def test_the_indexer_learns_from_its_own_loss_alone(small) -> None:
    _, params, cfg = small
    floats, rest = split_trainable(params)
    token = jax.random.randint(jax.random.key(0), (1, LENGTH), 0, cfg.vocab_size)

    def parts(floats):
        loss = measure(
            join(floats, rest),
            cfg,
            Blank.create(cfg, 1),
            token,
            key=jax.random.key(1),
            recipe=recipe(draft_anchors=4),
        )
        return jnp.stack([loss.lm, loss.draft.sum(), loss.indexer])

    def gradient(floats, direction):
        return jax.vjp(parts, floats)[1](direction)[0]

    quick = jax.jit(gradient)
    lm, draft, indexer = (quick(floats, row) for row in jnp.eye(3))

    def size(tree: object) -> float:
        return sum(float(jnp.abs(leaf).sum()) for leaf in jax.tree.leaves(tree))

    of_indexer = size(indexer.layers[0].attn.indexer)
    assert of_indexer > 0
    assert size(indexer) == pytest.approx(of_indexer)
    assert size(lm.layers[0].attn.indexer) == size(draft.layers[0].attn.indexer) == 0
    assert size(lm.mtp) == 0
    assert size(draft.mtp) > 0
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((lm, draft, indexer)))


def test_balance_raises_the_idle_experts(small) -> None:
    _, params, cfg = small
    load = tuple(jnp.arange(cfg.n_routed_experts, dtype=jnp.float32) for _ in range(3))
    moved = balance(params, load, 0.5)
    change = moved.layers[1].moe.bias - params.layers[1].moe.bias
    np.testing.assert_allclose(change, 0.5 * np.sign(np.mean(load[1]) - np.asarray(load[1])))
    assert moved.layers[0].moe.bias is None
    assert not np.array_equal(moved.mtp[0].layer.moe.bias, params.mtp[0].layer.moe.bias)


def write_data(folder: Path) -> Path:
    words = ["one two three", "four five", "six seven eight nine", "ten"]
    for split, count in (("train", 40), ("dev", 4)):
        lines = [{"prompt": words[i % 4], "response": words[(i + 1) % 4]} for i in range(count)]
        (folder / "set").mkdir(exist_ok=True, parents=True)
        (folder / "set" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


@pytest.mark.slow
def test_a_resumed_run_is_the_run(small, tmp_path: Path) -> None:
    _, _, cfg = small
    cfg = dataclasses.replace(cfg, vocab_size=4096)
    data = write_data(tmp_path / "data")
    from rich.console import Console

    def train(out: str, steps: int) -> None:
        chosen = recipe(steps=steps, evaluate_every=2, repeat=(("set", 1),), decay=0.0, warmup=2)
        (tmp_path / out).mkdir(exist_ok=True)
        Run(cfg, chosen, data, tmp_path / out).train(None, Console(quiet=True))

    train("whole", 4)
    train("parts", 2)
    train("parts", 4)
    whole, parts = (load_checkpoint(tmp_path / out / "model")[0] for out in ("whole", "parts"))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_array_equal(a, b)
    log = [json.loads(line) for line in (tmp_path / "parts/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if "lm" in line] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "nowhere"], "holds no SET/train"),
        (["--data", "nowhere", "--steps", "0"], "steps is 0; it must be at least 1"),
        (["--data", "nowhere", "--config", "absent.toml"], "absent.toml cannot be read as TOML"),
        (["--data", "nowhere", "--weights", "absent"], "absent"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str, tmp_path: Path, capsys) -> None:
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_a_recipe_refuses_unknown_keys(tmp_path: Path) -> None:
    text = packaged_config("train/nano.toml").read_text()
    path = tmp_path / "recipe.toml"
    path.write_text(text + "\nsurprise = 1\n")
    with pytest.raises(UsageError, match="unknown keys"):
        read_recipe(path)
