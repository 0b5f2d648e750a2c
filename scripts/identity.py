"""Check that speculation changes no token: `python -m scripts.identity` from the repository's root.

Decodes prompts of `FOLDER/SET/dev*.jsonl` plainly, one at a time, and then by every method, budget
and batch size at every temperature. Every second prompt has its own limit, so that limits as well
as end tokens are met within a path; larger batches are decoded in the order of the prompts and in a
random one. Prints a table of identical completions, each divergence, and ends with status 1 if one
is no near-tie.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.progress import Progress

from jaxspec import report
from jaxspec.command import Parser, conclude
from jaxspec.errors import UsageError
from jaxspec.requests import Request
from jaxspec.resources import EMBEDDED_MODEL, model_dir
from jaxspec.results import Completion, MethodRun
from jaxspec.settings import RunConfig
from jaxspec.text import Tokenizer
from scripts.acceptance import load_model, read_sets
from scripts.figures import markdown


class Cell(NamedTuple):
    """One entry of the grid, compared with plain decoding of one prompt at a time."""

    temperature: float
    batch_size: int
    method: str
    budget: int
    compared: int
    divergences: list[report.Divergence]


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="python -m scripts.identity", description=__doc__)
    parser.add_argument("--model", default=EMBEDDED_MODEL, metavar="nano|DIR")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--prompts-per-set", type=int, default=4, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--budgets", type=int, nargs="+", default=[5, 6, 7, 8, 16], metavar="D")
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.3], metavar="X"
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8], metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    return parser


def plan_runs(args: argparse.Namespace, temperature: float) -> tuple[RunConfig, list[RunConfig]]:
    """Plain decoding, which records its margins, and the runs to compare with it."""
    plain = RunConfig(
        method="none",
        budget=1,
        batch_size=1,
        max_new_tokens=args.max_new_tokens,
        temperature=temperature,
        seed=args.seed,
        dtype="float32",
        compare=True,
    )
    if min(args.budgets) < 2:
        raise UsageError("budgets must be at least 2, the root and one draft")
    asked = [("none", 1)] + [
        (m, d) for d in dict.fromkeys(args.budgets) for m in ("linear", "tree")
    ]
    return plain, [
        dataclasses.replace(plain, method=m, budget=d, batch_size=size, compare=False)
        for size in dict.fromkeys(args.batch_sizes)
        for m, d in asked
        if (m, size) != ("none", 1)
    ]


def limit_requests(requests: list[Request], most: int, seed: int) -> list[Request]:
    """Gives every second request a limit of its own, up to `most`."""
    coin = random.Random(seed)
    return [
        dataclasses.replace(each, max_new_tokens=coin.randint(1, most)) if i % 2 else each
        for i, each in enumerate(requests)
    ]


def decode(model: tuple[Any, Any, Tokenizer], run: RunConfig, requests: list[Request]) -> MethodRun:
    """The completions of `requests`, in their order."""
    from jaxspec.engine import Engine

    params, cfg, tokenizer = model
    engine = Engine(params, cfg, run, tokenizer=tokenizer)
    completions = engine.generate(requests)
    label = f"{run.method} D={run.budget} T={run.temperature:g} B={run.batch_size}"
    return MethodRun(label, engine.statistics, tuple(completions))


def orders(requests: list[Request], run: RunConfig) -> Iterator[list[Request]]:
    """The requests as they are and, for more than one row, in a random order."""
    yield requests
    if run.batch_size > 1:
        yield random.Random(run.seed + run.budget).sample(requests, len(requests))


def compare(
    model: tuple[Any, Any, Tokenizer], plain: MethodRun, run: RunConfig, requests: list[Request]
) -> Cell:
    """Decodes as `run` says, in every order, and compares."""
    found, compared = [], 0
    for each in orders(requests, run):
        other = decode(model, run, each)
        by_id: dict[Any, Completion] = {done.id: done for done in other.completions}
        ordered = tuple(by_id[request.id] for request in requests)
        found += report.find_divergences(plain, dataclasses.replace(other, completions=ordered))
        compared += len(requests)
    return Cell(run.temperature, run.batch_size, run.method, run.budget, compared, found)


def table(cells: Sequence[Cell]) -> str:
    """Identical completions of those compared, by temperature and batch size."""
    columns = list(dict.fromkeys((cell.method, cell.budget) for cell in cells))
    rows = {}
    for cell in cells:
        row = rows.setdefault((cell.temperature, cell.batch_size), {})
        row[cell.method, cell.budget] = f"{cell.compared - len(cell.divergences)}/{cell.compared}"
    head = [method if method == "none" else f"{method} {budget}" for method, budget in columns]
    lines = [
        [f"T = {temperature:g}, batch {size}", *(row.get(column, "") for column in columns)]
        for (temperature, size), row in rows.items()
    ]
    return markdown(["identical to plain", *head], lines)


def ends(plain: MethodRun) -> str:
    """How plain decoding's completions ended."""
    reasons = [done.finish_reason for done in plain.completions]
    return f"{reasons.count('stop')} by end token, {reasons.count('length')} at their limit"


def check(args: argparse.Namespace) -> int:
    """Does all that was asked; returns the exit status."""
    planned = [plan_runs(args, temperature) for temperature in dict.fromkeys(args.temperatures)]
    directory = model_dir(args.model)
    tokenizer = Tokenizer.load(directory)
    sets = read_sets(args.data, args.prompts_per_set, tokenizer)
    asked = [request for each in sets.values() for request in each]
    requests = limit_requests(asked, args.max_new_tokens, args.seed)
    model, capacity = load_model(directory, tokenizer, requests, args.max_new_tokens)
    cells = []
    with Progress() as progress:
        task = progress.add_task("runs", total=sum(1 + len(runs) for _, runs in planned))
        for first, runs in planned:
            plain = decode(model, dataclasses.replace(first, max_len=capacity), requests)
            progress.advance(task)
            progress.print(f"T = {first.temperature:g}: {ends(plain)}")
            for run in runs:
                run = dataclasses.replace(run, max_len=capacity)
                cells.append(compare(model, plain, run, requests))
                progress.advance(task)
    found = [each for cell in cells for each in cell.divergences]
    faults = sum(not each.excused for each in found)
    compared = sum(cell.compared for cell in cells)
    print(
        f"{table(cells)}\n\n{compared - len(found)} of {compared} completions identical, "
        f"{len(found) - faults} excused by a near-tie, {faults} different."
    )
    for each in found:
        print(f"- {report.describe(each)}")
    return int(faults > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit status."""
    return conclude("scripts.identity", lambda: check(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
