"""`scripts.teacher_forced`: its gaps against a table, and the embedded model in bfloat16."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.answer import Answer
from jaxspec.settings import RunConfig
from scripts import teacher_forced
from tests.doubles import VOCAB, Toy, noise_of


def answer_of(index: int, prompt: list[int], tokens: list[int], seed: int) -> Answer:
    """A completion as the engine leaves it behind."""
    return Answer(
        index=index,
        id=f"answer {index}",
        prompt=tuple(prompt),
        limit=len(tokens),
        seed=seed,
        eos=1,
        tokenizer=None,
        scan=None,
        tokens=tokens,
    )


def gap_by_table(toy: Toy, answer: Answer, temperature: float) -> list[float]:
    """The toy's logits follow from the last token alone."""
    last, gaps = answer.prompt[-1], []
    for place, token in enumerate(answer.tokens):
        scores = toy.logits[last].astype(np.float64)
        if temperature:
            scores = scores / temperature + noise_of(answer.seed, len(answer.prompt) + place)
        gaps.append(float(scores.max() - scores[token]))
        last = token
    return gaps


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_gaps_are_those_of_the_model_token_by_token(toy, temperature: float) -> None:
    rng = np.random.default_rng(0)
    answers = [
        answer_of(i, *(rng.integers(VOCAB, size=n).tolist() for n in sizes), seed=7 + i)
        for i, sizes in enumerate([(1, 5), (9, 1), (4, 12), (63, 2), (3, 3)])
    ]
    run = RunConfig(batch_size=2, temperature=temperature)
    forced = teacher_forced.force(toy.params, toy.cfg, run, answers)
    assert [each.id for each in forced] == [each.id for each in answers]
    for each, answer in zip(forced, answers, strict=True):
        want = gap_by_table(toy, answer, temperature)
        assert each.gap.shape == (len(answer.tokens),)
        np.testing.assert_allclose(each.gap, want, rtol=0, atol=2e-5)
    figures = teacher_forced.summarise("tree", forced)
    wants = np.concatenate([gap_by_table(toy, answer, temperature) for answer in answers])
    assert (figures.tokens, figures.diverging) == (len(wants), int((wants > 1e-9).sum()))
    assert figures.worst == pytest.approx(wants.max(), abs=2e-5)
    assert figures.mean == pytest.approx(wants[wants > 1e-9].mean(), abs=2e-5)


def test_floors_are_for_rate_and_gap_and_nan_is_above_both() -> None:
    def figures(rate: float, worst: float) -> teacher_forced.Figures:
        return teacher_forced.Figures("tree", 100, 1, rate, worst, worst)

    assert teacher_forced.check_floors([figures(0.01, 0.1)], 0.01, 0.1) == []
    for bad in (figures(0.02, 0.1), figures(0.01, 0.2), figures(0.01, float("nan"))):
        (line,) = teacher_forced.check_floors([figures(0, 0), bad], 0.01, 0.1)
        assert line.startswith("tree: ")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--count", "0"], "count must be at least 1"),
        (["--max-gap", "-1"], "must be numbers >= 0"),
        (["--max-rate", "nan"], "must be numbers >= 0"),
        (["--methods", "beam"], "invalid choice"),
        (["--model", "nowhere"], "unknown model 'nowhere'"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["--out", "nowhere/x.json"], "cannot write"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, argv: list[str], said: str) -> None:
    assert teacher_forced.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert said in printed.err


def spoil(answers: list[Answer], place: int, vocab: int) -> list[Answer]:
    """The same streams with one token each that a drafter might have pushed through."""
    spoilt = copy.deepcopy(answers)
    for index, answer in enumerate(spoilt):
        answer.tokens[place] = (answer.tokens[place] + 1 + index) % vocab
    return spoilt


@pytest.mark.xdist_group("embedded model")
@pytest.mark.usefixtures("full_compile")
def test_trees_in_bfloat16_stay_within_the_floors_and_faults_do_not(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    seen = []
    force = teacher_forced.force

    def record(*args):
        seen.append(args)
        return force(*args)

    monkeypatch.setattr(teacher_forced, "force", record)
    path = tmp_path / "out.json"
    sizes = ["--count", "3", "--max-new-tokens", "20", "--batch-size", "3"]
    assert teacher_forced.main([*sizes, "--methods", "tree", "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    value = json.loads(path.read_text())
    (found,) = value["results"]
    assert found["tokens"] > 40
    assert f"| tree | {found['tokens']} | {found['diverging']} |" in printed
    assert len(value["diverging"]["tree"]) == found["diverging"]
    ((params, cfg, run, answers),) = seen
    assert params.embed.dtype == jnp.bfloat16
    assert any(sum(answer.drafted) for answer in answers)

    def above(params, answers: list[Answer]) -> list[str]:
        forced = force(params, cfg, run, answers)
        figures = teacher_forced.summarise("tree", forced)
        return teacher_forced.check_floors(
            [figures], teacher_forced.MAX_RATE, teacher_forced.MAX_GAP
        )

    assert above(params, answers) == []
    assert above(params, spoil(answers, 10, cfg.vocab_size))
    # A target whose committed entries are not those that the stream was decoded with.
    assert above(spoil_entries(params), answers)


def spoil_entries(params):
    """Halves what the compressors of the main attention fold."""
    layers = [
        layer
        if layer.attn.compressor is None
        else layer.replace(
            attn=layer.attn.replace(
                compressor=jax.tree.map(lambda leaf: leaf * 0.5, layer.attn.compressor)
            )
        )
        for layer in params.layers
    ]
    return params.replace(layers=tuple(layers))


@pytest.mark.slow
@pytest.mark.xdist_group("embedded model")
@pytest.mark.usefixtures("full_compile")
def test_long_answers_in_bfloat16_do_not_drift() -> None:
    """Of 600 tokens the last third diverges no more than the floors allow, as the first does."""
    from jaxspec import Engine, Request, load_checkpoint
    from jaxspec.demo import PROMPTS
    from jaxspec.resources import model_dir
    from jaxspec.text import Tokenizer

    params, cfg = load_checkpoint("nano", dtype="bfloat16")
    tokenizer = Tokenizer.load(model_dir("nano"))
    # An end token that the model never learnt, so that no answer ends.
    cfg = dataclasses.replace(cfg, eos_token_id=tokenizer.special.pad)
    run = RunConfig(budget=8, batch_size=2, max_new_tokens=600, dtype="bfloat16")
    engine = Engine(params, cfg, run, tokenizer=tokenizer)
    engine.generate([Request(i, prompt) for i, prompt in enumerate(PROMPTS[::3])])
    forced = teacher_forced.force(params, cfg, run, engine.answers)
    thirds = [
        teacher_forced.summarise(
            f"third {third}",
            [each._replace(gap=each.gap[third * 200 : (third + 1) * 200]) for each in forced],
        )
        for third in range(3)
    ]
    print(teacher_forced.table(thirds))
    assert [each.tokens for each in thirds] == [400, 400, 400]
    floors = teacher_forced.MAX_RATE, teacher_forced.MAX_GAP
    assert teacher_forced.check_floors(thirds, *floors) == []
