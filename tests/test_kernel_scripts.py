"""The scripts for hardware, as far as a CPU goes: refusals, numbers, which choice is taken."""

import datetime
import inspect
from pathlib import Path

import pytest

from jaxspec.plan.program import Traffic
from pallas_kernels.tuning import Bucket, read_tuned
from scripts import check_kernels, kernel_trials, tune


@pytest.mark.parametrize("script", [check_kernels, tune])
def test_without_an_accelerator_they_refuse_in_words(script, tmp_path: Path, capsys) -> None:
    where = ["--out", str(tmp_path)] if script is check_kernels else []
    assert script.main(where) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs a TPU or a GPU and JAX runs on cpu here" in line
    assert list(tmp_path.iterdir()) == []


def test_numbers_are_held_to_the_definition() -> None:
    trials = [t for t in kernel_trials.small_trials(1) if not t.name.endswith(("float32", "fp8"))]
    assert {trial.op for trial in trials} == set(kernel_trials.OPS)
    found = check_kernels.check_numbers(trials, "cpu")
    assert {row["verdict"] for row in found} == {"equal"}
    wrong = [trial._replace(bind=_off_by_a_bit(trial)) for trial in trials]
    assert {row["verdict"] for row in check_kernels.check_numbers(wrong, "cpu")} == {"differs"}
    lacking = check_kernels.check_numbers([trials[0]._replace(op="index_topk")], "cuda")
    assert [row["verdict"] for row in lacking] == ["cannot"]


def _off_by_a_bit(trial: kernel_trials.Trial):
    """The same call with results that are wrong."""

    def bind(kernel):
        call = trial.bind(kernel)

        def run(*arrays):
            out = call(*arrays)
            first, *rest = out if isinstance(out, tuple) else (out,)
            changed = first ^ 1 if first.dtype == "uint32" else first * 1.1
            return (changed, *rest) if rest else changed

        return run

    return bind


def test_calls_are_timed_beside_their_floor(monkeypatch) -> None:
    """A definition that cannot run says why, in place of its time."""
    (trial,) = [t for t in kernel_trials.small_trials(1) if t.op == "grouped_matmul"]

    def compile(self, impl):
        if impl == "ref":
            raise MemoryError("too\nlarge")
        return lambda: None

    def count(op_name, impl, sizes, *arguments, **keywords):
        assert (op_name, impl, keywords) == ("grouped_matmul", "tpu", {"limit": 2.0})
        assert (sizes, arguments) == ({"rows": 1}, trial.arrays)
        return Traffic(read=3000, written=0, fewest=2000)

    monkeypatch.setattr(kernel_trials.Trial, "compile", compile)
    monkeypatch.setattr(kernel_trials.traffic, "count", count)
    monkeypatch.setattr(check_kernels, "seconds_a_call", lambda call: 5e-6)
    (row,) = check_kernels.time_calls([trial], "tpu", bandwidth=1e9)
    assert row["kernel_us"] == 5.0
    assert row["ref_us"] == "MemoryError: too large"
    assert row["floor_us"] == pytest.approx(2.0)


def test_results_are_named_by_device_and_day() -> None:
    day = datetime.date(2026, 1, 2)
    path = check_kernels.result_file(Path("out"), "NVIDIA H200", day)
    assert path == Path("out/kernels-nvidia-h200-2026-01-02.json")


def test_the_fastest_choice_is_taken_and_what_cannot_run_is_not(monkeypatch, capsys) -> None:
    (trial,) = [t for t in kernel_trials.small_trials(1) if t.op == "tree_attention"]
    seconds = {32: 3.0, 64: 2.0, 256: 2.5}

    def compile(self, impl, choices):
        if choices["tile"] == 128:
            raise RuntimeError("out of\nmemory")
        return choices

    monkeypatch.setattr(kernel_trials.Trial, "compile", compile)
    monkeypatch.setattr(tune, "seconds_a_call", lambda call: seconds[call["tile"]])
    candidates = [{"tile": tile} for tile in (32, 128, 64, 256)]
    assert tune.fastest(trial, "tpu", candidates) == {"tile": 64}
    assert "cannot run: RuntimeError: out of memory" in capsys.readouterr().out
    assert tune.fastest(trial, "tpu", candidates[1:2]) is None


def test_candidates_are_choices_that_the_kernels_take() -> None:
    for (op_name, impl), candidates in tune.CANDIDATES.items():
        parameters = inspect.signature(kernel_trials.OPS[op_name].op.BACKENDS[impl]).parameters
        taken = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        assert all(choices.keys() <= taken for choices in candidates)
        assert len(candidates) > 1


def test_what_ships_is_what_the_script_would_write() -> None:
    text = (Path(tune.__file__).parents[1] / "pallas_kernels" / "tuned.toml").read_text()
    assert tune.render(read_tuned(text)) == text


def test_a_device_replaces_its_own_buckets_alone() -> None:
    def bucket(device: str, tile: int) -> Bucket:
        return Bucket(device, {"nodes": 8}, {"tile": tile, "mode": "auto"}, 'a "test"')

    shipped = {"index_topk": [bucket("A", 1), bucket("B", 2)], "tree_attention": [bucket("A", 3)]}
    measured = {"index_topk": [bucket("A", 4)], "tree_attention": []}
    merged = tune.merge(shipped, measured, "A")
    assert merged["index_topk"] == [bucket("B", 2), bucket("A", 4)]
    assert merged["tree_attention"] == [bucket("A", 3)]
    read = read_tuned(tune.render(merged))
    assert [list(read[name]) for name in merged] == list(merged.values())
