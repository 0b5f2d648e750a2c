"""`scripts.compare_speed` with engines whose times are made up: turns, ratios, refusals."""

import json
import sys
from pathlib import Path

import pytest

from scripts import compare_speed

WORKER = """
import json, sys
name, log = sys.argv[2], open({log!r}, "a")
def say(value): print(json.dumps(value), flush=True)
say({{"versions": {{name: "1.0", "argv": " ".join(sys.argv[4:])}}}})
for number, line in enumerate(sys.stdin):
    asked = json.loads(line)
    rows, steps = asked["prompts"], asked["steps"]
    print(name, "begins", len(rows), len(rows[0]), steps, file=log, flush=True)
    if {fail!r} == name and number == 5:
        say({{"error": "ValueError: too hot"}})
        break
    if {die!r} == name and number == 5:
        sys.exit(3)
    pace = 3.0 if name == "transformers" else 2.0 if number < 6 else 1.0
    tokens = [[row[0] % 5 + 2 * (name == "jaxspec" and len(rows) == 3)] for row in rows]
    print(name, "ends", file=log, flush=True)
    say({{"prefill_s": pace, "decode_s": 10 * pace, "tokens": tokens}})
"""


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A command line whose Pythons are fakes that log each turn; `fail` and `die` name one."""
    monkeypatch.setattr(compare_speed, "PAUSE", 0)
    log, out = tmp_path / "log", tmp_path / "out.json"

    def make(fail: str = "", die: str = "") -> list[str]:
        script, python = tmp_path / "fake.py", tmp_path / "python"
        script.write_text(WORKER.format(log=str(log), fail=fail, die=die))
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
        python.chmod(0o755)
        pythons = ["--transformers-python", str(python), "--python", str(python)]
        sizes = ["--batches", "1", "3", "--context", "4", "--prefill", "7", "--steps", "5"]
        return ["nano", *pythons, *sizes, "--rounds", "3", "--out", str(out)]

    return make, log, out


def test_engines_take_turns_and_rounds_are_paired(setup, capsys) -> None:
    make, log, path = setup
    assert compare_speed.main(make()) == 0
    lines = [line.split() for line in log.read_text().splitlines()]
    assert all(
        a[0] == b[0] and b[1] == "ends" for a, b in zip(lines[::2], lines[1::2], strict=True)
    )
    order = [line[0] for line in lines[::2]]
    assert order[:8] == ["transformers"] * 4 + ["jaxspec"] * 4
    turns = [tuple(order[i : i + 2]) for i in range(8, len(order), 2)]
    pair = ("jaxspec", "transformers")
    assert turns == [pair] * 4 + [pair[::-1]] * 4 + [pair] * 4
    shapes = [tuple(map(int, line[2:])) for line in lines[:8:2]]
    assert shapes == [(1, 4, 5), (3, 4, 5), (1, 7, 0), (3, 7, 0)]
    out = json.loads(path.read_text())
    first, *_, last = out["results"]
    # Their decoding takes 10 * 3 s for 5 steps; ours is at 2 until its sixth answer, then at 1.
    assert first["transformers"] == 6000
    assert [each["jaxspec"] for each in first["rounds"]] == [4000, 2000, 2000]
    assert (first["ratio"], first["ratio_range"]) == (3.0, [1.5, 3.0])
    assert (last["transformers"], last["jaxspec"]) == (3000, 1000)
    assert out["same_tokens"] == [2, 8]
    printed = capsys.readouterr().out
    assert "2 of 8 sequences have the same tokens" in printed
    assert (
        "| decode, batch 1, after 4: ms/step | 6000.00 | 2000.00 | 3.00 | 1.50 to 3.00 |" in printed
    )


@pytest.mark.parametrize("name", ["transformers", "jaxspec"])
@pytest.mark.parametrize(
    ("fault", "said"),
    [("fail", "process: ValueError: too hot"), ("die", "process ended with status 3")],
)
def test_a_worker_that_fails_is_told_in_one_line(setup, capfd, name, fault, said) -> None:
    make, _, path = setup
    assert compare_speed.main(make(**{fault: name})) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == f"scripts.compare_speed: the {name} {said}"
    assert not path.exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--batches", "1", "0"], "batches must be at least 1"),
        (["--transformers-python", "nowhere/python"], "nowhere/python cannot be run"),
        (["--out", "nowhere/x.json"], "cannot write"),
    ],
)
def test_bad_input_ends_with_2(setup, capsys, argv, said) -> None:
    assert compare_speed.main([*setup[0](), *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert said in printed.err
