"""Files that are whole or not there, and folders that one process writes at a time.

Nothing here depends on how a process ends: a draft that is left behind is never read, and the
kernel lets go of a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from jaxspec.errors import UsageError

_PARTIAL = ".partial"
_LOCK = ".lock"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A place for a new file, which takes the place of `path` at the end of the block.

    If the block raises, `path` stays as it was. The place has a short name of its own, so that of
    several writers the last whole file stays, what a killed writer leaves is in nobody's way, and
    no name is too long for it that is not for `path`.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(os.path.realpath(path))
    draft = target.with_name(f".{secrets.token_hex(16)}{_PARTIAL}")
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())  # or the new name may reach the disk before the content
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Removes what killed writers left in `folder`, which nobody else may be writing now."""
    for draft in folder.glob(f".*{_PARTIAL}"):
        draft.unlink(missing_ok=True)


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keeps other processes that ask for `folder` out until the end of the block.

    Raises:
        UsageError: another one is in it.
        OSError: the lock's file cannot be made.
    """
    with (folder / _LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process is writing {folder}; wait until it ends or name another folder"
            ) from None
        yield
