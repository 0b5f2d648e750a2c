"""How every command line ends: interrupts while it is imported, streams closed by the caller."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.command import Parser, conclude
from jaxspec.errors import UsageError
from jaxspec.signals import Terminated
from tests.test_output_faults import FAKE
from tests.test_run import ENVIRONMENT

COMMANDS = ["jaxspec.run", "jaxspec.plan", "jaxspec.train"]


def failing(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UsageError("bad\ninput"), 2, "command: bad input"),
        (FileNotFoundError(2, "No such file", "a.bin"), 1, "command: a.bin: No such file"),
        (MemoryError("9 GB"), 1, "command: out of memory; a smaller batch"),
        (RuntimeError("RESOURCE_EXHAUSTED: 9\nbytes"), 1, "command: out of memory; a smaller"),
        (KeyboardInterrupt(), 130, "command: stopped"),
        (Terminated(), 143, "command: stopped"),
    ],
)
def test_every_end_is_a_status_and_a_line(error, status: int, line: str, capsys) -> None:
    assert conclude("command", lambda: failing(error), "stopped") == status
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(line)


def test_faults_of_the_program_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="index out of range"):
        conclude("command", lambda: failing(RuntimeError("index out of range")))


def test_a_flag_needs_its_whole_name() -> None:
    parser = Parser()
    parser.add_argument("--steps")
    with pytest.raises(UsageError, match="unrecognized arguments: --step"):
        parser.parse_args(["--step", "5"])


@pytest.mark.parametrize("module", COMMANDS)
def test_ctrl_c_during_the_imports_is_quiet(module: str, tmp_path: Path) -> None:
    """A slow package stands in the place of rich, which all three import."""
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text(
        "import time\nprint('importing', flush=True)\nwhile True:\n    time.sleep(0.05)\n"
    )
    # What a job in the background starts ignores interrupts from the beginning.
    code = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ENVIRONMENT['PYTHONPATH']}"},
    )
    try:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (130, "")


def closed(stream: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command line with the fake engine and one of its streams closed."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {stream}', "sh", sys.executable, "-c", FAKE, *argv],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )


@pytest.mark.parametrize("stream", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_no_fault(stream: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    done = closed(stream, "--prompt", "a", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert len(json.loads(path.read_text())["runs"][0]["completions"]) == 1
    assert ("Answer 1" in done.stdout) == (" >&-" not in f" {stream}")
    assert "tree: " not in done.stdout  # the figures belong to standard error


def test_closed_standard_input_holds_no_prompt() -> None:
    done = closed("<&-", "--prompts", "-")
    assert done.returncode == 2
    assert done.stderr.startswith("jaxspec.run: standard input holds no prompt")
    assert done.stderr.count("\n") == 1
