"""The JSON file, the comparison, and the figures derived from counts."""

import dataclasses
import io
import json
import os
import random
import stat
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

from jaxspec import report
from jaxspec.errors import UsageError
from jaxspec.results import Completion, MethodRun, Statistics
from jaxspec.settings import Mesh, RunConfig


def method_run(method: str, answers: list[list[int]], margins=None) -> MethodRun:
    completions = tuple(
        Completion(f"q{place}", tuple(ids), "é", "stop", margins and tuple(margins))
        for place, ids in enumerate(answers)
    )
    tokens = sum(map(len, answers))
    return MethodRun(method, Statistics(len(answers), tokens, 4, (2, 1), 2.0, 0.1), completions)


def test_figures_are_those_of_a_replayed_run() -> None:
    """Counts are added up step by step here, and once more from the list of accepted lengths."""
    coin = random.Random(0)
    accepted = [[coin.randrange(8) for _ in range(coin.randrange(1, 9))] for _ in range(20)]
    steps = [drafts for row in accepted for drafts in row]
    tokens = sum(1 + sum(drafts + 1 for drafts in row) for row in accepted)
    reached = tuple(sum(drafts > depth for drafts in steps) for depth in range(7))
    counts = Statistics(20, tokens, len(steps), reached, seconds=2.5)
    assert counts.accepted_length == pytest.approx(1 + sum(steps) / len(steps))
    assert counts.tokens_per_s == pytest.approx(tokens / 2.5)
    for depth, share in enumerate(counts.per_depth):
        tried = [drafts for drafts in steps if drafts >= depth]
        assert share == pytest.approx(sum(drafts > depth for drafts in tried) / len(tried))


def test_figures_without_steps_or_time_are_none() -> None:
    counts = Statistics(rows=1, tokens=1, steps=0, reached=(0, 0), seconds=0.0)
    assert counts.accepted_length is None
    assert counts.tokens_per_s is None
    assert counts.per_depth == ()
    never = Statistics(rows=1, tokens=3, steps=2, reached=(0, 0), seconds=1.0)
    assert never.per_depth == (0.0,)


@pytest.mark.parametrize(
    ("got", "position", "margin", "excused"),
    [
        ([5, 6, 7], None, None, None),
        ([5, 9, 7], 1, 0.5, False),
        ([5, 6, 9], 2, 0.99e-4, True),
        ([9, 6, 9], 0, 1e-4, False),
        ([5, 6], 2, None, False),
        ([5, 6, 7, 8], 3, None, False),
    ],
)
def test_the_first_difference_counts_and_a_near_tie_excuses_it(
    got, position, margin, excused
) -> None:
    plain = method_run("none", [[1], [5, 6, 7]], margins=[1e-4, 0.5, 0.99e-4])
    found = report.find_divergences(plain, method_run("tree", [[1], got]))
    if position is None:
        assert found == []
        return
    assert [(each.id, each.position, each.margin) for each in found] == [("q1", position, margin)]
    assert found[0].excused is excused
    assert ("NOT excused" in report.describe(found[0])) is not excused


def test_a_difference_without_recorded_margins_is_not_excused() -> None:
    plain = method_run("none", [[5, 6]])
    assert not report.find_divergences(plain, method_run("tree", [[5, 7]]))[0].excused


def test_a_missing_completion_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        report.find_divergences(method_run("none", [[1], [2]]), method_run("tree", [[1]]))


def test_json_has_the_documented_shape() -> None:
    run = RunConfig(method="none", stop=("a",), mesh=Mesh())
    plain = method_run("none", [[1, 2, 3]])
    value = json.loads(json.dumps(report.to_json("nano", run, [plain], None), allow_nan=False))
    assert value["config"]["model"] == "nano"
    names = {field.name for field in dataclasses.fields(RunConfig)}
    assert value["config"].keys() == names | {"model"}
    assert value["runs"] == [
        {
            "method": "none",
            "tokens_per_s": 1.5,
            "accepted_length": 0.5,
            "steps": 4,
            "tokens": 3,
            "per_depth": [0.5, 0.5],
            "completions": [
                {"id": "q0", "token_ids": [1, 2, 3], "text": "é", "finish_reason": "stop"}
            ],
        }
    ]
    assert value["identical"] is None
    assert value["divergences"] == []
    assert report.to_json("nano", run, [plain], [])["identical"] is True
    found = report.find_divergences(plain, method_run("tree", [[1, 2, 4]]))
    assert report.to_json("nano", run, [plain], found)["identical"] is False


def test_the_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch) -> None:
    path = tmp_path / "out.json"
    report.write_json(path, {"text": "漢字"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"text": "漢字"}
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        report.write_json(path, {"text": "other"})
    with pytest.raises(ValueError, match="JSON"):
        report.write_json(path, {"figure": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"text": "漢字"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path) -> None:
    target, link = tmp_path / "a" / "real.json", tmp_path / "link.json"
    target.parent.mkdir()
    link.symlink_to(target)
    report.check_writable(link)
    report.write_json(link, {})
    assert link.is_symlink()
    assert target.read_text() == "{}\n"


@pytest.mark.parametrize("name", [".", "missing/out.json", "file/out.json", "/dev/null"])
def test_a_place_that_cannot_be_written_is_found_before(tmp_path, name) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"cannot write .*; name a file that can be written"):
        report.check_writable(tmp_path / name)
    assert Path("/dev/null").is_char_device()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_missing_permission_is_found_before(tmp_path, monkeypatch) -> None:
    """The system's answers are made up, since root may write anywhere."""

    def refuse(dir: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    with pytest.raises(UsageError, match=r"its directory cannot be written \(Permission denied"):
        report.check_writable(tmp_path / "out.json")
    (tmp_path / "out.json").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(UsageError, match="it exists and may not be written"):
        report.check_writable(tmp_path / "out.json")


def test_checking_leaves_nothing_behind_and_an_old_file_alone(tmp_path) -> None:
    path = tmp_path / "out.json"
    report.check_writable(path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("old")
    report.check_writable(path)
    assert path.read_text() == "old"


def test_the_table_shows_each_method_and_its_verdict() -> None:
    plain = method_run("none", [[5, 6, 7], [1]], margins=[1.0, 1.0, 1e-5])
    near, far = [[5, 6, 8], [1]], [[5, 6, 8], [2]]
    for answers, verdict in ((plain, "yes"), (near, "near-tie"), (far, "no")):
        tree = plain if answers is plain else method_run("tree", answers)
        runs = [plain, dataclasses.replace(tree, method="tree")]
        found = report.find_divergences(plain, runs[1])
        file = io.StringIO()
        Console(file=file, width=80).print(report.comparison_table(RunConfig(), runs, found))
        rows = {
            line.split()[0]: line.split() for line in file.getvalue().splitlines() if line.split()
        }
        assert rows["none"] == ["none", "2.0", "1.00", "0.50", "0.10", "–", "–"]
        assert rows["tree"] == ["tree", "2.0", "1.00", "0.50", "0.10", "–", "–", verdict]
