"""Measure accepted length on data sets. From the repository's root: `python -m scripts.acceptance`.

Decodes prompts of `FOLDER/SET/dev*.jsonl` plainly and with each method and budget, and prints
Markdown tables: accepted length, acceptance by depth and by rank, and whether all token ids agree.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxspec import __version__, report
from jaxspec.answer import Answer, acceptance_by_rank, tally
from jaxspec.command import Parser, conclude
from jaxspec.errors import UsageError
from jaxspec.requests import Request, read_requests
from jaxspec.resources import EMBEDDED_MODEL, model_dir
from jaxspec.results import MethodRun
from jaxspec.settings import RunConfig
from jaxspec.text import Tokenizer
from scripts.figures import asked, markdown

CONVENTION = (
    "D counts the tokens verified in a step, the root included; accepted length (τ) is tokens "
    "emitted a step, the bonus included, prefill's token left out."
)
ALL = "all"
"""The row of all sets together."""


class Cell(NamedTuple):
    """One method and budget: what was decoded, and the answers of each set and of all."""

    method: str
    budget: int
    run: MethodRun
    answers: dict[str, list[Answer]]


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="python -m scripts.acceptance", description=__doc__)
    parser.add_argument("--model", default=EMBEDDED_MODEL, metavar="nano|DIR")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--prompts-per-set", type=int, default=32, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--budgets", type=int, nargs="+", default=[5, 6, 7, 8], metavar="D")
    parser.add_argument(
        "--methods", nargs="+", default=["linear", "tree"], choices=["linear", "tree"]
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    return parser


def plan_runs(args: argparse.Namespace) -> list[RunConfig]:
    """Plain decoding, which records its margins, then every method and budget. Checks them all."""
    shared = RunConfig(
        batch_size=args.batch_size,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        dtype="float32",
    )
    if min(args.budgets) < 2:
        raise UsageError("budgets must be at least 2, the root and one draft")
    methods, budgets = dict.fromkeys(args.methods), dict.fromkeys(args.budgets)
    plain = dataclasses.replace(shared, method="none", budget=1, compare=True)
    return [plain] + [
        dataclasses.replace(shared, method=method, budget=budget)
        for budget in budgets
        for method in methods
    ]


def read_sets(folder: Path, count: int, tokenizer: Tokenizer) -> dict[str, list[Request]]:
    """The first `count` prompts of each set, as token ids; ids get the set's name in front."""
    if count < 1:
        raise UsageError(f"prompts-per-set must be at least 1, not {count}")
    sets: dict[str, list[Request]] = {}
    for path in sorted(folder.glob("*/dev*.jsonl")):
        kept = sets.setdefault(path.parent.name, [])
        for each in read_requests(str(path))[: count - len(kept)]:
            prompt = each.prompt
            if isinstance(prompt, str):
                prompt = tuple(tokenizer.encode_chat(prompt, each.history))
            kept.append(Request(f"{path.parent.name}/{each.id}", prompt))
    if not sets:
        raise UsageError(f"{folder} holds no SET/dev*.jsonl; name the folder that holds the sets")
    return sets


def load_model(
    directory: Path, tokenizer: Tokenizer, requests: Sequence[Request], most: int
) -> tuple[tuple[Any, Any, Tokenizer], int]:
    """Parameters, configuration and tokenizer, and one capacity for all runs.

    Capacity is a shape: another one would be another compilation.
    """
    from jaxspec.checkpoint import load_checkpoint
    from jaxspec.shapes import ROUND, round_up

    params, cfg = load_checkpoint(directory, dtype="float32")
    longest = max(len(each.prompt) for each in requests)
    capacity = min(round_up(longest + most, ROUND), cfg.max_position_embeddings)
    return (params, cfg, tokenizer), capacity


def decode(
    model: tuple[Any, Any, Tokenizer],
    run: RunConfig,
    sets: dict[str, list[Request]],
    progress: Progress,
) -> Cell:
    """Decodes all sets in one go, so that a method and budget is compiled once."""
    from jaxspec.engine import Engine

    params, cfg, tokenizer = model
    budget = int(run.budget)
    label = run.method if run.method == "none" else f"{run.method} D={budget}"
    requests = [request for each in sets.values() for request in each]
    task = progress.add_task(label, total=len(requests))
    engine = Engine(params, cfg, run, tokenizer=tokenizer)
    completions = engine.generate(
        requests,
        on_tokens=lambda news: progress.advance(task, float(news.completion is not None)),
    )
    answers, rest = {ALL: engine.answers}, iter(engine.answers)
    for name, members in sets.items():
        answers[name] = [next(rest) for _ in members]
    return Cell(
        run.method, budget, MethodRun(label, engine.statistics, tuple(completions)), answers
    )


