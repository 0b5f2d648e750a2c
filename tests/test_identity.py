"""`scripts.identity`: what it decodes, its verdict and its refusals, with completions made up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxspec.results import Completion, MethodRun
from scripts import identity

MARGIN_PLACE = 1


class Decoder:
    """Gives each request its own tokens; runs of a method in `wrong` change the token at place 1."""

    def __init__(self) -> None:
        self.wrong: set[tuple[str, int]] = set()
        self.margin = 1.0
        self.asked: list = []

    def __call__(self, model, run, requests) -> MethodRun:
        self.asked.append((run, requests))
        done = []
        for request in requests:
            limit = request.max_new_tokens or run.max_new_tokens
            ids = [sum(map(ord, str(request.id))) + place for place in range(limit)]
            if (run.method, run.batch_size) in self.wrong and len(ids) > MARGIN_PLACE:
                ids[MARGIN_PLACE] += 1
            margins = (self.margin,) * len(ids) if run.compare else None
            done.append(Completion(request.id, tuple(ids), "", "length", margins))
        return MethodRun(run.method, None, tuple(done))


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    made = Decoder()
    monkeypatch.setattr(identity, "decode", made)
    monkeypatch.setattr(identity, "load_model", lambda *asked: (None, 64))
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "a"
    folder.mkdir(parents=True)
    lines = [json.dumps({"id": i, "prompt": f"say {i}"}) for i in range(5)]
    (folder / "dev.jsonl").write_text("\n".join(lines))
    return tmp_path / "data"


def run(data: Path, *argv: str) -> int:
    grid = ["--budgets", "5", "8", "--temperatures", "0", "0.7", "--batch-sizes", "1", "3"]
    return identity.main(["--data", str(data), "--max-new-tokens", "9", *grid, *argv])


def test_the_whole_grid_is_compared_in_two_orders(decoder, data, capsys) -> None:
    assert run(data) == 0
    runs = [
        (each.temperature, each.batch_size, each.method, each.budget) for each, _ in decoder.asked
    ]
    methods = [("linear", 5), ("tree", 5), ("linear", 8), ("tree", 8)]
    for temperature in (0.0, 0.7):
        assert runs.count((temperature, 1, "none", 1)) == 1
        assert runs.count((temperature, 3, "none", 1)) == 2
        for method, budget in methods:
            assert runs.count((temperature, 1, method, budget)) == 1
            assert runs.count((temperature, 3, method, budget)) == 2
    assert len(runs) == 2 * (1 + 2 + 4 * 3)
    orders = {tuple(each.id for each in asked) for _, asked in decoder.asked}
    assert len(orders) > 1
    assert len({frozenset(order) for order in orders}) == 1
    limits = [each.max_new_tokens for each in decoder.asked[0][1]]
    assert limits[::2] == [None, None]
    assert all(1 <= limit <= 9 for limit in limits[1::2])
    assert "112 of 112 completions identical, 0 excused" in capsys.readouterr().out


@pytest.mark.parametrize(("margin", "status"), [(0.9e-4, 0), (1e-4, 1)])
@pytest.mark.parametrize("wrong", [("tree", 1), ("linear", 3), ("none", 3)])
def test_only_near_ties_excuse_a_difference(decoder, data, capsys, wrong, margin, status) -> None:
    decoder.wrong, decoder.margin = {wrong}, margin
    assert run(data) == status
    listed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("- ")]
    assert listed
    assert all("at token 1" in line for line in listed)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--budgets", "1"], "budgets must be at least 2"),
        (["--temperatures", "-1"], "temperature must be"),
        (["--batch-sizes", "0"], "batch_size must be"),
        (["--data", "nowhere"], "holds no SET/dev"),
        (["--model", "nowhere"], "unknown model"),
    ],
)
def test_bad_input_gets_one_line_and_status_2(decoder, data, capsys, argv, said) -> None:
    assert run(data, *argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not decoder.asked
