"""Requests to stop: Ctrl-C and SIGTERM, which schedulers send some time before they kill."""

from __future__ import annotations

import contextlib
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


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Within the block SIGTERM raises `Terminated`; only in the main thread, as Python has it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