def figures(cell: Cell) -> list[dict[str, Any]]:
    """What the JSON file and the tables hold of a method and budget, set by set."""
    rows = []
    for name, answers in cell.answers.items():
        counts = tally(answers, len(cell.run.statistics.reached), 0.0)
        rows.append(
            {
                "method": cell.method,
                "budget": cell.budget,
                "set": name,
                "prompts": len(answers),
                "tokens": counts.tokens,
                "steps": counts.steps,
                "accepted_length": counts.accepted_length,
                "per_depth": list(counts.per_depth),
                "by_rank": [each._asdict() for each in acceptance_by_rank(answers)],
            }
        )
    return rows


def length_table(rows: Sequence[dict[str, Any]]) -> str:
    """Accepted length by set and budget, and tree over linear."""
    cells = {(row["set"], row["budget"], row["method"]): row["accepted_length"] for row in rows}
    lines = []
    for name, budget in dict.fromkeys((row["set"], row["budget"]) for row in rows):
        linear, tree = (cells.get((name, budget, method)) for method in ("linear", "tree"))
        ratio = tree / linear if linear and tree else None
        lines.append([name, str(budget), *(_figure(value) for value in (linear, tree, ratio))])
    return markdown(["set", "D", "linear", "tree", "tree / linear"], lines)


def depth_table(rows: Sequence[dict[str, Any]]) -> str:
    """P(depth d+1 accepted | depth d accepted), set by set."""
    most = max(len(row["per_depth"]) for row in rows)
    lines = [
        _heading(row) + [_figure(share) for share in row["per_depth"]] + [""] * (most - depth)
        for row in rows
        for depth in [len(row["per_depth"])]
    ]
    return markdown(["set", "method", "D", *map(str, range(1, most + 1))], lines)


def rank_table(rows: Sequence[dict[str, Any]]) -> str:
    """Of nodes that were offered a child of rank r, the share whose rank r was accepted."""
    most = max(len(row["by_rank"]) for row in rows)
    lines = []
    for row in rows:
        shares = [
            f"{each['accepted'] / each['offered']:.3f} of {each['offered']}"
            for each in row["by_rank"]
        ]
        lines.append(_heading(row) + shares + [""] * (most - len(shares)))
    return markdown(["set", "method", "D", *(f"rank {r}" for r in range(1, most + 1))], lines)


def _heading(row: dict[str, Any]) -> list[str]:
    return [row["set"], row["method"], str(row["budget"])]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def print_report(rows: list[dict[str, Any]], found: list[report.Divergence], compared: int) -> None:
    """All tables, and every completion that parts from plain decoding's."""
    print(f"{CONVENTION}\n\n## Accepted length\n\n{length_table(rows)}\n")
    print(f"## Acceptance by depth: P(depth d accepted | depth d - 1)\n\n{depth_table(rows)}\n")
    print(f"## Acceptance by rank, of nodes with such a child\n\n{rank_table(rows)}\n")
    faults = sum(not each.excused for each in found)
    print(
        f"## Identity\n\n{compared} completions were compared with plain decoding: "
        f"{compared - len(found)} identical, {len(found) - faults} excused by a near-tie (a gap "
        f"below {report.NEAR_TIE:g}), {faults} different.\n"
    )
    for each in found:
        print(f"- {report.describe(each)}")


def measure(args: argparse.Namespace) -> int:
    """Does all that was asked; returns the exit status."""
    runs = plan_runs(args)
    if args.out is not None:
        report.check_writable(args.out)
    directory = model_dir(args.model)
    tokenizer = Tokenizer.load(directory)
    sets = read_sets(args.data, args.prompts_per_set, tokenizer)
    import jax

    requests = [request for each in sets.values() for request in each]
    model, capacity = load_model(directory, tokenizer, requests, args.max_new_tokens)
    columns = TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn()
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        cells = [
            decode(model, dataclasses.replace(run, max_len=capacity), sets, progress)
            for run in runs
        ]
    plain, *others = cells
    found = [each for cell in others for each in report.find_divergences(plain.run, cell.run)]
    rows = [row for cell in others for row in figures(cell)]
    compared = sum(len(cell.run.completions) for cell in others)
    print_report(rows, found, compared)
    if args.out is not None:
        value = {
            "convention": CONVENTION,
            "config": asked(args) | {"max_len": capacity},
            "versions": {"jaxspec": __version__, "jax": jax.__version__},
            "machine": platform.machine(),
            "results": rows,
            "compared": compared,
            "identical": not found,
            "divergences": [dataclasses.asdict(each) | {"excused": each.excused} for each in found],
        }
        report.write_json(args.out, value)
    return int(any(not each.excused for each in found))


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit status."""
    return conclude("scripts.acceptance", lambda: measure(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
