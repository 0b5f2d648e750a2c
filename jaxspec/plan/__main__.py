"""`python -m jaxspec.plan kernels`: compiles every kernel for hardware that is not here."""

from __future__ import annotations

from jaxspec.signals import leave_quietly

if __name__ == "__main__":  # before the rest, which takes a while
    leave_quietly()

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxspec import report
from jaxspec.command import Parser, conclude
from jaxspec.errors import UsageError
from jaxspec.plan import table
from jaxspec.plan.compile import TIMEOUT, compile_all
from jaxspec.plan.kernels import NO_KERNEL, OPS, jobs
from jaxspec.plan.program import Outcome
from jaxspec.plan.targets import TARGETS, Target, require
from jaxspec.settings import nearest

EPILOG = """\
Nothing runs: what is printed are a compiler's figures, no times. Bundles are static, a loop's body
counts once. Bytes are those of the kernel's own schedule. Needs the extra `aot`.

status: 0 done; 1 a kernel does not compile or breaks a limit; 2 bad input; 130
interrupted by Ctrl-C, 143 by SIGTERM."""

LONGEST = 86400.0
"""Seconds that a case can be given: `select` takes no infinite ones."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog="python -m jaxspec.plan",
        description="Says what programs need on hardware that is not here.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="kernels")
    kernels = commands.add_parser(
        "kernels",
        help="compile every op at V4-Flash's sizes",
        description="Compiles every op at V4-Flash's sizes for a target, without having it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kernels.add_argument("--target", required=True, metavar="|".join(TARGETS), help="hardware")
    kernels.add_argument(
        "--op", nargs="+", action="extend", metavar="OP", help=f"some of {', '.join(OPS)}"
    )
    kernels.add_argument("--case", metavar="TEXT", help="only cases with this in their name")
    kernels.add_argument(
        "--timeout", default=str(TIMEOUT), metavar="S", help=f"seconds a case ({TIMEOUT:g})"
    )
    kernels.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    return parser


def prepare(argv: Sequence[str]) -> tuple[argparse.Namespace, Target]:
    """Reads and checks the command line.

    Raises:
        UsageError: anything of it is wrong, or the target's compiler is not installed.
    """
    args = build_parser().parse_args(argv)
    args.op = args.op or list(OPS)
    for op in args.op:
        if op not in OPS:
            raise UsageError(f"unknown op {op!r} (nearest: {nearest(op, list(OPS))})")
    try:
        args.timeout = float(args.timeout)
    except ValueError:
        args.timeout = -1.0
    if not 0 < args.timeout <= LONGEST:
        raise UsageError(f"--timeout must be a number of seconds above 0 and up to {LONGEST:g}")
    if args.json is not None:
        report.check_writable(args.json)
    return args, require(args.target)


def compile_kernels(args: argparse.Namespace, target: Target) -> list[Outcome]:
    """Compiles what is asked for and prints each outcome as it comes."""
    chosen = [job for op in args.op for job in jobs(op, target.kind)]
    if not chosen:
        raise UsageError(f"nothing to compile: {_lacks(args, target)[0]}")
    chosen = [job for job in chosen if args.case is None or args.case in job.name]
    if not chosen:
        raise UsageError(f"no case has {args.case!r} in its name")
    for line in _lacks(args, target):
        print(line)
    outcomes = []
    for outcome in compile_all(target, chosen, args.timeout):
        print(table.describe(outcome, target), flush=True)
        outcomes.append(outcome)
    return outcomes


def _lacks(args: argparse.Namespace, target: Target) -> list[str]:
    """A line for each op that has no kernel for the target."""
    found = {op: NO_KERNEL.get((op, target.kind)) for op in args.op}
    return [f"{op}: {words}" for op, words in found.items() if words]


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit status."""
    return conclude("jaxspec.plan", lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    args, target = prepare(argv)
    compiler = "libtpu" if target.kind == "tpu" else "jax-cuda13-plugin"
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", compiler)]
    print(f"target {target.name}: compiled by {', '.join(versions)}; nothing was run")
    outcomes = compile_kernels(args, target)
    failed = [outcome for outcome in outcomes if table.broken(outcome, target)]
    fit = [outcome for outcome in outcomes if outcome.fits]
    print(f"{len(fit) - len(failed)} of the {len(fit)} that fit are within their limits")
    if args.json is not None:
        cases = [outcome.to_json() for outcome in outcomes]
        figures = {"target": target.name, "compiler": versions, "cases": cases}
        report.write_json(args.json, figures)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
