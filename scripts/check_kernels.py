"""Checks the kernels on a TPU or GPU: `python -m scripts.check_kernels --out FOLDER`.

First every case of the conformance tables is held to its definition, then calls at the sizes of
V4-Flash are timed against their byte floor (the fewest bytes over the memory's bandwidth) and
against the definition. FOLDER gets a file with the device's name and the day in its name. Times
are of back-to-back calls, so that what fits into a cache may be read from there.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec import report
from jaxspec.command import Parser, conclude
from jaxspec.errors import UsageError
from jaxspec.plan.targets import TARGETS
from scripts.kernel_trials import (
    OPS,
    Trial,
    accelerator,
    released_trials,
    seconds_a_call,
    small_trials,
)


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="python -m scripts.check_kernels", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--op", nargs="+", choices=list(OPS), default=list(OPS), metavar="OP")
    return parser


def check_numbers(trials: Iterable[Trial], impl: str) -> list[dict[str, Any]]:
    """Each trial's verdict: `equal`, `differs`, or `cannot` with the reason in words."""
    found = []
    for trial in trials:
        verdict, words = "equal", ""
        try:
            trial.check(trial.compile(impl)())
        except AssertionError as error:
            verdict, words = "differs", _line(error)
        except Exception as error:
            verdict, words = "cannot", _line(error)
        found.append({"op": trial.op, "case": trial.name, "verdict": verdict, "words": words})
        print(f"{trial.op} {trial.name}: {verdict} {words}".rstrip(), flush=True)
    return found


def time_calls(trials: Iterable[Trial], impl: str, bandwidth: float) -> list[dict[str, Any]]:
    """Microseconds of each trial by the kernel and by the definition, beside the floor."""
    found = []
    for trial in trials:
        row: dict[str, Any] = {"op": trial.op, "case": trial.name}
        row["kernel_us"] = _microseconds(lambda trial=trial: trial.compile(impl))
        row["ref_us"] = _microseconds(lambda trial=trial: trial.compile("ref"))
        moved = trial.traffic(impl)
        row["floor_us"] = None if moved is None else 1e6 * moved.fewest / bandwidth
        found.append(row)
        print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return found


def _microseconds(make: Callable[[], Callable[[], Any]]) -> float | str:
    """Of a call, or why it cannot run: a definition may need too much memory."""
    try:
        return round(1e6 * seconds_a_call(make()), 2)
    except Exception as error:
        return _line(error)


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def result_file(folder: Path, device: str, day: datetime.date) -> Path:
    """Where the results of one device and day go."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / f"kernels-{name}-{day.isoformat()}.json"


def check(args: argparse.Namespace) -> int:
    """Does all that was asked; status 1 if a kernel differs from its definition."""
    impl = accelerator()
    device = jax.devices()[0].device_kind
    out = result_file(args.out, device, datetime.date.today())
    report.check_writable(out)
    bandwidth = next((t.bandwidth for t in TARGETS.values() if t.device_kind == device), None)
    if bandwidth is None:
        raise UsageError(f"the memory bandwidth of {device} is not known; add it to TARGETS")
    numbers = check_numbers((t for t in small_trials() if t.op in args.op), impl)
    times = [row for op in args.op for row in time_calls(released_trials(op), impl, bandwidth)]
    found = {"device": device, "jax": jax.__version__, "numbers": numbers, "times": times}
    report.write_json(out, {"day": datetime.date.today().isoformat(), **found})
    print(f"wrote {out}")
    return int(any(row["verdict"] != "equal" for row in numbers))


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit status."""
    return conclude("scripts.check_kernels", lambda: check(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
