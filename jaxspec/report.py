"""What a run reports: the JSON file, the comparison table, and where two methods part."""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from jaxspec.errors import UsageError
from jaxspec.files import replacing
from jaxspec.results import Completion, MethodRun
from jaxspec.settings import RunConfig

NEAR_TIE = 1e-4
"""A choice that rests on a smaller gap than this may fall either way in float32."""


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The first token at which a method's completion parts from plain decoding's.

    `margin` is the gap that plain decoding's own choice rested on, `None` where it was not recorded
    or where one completion is the beginning of the other.
    """

    id: str | int
    method: str
    position: int
    margin: float | None

    @property
    def excused(self) -> bool:
        """Whether plain decoding's own choice was a near-tie."""
        return self.margin is not None and self.margin < NEAR_TIE


def find_divergences(plain: MethodRun, other: MethodRun) -> list[Divergence]:
    """Where `other` parts from plain decoding of the same requests, at most once a completion."""
    pairs = zip(plain.completions, other.completions, strict=True)
    found = [_first_difference(expected, got, other.method) for expected, got in pairs]
    return [divergence for divergence in found if divergence is not None]


def _first_difference(expected: Completion, got: Completion, method: str) -> Divergence | None:
    if expected.token_ids == got.token_ids:
        return None
    length = min(len(expected.token_ids), len(got.token_ids))
    position = next((i for i in range(length) if expected.token_ids[i] != got.token_ids[i]), length)
    margins = expected.margins
    margin = margins[position] if margins is not None and position < length else None
    return Divergence(expected.id, method, position, margin)


def to_json(
    model: str, run: RunConfig, runs: Sequence[MethodRun], divergences: Sequence[Divergence] | None
) -> dict[str, Any]:
    """The documented form of a run's results; `divergences` is `None` if nothing was compared."""
    return {
        "config": {"model": model, **dataclasses.asdict(run)},
        "runs": [_run_to_json(each) for each in runs],
        "identical": None if divergences is None else not divergences,
        "divergences": [
            {**dataclasses.asdict(each), "excused": each.excused} for each in divergences or ()
        ],
    }


def _run_to_json(run: MethodRun) -> dict[str, Any]:
    counts = run.statistics
    return {
        "method": run.method,
        "tokens_per_s": counts.tokens_per_s,
        "accepted_length": counts.accepted_length,
        "steps": counts.steps,
        "tokens": counts.tokens,
        "per_depth": list(counts.per_depth),
        "completions": [
            {
                "id": each.id,
                "token_ids": list(each.token_ids),
                "text": each.text,
                "finish_reason": each.finish_reason,
            }
            for each in run.completions
        ],
    }


def check_writable(path: Path) -> None:
    """Finds out before a run whether `write_json` will be able to write there.

    Raises:
        UsageError: no such directory, not a regular file, or no permission.
    """
    target = Path(os.path.realpath(path))
    problem = None
    try:
        target.stat()
        is_there = True
    except (FileNotFoundError, NotADirectoryError):
        is_there = False
    except OSError as error:  # such as a name that is too long
        raise UsageError(
            f"cannot write {reprlib.repr(str(path))}: {error.strerror}; name a file that can be "
            "written"
        ) from None
    if is_there and not target.is_file():
        problem = "it exists and is not a regular file"
    elif is_there and not os.access(target, os.W_OK):
        problem = "it exists and may not be written"
    else:
        try:
            tempfile.TemporaryFile(dir=target.parent).close()
        except OSError as error:
            problem = f"its directory cannot be written ({error.strerror})"
    if problem:
        raise UsageError(f"cannot write {str(path)!r}: {problem}; name a file that can be written")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes the file whole or not at all; of several writers the last stays. Raises OSError."""
    text = json.dumps(value, ensure_ascii=False, indent=1, allow_nan=False)
    with replacing(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def comparison_table(
    run: RunConfig, runs: Sequence[MethodRun], divergences: Sequence[Divergence]
) -> Table:
    """One line a method; `runs[0]` is plain decoding, which the others are measured by."""
    table = Table(
        title=f"{len(runs[0].completions)} prompts, {runs[0].statistics.tokens} tokens, "
        f"budget {run.budget}, batch {run.batch_size}, temperature {run.temperature:g}",
        caption="budget: tokens verified in a step, the root included; "
        "accepted: tokens emitted a step, the bonus included; phases in seconds",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("method")
    for name in ("tokens/s", "speed-up", "accepted", "draft", "verify", "commit"):
        table.add_column(name, justify="right")
    table.add_column("identical")
    base = runs[0].statistics.tokens_per_s
    for each in runs:
        counts = each.statistics
        ratio = counts.tokens_per_s / base if counts.tokens_per_s and base else None
        table.add_row(
            each.method,
            _figure(counts.tokens_per_s, 1),
            _figure(ratio, 2),
            _figure(counts.accepted_length, 2),
            _figure(counts.draft_s, 2),
            _figure(counts.verify_s, 2),
            _figure(counts.commit_s, 2),
            "" if each is runs[0] else _verdict(each.method, divergences),
        )
    return table


def _figure(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _verdict(method: str, divergences: Sequence[Divergence]) -> str:
    own = [each for each in divergences if each.method == method]
    if not own:
        return "yes"
    return "near-tie" if all(each.excused for each in own) else "no"


def describe(divergence: Divergence) -> str:
    """One line that says where a completion parts from plain decoding's, and whether it may."""
    gap = "not recorded" if divergence.margin is None else f"{divergence.margin:.1e}"
    verdict = "excused, a near-tie" if divergence.excused else "NOT excused"
    return (
        f"{divergence.method} differs from none in {divergence.id!r} at token "
        f"{divergence.position}: plain decoding's gap there is {gap} ({verdict})"
    )


def summary(run: MethodRun) -> str:
    """One line about a run."""
    counts = run.statistics
    return (
        f"{run.method}: {counts.tokens} tokens in {counts.steps} steps, accepted length "
        f"{_figure(counts.accepted_length, 2)}, {_figure(counts.tokens_per_s, 1)} tokens/s"
    )
