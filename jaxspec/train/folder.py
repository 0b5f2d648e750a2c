"""A training run's folder: `state/` (orbax), `model/` (released layout) and `log.jsonl`."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxspec.checkpoint import save_checkpoint
from jaxspec.config import ModelConfig
from jaxspec.errors import UsageError
from jaxspec.files import remove_partial, replacing, sole_writer
from jaxspec.model.params import ModelParams

KEPT = 2
"""States on disk: the newest, and the one before it."""


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[RunFolder]:
    """The folder, held against other processes.

    Raises:
        UsageError: another process is training in it.
        OSError: it cannot be written.
    """
    with sole_writer(path):
        yield RunFolder(path)


class RunFolder:
    """Reads and writes what a run keeps; each file and each state is whole or not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"
        remove_partial(path)
        remove_partial(self.model)
        # A state is on disk before the next step, so that a kill costs no more than it must.
        options = ocp.CheckpointManagerOptions(
            max_to_keep=KEPT, create=True, enable_async_checkpointing=False
        )
        self._states = ocp.CheckpointManager((path / "state").absolute(), options=options)

    def read_state(self, like: Any) -> tuple[int, Any]:
        """The newest state's step and leaves, or 0 and `like` itself if there is none.

        The log is cut back to that step: what came after it will be run, and logged, again.

        Raises:
            UsageError: the state is damaged, or of a model or optimizer of other shapes.
        """
        step = self._states.latest_step() or 0
        if step:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
            try:
                with _one_failure_is_enough():
                    like = self._states.restore(step, args=ocp.args.StandardRestore(abstract))
            except Exception as error:  # orbax raises whatever its parts raise
                raise UsageError(
                    f"{self._states.directory / str(step)} is damaged or of another model "
                    f"({_first_line(error)}); remove it to go on from an earlier state"
                ) from None
        self._cut_log(step)
        return step, like

    def save_state(self, step: int, state: Any) -> None:
        """Writes a state; the one before the last is removed. Raises OSError."""
        try:
            with _one_failure_is_enough():
                self._states.save(step, args=ocp.args.StandardSave(state))
        except Exception as error:  # orbax raises whatever its parts raise
            said = _first_line(error)
            raise OSError(f"{self._states.directory} was not written: {said}") from None

    def save_model(self, params: ModelParams, cfg: ModelConfig, tokenizer: Path) -> None:
        """Writes `model/` in bfloat16, with the tokenizer's file. Raises OSError."""
        save_checkpoint(self.model, params, cfg, dtype=jnp.bfloat16)
        with replacing(self.model / tokenizer.name) as draft:
            shutil.copyfile(tokenizer, draft)

    def log(self, record: dict[str, Any]) -> None:
        """Adds a line to the log. Raises OSError."""
        with self._log_file.open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")

    @property
    def _log_file(self) -> Path:
        return self.path / "log.jsonl"

    def _cut_log(self, step: int) -> None:
        """Leaves out what was logged after `step`, and a line that a kill or full disk cut."""
        if not self._log_file.exists():
            return
        lines = self._log_file.read_text(encoding="utf-8", errors="replace").splitlines()
        kept = [line for line in lines if 0 < _step_of(line) <= step]
        if kept != lines:
            with replacing(self._log_file) as draft:
                draft.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")


def _step_of(line: str) -> int:
    """A log line's step, or 0 if it is none."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return 0
    return step if isinstance(step, int) else 0


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


@contextlib.contextmanager
def _one_failure_is_enough() -> Iterator[None]:
    """Keeps quiet about what fails beside the first failure, whose exception is raised.

    orbax works on all leaves at once, logs what stops it, and closes its event loop at the first
    failure; each leaf that is still on its way then ends with a traceback of its own on standard
    error, in its own time.
    """
    report, logger = sys.unraisablehook, logging.getLogger("absl")

    def hook(unraisable: Any) -> None:
        said = str(unraisable.exc_value)
        if "Event loop is closed" not in said and "TensorStore" not in said:
            report(unraisable)

    def refuse(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(refuse)
    sys.unraisablehook = hook
    try:
        yield
    finally:
        logger.removeFilter(refuse)
    sys.unraisablehook = report  # not after a failure
