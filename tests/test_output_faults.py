"""`python -m jaxspec.run` and its files against full disks, signals, and a second process."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxspec import run
from jaxspec.checkpoint import load_checkpoint, save_checkpoint
from jaxspec.files import replacing
from jaxspec.report import check_writable, write_json
from tests import fake_engine
from tests.oracle import random_checkpoint
from tests.oracle import save_checkpoint as save_released
from tests.test_run import ENVIRONMENT, start

FAKE = (
    "import sys; from tests import fake_engine; from jaxspec.run import main; "
    "sys.modules.update(fake_engine.install(fake_engine.Script())); sys.exit(main(sys.argv[1:]))"
)
"""The command line with the fake engine, in a process of its own."""
FULL = Path("/dev/full")
"""A device on which no byte has room."""


# Full disks.


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_standard_output_on_a_full_disk_is_one_line_and_status_1() -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", FAKE, "--prompt", "a", "b"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "jaxspec.run: the output was not written: No space left on device\n"


def limited(argv: list[str], most: int) -> subprocess.CompletedProcess[str]:
    """The command with files of at most so many bytes, as on a disk with so much room."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({most}, {most})); "
    return subprocess.run(
        [sys.executable, "-c", limit + FAKE, *argv],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )


def test_results_that_do_not_fit_leave_the_earlier_ones(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    argv = ["--prompt", "a" * 500, "b", "--json", str(path)]
    path.write_text("of an earlier run")
    done = limited(argv, 300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"jaxspec.run: {path} was not written: File too large"
    assert "Traceback" not in done.stderr
    assert path.read_text() == "of an earlier run"
    assert list(tmp_path.iterdir()) == [path]
    assert limited(argv, 1 << 20).returncode == 0
    assert len(json.loads(path.read_text())["runs"][0]["completions"]) == 2


def test_a_model_that_does_not_fit_leaves_the_earlier_one(tmp_path: Path) -> None:
    raw, tensors = random_checkpoint({"compress_ratios": [0]})
    save_released(tmp_path, raw, tensors)
    params, cfg = load_checkpoint(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"model.safetensors was not written: .*too large"):
            save_checkpoint(tmp_path, params, cfg)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


# Damaged checkpoints, through the command line.


@pytest.mark.parametrize("keep", [0.3, 0.99])
def test_a_truncated_shard_is_one_line_and_status_2(tmp_path: Path, capsys, keep: float) -> None:
    raw, tensors = random_checkpoint({"compress_ratios": [0]})
    save_released(tmp_path, raw, tensors)
    shard = tmp_path / "model.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: int(keep * len(content))])
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": [3, 4]}\n')
    argv = ["--model", str(tmp_path), "--prompts", str(prompts), "--json", str(out)]
    assert run.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"jaxspec.run: {shard} is truncated or not a safetensors file")
    assert printed.err.count("\n") == 1
    assert not out.exists()


# Signals.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_writes_what_had_finished(tmp_path: Path, number) -> None:
    path = tmp_path / "out.json"
    process = start("-m", "tests.fake_engine", "--prompt", "a", "b", "--json", str(path))
    try:
        while "waiting" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + number
    assert err.splitlines()[-1] == "interrupted"
    completions = json.loads(path.read_text(encoding="utf-8"))["runs"][0]["completions"]
    assert [each["id"] for each in completions] == [1]


def test_the_handlers_are_those_of_before_afterwards(monkeypatch) -> None:
    """`main` may be called from a program that has its own."""
    for name, module in fake_engine.install(fake_engine.Script()).items():
        monkeypatch.setitem(sys.modules, name, module)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        mine = signal.getsignal(signal.SIGTERM)
        assert run.main(["--prompt", "a"]) == 0
        assert run.main(["--budget", "0"]) == 2
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_real_engine_stops_and_writes_what_had_finished(tmp_path: Path, number) -> None:
    """Plain decoding of the embedded model; the completion is that of a run to the end."""
    prompts, path = tmp_path / "p.jsonl", tmp_path / "out.json"
    rows = [{"prompt": "Name a colour.", "max_new_tokens": 8}] + [{"prompt": "Count up."}] * 20
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (  # what a job in the background starts ignores interrupts from the beginning
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from jaxspec.run import main; sys.exit(main(sys.argv[1:]))"
    )
    flags = ["--method", "none", "--max-new-tokens", "4000", "--json", str(path)]
    process = start("-c", code, "--prompts", str(prompts), *flags)
    try:
        while "== 2 ==" not in (line := process.stdout.readline()):
            assert line or process.poll() is None, process.stderr.read()
        process.send_signal(number)
        _, err = process.communicate(timeout=100)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    value = json.loads(path.read_text(encoding="utf-8"))["runs"][0]
    assert [each["id"] for each in value["completions"]][:1] == [1]
    assert 1 <= len(value["completions"]) < len(rows)
    assert len(value["completions"][0]["token_ids"]) <= 8


# Two processes, one place.


def write_repeatedly(path: Path, mark: int, gate) -> None:
    gate.wait()
    for _ in range(40):
        write_json(path, {"mark": [mark] * 20_000})


def save_repeatedly(folder: Path, mark: int, gate) -> None:
    gate.wait()
    for _ in range(40):
        with replacing(folder / "weights") as draft:
            np.full(50_000, mark, np.int64).tofile(draft)


@pytest.mark.parametrize("write", [write_repeatedly, save_repeatedly])
def test_of_two_writers_one_whole_file_stays(tmp_path: Path, write) -> None:
    """And at every moment in between there is one."""
    fork = multiprocessing.get_context("spawn")
    gate = fork.Barrier(4)
    place = tmp_path / "out.json" if write is write_repeatedly else tmp_path
    file = tmp_path / ("out.json" if write is write_repeatedly else "weights")
    writers = [fork.Process(target=write, args=(place, mark, gate)) for mark in (1, 2, 3)]
    for writer in writers:
        writer.start()
    gate.wait(120)
    seen, looks = set(), 0
    while any(writer.is_alive() for writer in writers) or not looks:
        if file.exists():
            seen.add(frozenset(marks_of(file)))
            looks += 1
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    seen.add(frozenset(marks_of(file)))
    assert seen <= {frozenset({mark}) for mark in (1, 2, 3)}
    assert list(tmp_path.iterdir()) == [file]


def marks_of(file: Path) -> set[int]:
    """What one whole file holds; fails if it is not whole."""
    if file.suffix == ".json":
        marks = json.loads(file.read_text())["mark"]
        assert len(marks) == 20_000
        return {*marks}
    marks = np.fromfile(file, np.int64)
    assert marks.shape == (50_000,)
    return {*marks.tolist()}


def test_what_a_killed_writer_left_is_in_nobodys_way(tmp_path: Path) -> None:
    """Not even for a process of the same number, as the first one of a container has."""
    path = tmp_path / "out.json"
    left = tmp_path / f".out.json.{os.getpid()}"
    left.write_text("half")
    write_json(path, {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    code = (
        "import os, signal, sys; from pathlib import Path; from jaxspec.files import replacing\n"
        "with replacing(Path(sys.argv[1])) as draft:\n"
        "    draft.write_text('half'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], env=ENVIRONMENT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert json.loads(path.read_text()) == {"a": 1}
    write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}


@pytest.mark.parametrize("length", [1, 200, 240, 255])
def test_a_file_that_may_be_written_is_written_whatever_the_length_of_its_name(
    tmp_path: Path, length: int
) -> None:
    path = tmp_path / ("a" * length)
    check_writable(path)
    write_json(path, {"x": 1})
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
