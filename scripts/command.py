"""The face that all commands of this folder share: wrong arguments, errors, exit status, tables."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from jaxspec.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Takes no abbreviated flags, and reports a wrong argument like any wrong input."""

    def __init__(self, name: str, description: str | None) -> None:
        prog = f"python -m scripts.{name}"
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help shows what is right")


def run_command(
    parser: Parser, action: Callable[[argparse.Namespace], int], argv: Sequence[str] | None
) -> int:
    """Runs `action` on the arguments; returns the exit status.

    It is the action's own, or 2 after wrong input, 1 if the output cannot be written and 130 after
    Ctrl-C, each with one line on standard error.
    """
    name = parser.prog.rpartition(" ")[2]
    try:
        status = action(parser.parse_args(argv))
        sys.stdout.flush()  # what cannot be written is told here, not at Python's end
        return status
    except UsageError as error:
        print(f"{name}: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except OSError as error:
        reason = error.strerror or error
        print(f"{name}: the output was not written: {reason}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # what is buffered could not be written at Python's end either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is to the left."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))
