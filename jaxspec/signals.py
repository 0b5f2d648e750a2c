"""Requests to stop: Ctrl-C and SIGTERM, which schedulers send some time before they kill."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM came; it unwinds as Ctrl-C does."""


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """130 after Ctrl-C, 143 after SIGTERM: 128 and the signal's number, as shells have it."""
    is_terminated = isinstance(interrupt, Terminated)
    return 128 + (signal.SIGTERM if is_terminated else signal.SIGINT)


def leave_quietly() -> None:
    """From now on Ctrl-C ends the process at once with 130; within `terminable` it unwinds.

    For commands whose imports take a while. Where it is ignored, as in the background, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # an exception could be caught by what is being imported


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within the block SIGTERM raises `Terminated`; only in the main thread, as Python has it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    is_early = signal.getsignal(signal.SIGINT) is _leave
    if is_early:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if is_early:
            signal.signal(signal.SIGINT, _leave)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
