"""What the command lines share: how they read their flags, and every way in which they end."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from jaxspec.errors import UsageError
from jaxspec.signals import exit_status, terminable


class Parser(argparse.ArgumentParser):
    """Takes flags by their whole names only; what is wrong is a `UsageError`."""

    def __init__(self, **choices: object) -> None:
        super().__init__(**choices, allow_abbrev=False)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Raises what `conclude` prints as one line."""
        raise UsageError(f"{message}; --help shows what is right")


def conclude(name: str, body: Callable[[], int], interrupted: str | None = None) -> int:
    """Runs the body of the command `name`; the exit status.

    Bad input is one line and status 2; what cannot be read or written, or has no room in memory,
    one line and status 1. Ctrl-C is 130 and SIGTERM 143, with the line `interrupted`, if given.
    """
    _open_closed_streams()

    def say(words: str) -> None:
        print(f"{name}: " + " ".join(words.split()), file=sys.stderr)

    try:
        with terminable():
            try:
                return body()
            finally:
                sys.stdout.flush()  # what cannot be written is told here, not at Python's end
    except UsageError as error:
        say(str(error))
        return 2
    except KeyboardInterrupt as interrupt:
        if interrupted is not None:
            say(interrupted)
        return exit_status(interrupt)
    except BrokenPipeError:  # a reader that left wants to hear no more
        _discard_output()
        return 1
    except OSError as error:
        if error.strerror is None:
            say(str(error))
        else:
            say(f"{error.filename or 'the output was not written'}: {error.strerror}")
        if error.filename is None:
            _discard_output()
        return 1
    except (MemoryError, RuntimeError) as error:
        # XLA's own class is not named: a refusal must not wait for JAX's import.
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        say(f"out of memory; a smaller batch, budget or capacity needs less ({error})")
        return 1


def _open_closed_streams() -> None:
    """What the caller has closed is empty, or takes all, as Python's own `print` has it.

    Left closed, the number of a stream would go to a file that is opened later, and with it what
    libraries say on standard error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _discard_output() -> None:
    """What is still buffered for standard output cannot be written at Python's end either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
