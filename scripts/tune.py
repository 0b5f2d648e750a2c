"""Measures the kernels' static choices on a TPU or GPU: `python -m scripts.tune`.

Each candidate runs at the sizes of V4-Flash; the fastest of each size becomes a bucket of
`pallas_kernels/tuned.toml`, in place of those that the file has for this kind of device. Buckets of
other devices stay.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.resources
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.command import Parser, conclude
from jaxspec.errors import UsageError
from jaxspec.files import replacing
from pallas_kernels.tuning import SIZES, Bucket, read_tuned
from scripts.kernel_trials import Trial, accelerator, released_trials, seconds_a_call

CANDIDATES: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("tree_attention", "tpu"): [{"entry_tile": tile} for tile in (512, 1024, 2048)],
    ("index_topk", "tpu"): [{"tile": tile} for tile in (1024, 512, 2048, 4096)],
    ("grouped_matmul", "tpu"): [{"block_bytes": mib << 20} for mib in (6, 2, 4, 8)],
    ("tree_attention", "gpu"): [{"splits": splits} for splits in (1, 2, 4, 8)],
    ("index_topk", "gpu"): [{"groups": groups} for groups in (3, 2, 1)],
}
"""Choices to try of an op and a platform."""

HEADER = """\
# Static choices of the kernels by kind of device and size of the call. The first bucket that holds
# a call counts; where none does, the kernel's own defaults stand. `source` says what a choice rests
# on: figures of a compiler, nothing having run, or a measurement by `scripts/tune.py`.
"""


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="python -m scripts.tune", description=__doc__)
    parser.add_argument("--op", nargs="+", choices=list(SIZES), default=list(SIZES), metavar="OP")
    shipped = importlib.resources.files("pallas_kernels").joinpath("tuned.toml")
    parser.add_argument("--file", type=Path, default=Path(str(shipped)), metavar="FILE")
    return parser


def fastest(trial: Trial, impl: str, candidates: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The candidate of least time; one that cannot run is left out with a line that says why."""
    times: list[tuple[float, int]] = []
    for index, choices in enumerate(candidates):
        try:
            seconds = seconds_a_call(trial.compile(impl, choices))
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            print(f"{trial.op} {trial.name} {choices}: cannot run: {words}", flush=True)
            continue
        print(f"{trial.op} {trial.name} {choices}: {1e6 * seconds:.1f} us", flush=True)
        times.append((seconds, index))
    return dict(candidates[min(times)[1]]) if times else None


def tune_op(op_name: str, impl: str, device: str) -> list[Bucket]:
    """Buckets of one op for this device, the smallest sizes first.

    Of trials of the same sizes, which differ in how entries are stored, the first counts.
    """
    candidates = CANDIDATES.get((op_name, impl), [])
    source = f"measured {datetime.date.today().isoformat()}, jax {jax.__version__}"
    found: dict[tuple[int, ...], Bucket] = {}
    for trial in released_trials(op_name) if candidates else ():
        key = tuple(trial.sizes[name] for name in SIZES[op_name])
        choices = None if key in found else fastest(trial, impl, candidates)
        if choices is not None:
            found[key] = Bucket(device, trial.sizes, choices, source)
    return [found[key] for key in sorted(found)]


def merge(
    shipped: Mapping[str, Sequence[Bucket]], measured: Mapping[str, Sequence[Bucket]], device: str
) -> dict[str, list[Bucket]]:
    """What the file had, with this device's buckets of the ops that were measured replaced."""
    merged = {}
    for op_name, buckets in shipped.items():
        new = list(measured.get(op_name, []))
        merged[op_name] = [b for b in buckets if b.device != device or not new] + new
    return merged


def render(tuned: Mapping[str, Sequence[Bucket]]) -> str:
    """The file's text; `read_tuned` reads it back."""

    def table(values: Mapping[str, Any]) -> str:
        pairs = ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
        return f"{{ {pairs} }}" if pairs else "{}"

    parts = [HEADER]
    for op_name, buckets in tuned.items():
        for bucket in buckets:
            parts.append(
                f"[[{op_name}]]\n"
                f"device = {json.dumps(bucket.device)}\n"
                f"up_to = {table(bucket.up_to)}\n"
                f"choose = {table(bucket.choose)}\n"
                f"source = {json.dumps(bucket.source)}\n"
            )
    return "\n".join(parts)


def measure(args: argparse.Namespace) -> int:
    """Measures and writes the file."""
    impl = accelerator()
    try:
        shipped = read_tuned(args.file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{args.file} cannot be read: {error}") from None
    device = jax.devices()[0].device_kind
    measured = {op_name: tune_op(op_name, impl, device) for op_name in args.op}
    with replacing(args.file) as draft:
        draft.write_text(render(merge(shipped, measured, device)), encoding="utf-8")
    print(f"wrote {args.file}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit status."""
    return conclude("scripts.tune", lambda: measure(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
