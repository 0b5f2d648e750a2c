"""`scripts.acceptance`: its figures, its verdict and its refusals, with answers made up here."""

import json
import random
import sys
import types
from pathlib import Path
from typing import ClassVar

import pytest

from jaxspec.answer import Answer, News
from jaxspec.answer import tally as count
from scripts import acceptance


class FakeEngine:
    """Answers that are the prompt's own ids, in steps of random lengths; `changed` is one of them.

    Methods in `wrong` change the token at place 2 of the first prompt; plain decoding's `margin`
    there is what the test says.
    """

    wrong: tuple[str, ...] = ()
    margin = 1.0
    made: ClassVar[list] = []

    def __init__(self, params, cfg, run, tokenizer=None) -> None:
        self.run, self.answers = run, []
        type(self).made.append(self)

    @property
    def statistics(self):
        return count(self.answers, self.run.budget - 1, 1.0)

    def generate(self, requests, on_tokens):
        coin = random.Random(f"{self.run.method} {self.run.budget}")
        self.requests = requests
        for index, request in enumerate(requests):
            ids = list(request.prompt)[: self.run.max_new_tokens]
            if index == 0 and self.run.method in self.wrong:
                ids[2] += 1
            ranks = [0] + [
                coin.randrange(3) if self.run.method == "tree" else coin.randrange(2)
                for _ in ids[1:]
            ]
            if self.run.method == "none":
                ranks = [0] * len(ids)
            offered = [max(rank, 2) for rank in ranks]
            margins = [self.margin] * len(ids) if self.run.compare else None
            answer = Answer(index, request.id, request.prompt, 99, 0, -1, None, None)
            self.answers.append(answer)
            for emission in answer.take(News(ids, ranks, offered, margins, is_done=True)):
                on_tokens(emission)
        return [answer.completion for answer in self.answers]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch):
    """The fake in the place of the engine, afresh for each test."""
    fake = type("Fake", (FakeEngine,), {"made": []})
    module = types.ModuleType("jaxspec.engine")
    module.Engine, module.ROUND = fake, 64
    module.round_up = lambda number, step: -(-number // step) * step
    checkpoint = types.ModuleType("jaxspec.checkpoint")
    cfg = types.SimpleNamespace(max_position_embeddings=4096)
    checkpoint.load_checkpoint = lambda directory, dtype: ({}, cfg)
    monkeypatch.setitem(sys.modules, "jaxspec.engine", module)
    monkeypatch.setitem(sys.modules, "jaxspec.checkpoint", checkpoint)
    return fake


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two sets of text prompts, one with a second file, and what must not be read."""
    for name, file, rows in [("b", "dev.jsonl", 3), ("a", "dev.jsonl", 2), ("a", "dev2.jsonl", 5)]:
        folder = tmp_path / "data" / name
        folder.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"id": f"{file}{i}", "prompt": f"say {name} {i}"}) for i in range(rows)]
        (folder / file).write_text("\n".join(lines))
        (folder / "train.jsonl").write_text("not JSON")
    return tmp_path / "data"


def run(data: Path, *argv: str) -> int:
    return acceptance.main(["--data", str(data), "--budgets", "5", "8", *argv])


def test_every_set_has_its_own_figures(engine, data, tmp_path, capsys) -> None:
    path = tmp_path / "out.json"
    assert run(data, "--prompts-per-set", "4", "--out", str(path)) == 0
    out = json.loads(path.read_text())
    assert [(e.run.method, e.run.budget) for e in engine.made] == [
        ("none", 1), ("linear", 5), ("tree", 5), ("linear", 8), ("tree", 8),
    ]  # fmt: skip
    assert len({e.run.max_len for e in engine.made}) == 1
    ids = [request.id for request in engine.made[0].requests]
    assert ids[:3] == ["a/dev.jsonl0", "a/dev.jsonl1", "a/dev2.jsonl0"]
    assert len(ids) == 4 + 3
    rows = {(row["method"], row["budget"], row["set"]): row for row in out["results"]}
    assert len(rows) == len(out["results"]) == 4 * 3
    for made in engine.made[1:]:
        answers = dict(zip(ids, made.answers, strict=True))
        for name in ("all", "a", "b"):
            row = rows[made.run.method, made.run.budget, name]
            own = [a for key, a in answers.items() if name == "all" or key.startswith(f"{name}/")]
            steps = sum(rank == 0 for a in own for rank in a.ranks[1:])
            cut = sum(a.ranks[-1] > 0 for a in own)
            tokens = sum(len(a.tokens) - 1 for a in own)
            assert row["accepted_length"] == pytest.approx(tokens / (steps + cut))
            assert row["by_rank"][0]["accepted"] == sum(a.ranks.count(1) for a in own)
    printed = capsys.readouterr().out
    ratio = rows["tree", 8, "b"]["accepted_length"] / rows["linear", 8, "b"]["accepted_length"]
    (line,) = [line for line in printed.splitlines() if line.startswith("| b | 8 |")]
    assert line.endswith(f"| {ratio:.3f} |")
    assert "28 identical, 0 excused" in printed


@pytest.mark.parametrize(("margin", "status"), [(0.9e-4, 0), (1e-4, 1)])
def test_only_near_ties_excuse_a_difference(engine, data, capsys, margin, status) -> None:
    engine.wrong, engine.margin = ("tree",), margin
    assert run(data) == status
    printed = capsys.readouterr().out
    listed = [line for line in printed.splitlines() if line.startswith("- tree D=")]
    assert len(listed) == 2
    assert all("'a/dev.jsonl0' at token 2" in line for line in listed)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--budgets", "1"], "budgets must be at least 2"),
        (["--budgets", "65"], "budget must be"),
        (["--prompts-per-set", "0"], "prompts-per-set must be at least 1"),
        (["--data", "nowhere"], "holds no SET/dev"),
        (["--methods", "none"], "invalid choice"),
        (["--model", "nowhere"], "unknown model"),
        (["--out", "nowhere/x.json"], "cannot write"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(engine, data, capsys, argv, said) -> None:
    assert run(data, *argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not engine.made
