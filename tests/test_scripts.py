"""What all of `scripts/` do alike: answers to wrong arguments, full disks, Ctrl-C; tables."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.figures import markdown

ROOT = Path(__file__).parent.parent
COMMANDS = sorted(
    path.stem for path in (ROOT / "scripts").glob("*.py") if "build_parser" in path.read_text()
)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_wrong_argument_is_one_line_of_the_script(name: str, capsys) -> None:
    """An abbreviated flag is wrong too: it would change its meaning with the next flag."""
    script = importlib.import_module(f"scripts.{name}")
    flags = [action.option_strings for action in script.build_parser()._actions]
    long = max((flag for each in flags for flag in each), key=len)
    for argv in (["--no-such-flag"], ["x", "y", "z"], [long[:-1], "1"]):
        assert script.main(argv) == 2, argv
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith(f"scripts.{name}: ")
        assert "--help shows what is right" in line


def test_the_scripts_are_those_with_a_command_line() -> None:
    assert {"acceptance", "compare_speed", "identity", "teacher_forced", "tune"} <= {*COMMANDS}


def run_action(action: str, stdout: Any) -> subprocess.CompletedProcess[str]:
    """A process that prints and then does `action`."""
    code = (
        "import sys\nfrom jaxspec.command import conclude\n"
        f"def act():\n  print('words')\n  {action}\n"
        "sys.exit(conclude('scripts.name', act))"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"},
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("action", ["return 0", "raise OSError(28, 'No space left on device')"])
def test_a_full_standard_output_is_one_line_and_status_1(action: str) -> None:
    """As Python itself has it, it would be found at the end, with status 120."""
    with open("/dev/full", "w") as full:
        done = run_action(action, full)
    assert done.returncode == 1
    assert done.stderr == "scripts.name: the output was not written: No space left on device\n"


def test_what_was_printed_stays_if_a_file_cannot_be_written() -> None:
    done = run_action("raise OSError(28, 'No space left on device')", subprocess.PIPE)
    assert (done.returncode, done.stdout) == (1, "words\n")


def test_the_first_column_of_a_table_is_to_the_left() -> None:
    assert markdown(["set", "D"], [["a", "5"], ["b", "16"]]) == (
        "| set | D |\n| :-- | --: |\n| a | 5 |\n| b | 16 |"
    )
