"""Compare the speed of jaxspec and transformers: `python -m scripts.compare_speed MODEL ...`.

Each engine lives in a process of its own (`speed_worker.py`) and is told to do one repetition in
turn, never both at once, so that whatever slows the machine slows both. MODEL is a checkpoint in
the released layout that transformers loads too. Plain greedy decoding in float32, on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from jaxspec import report
from jaxspec.command import Parser, conclude
from jaxspec.config import read_config
from jaxspec.errors import UsageError
from jaxspec.resources import model_dir
from scripts.figures import asked, markdown

PAUSE = 0.3
"""Seconds between turns: idle threads of the other engine may spin for a while."""


class Task(NamedTuple):
    """A quantity that is measured: prefill alone if `steps` is 0."""

    batch: int
    length: int
    steps: int

    @property
    def name(self) -> str:
        """With its unit."""
        if self.steps:
            return f"decode, batch {self.batch}, after {self.length}: ms/step"
        return f"prefill, batch {self.batch}, {self.length} tokens: ms"

    def pick(self, answer: dict[str, Any]) -> float:
        """Milliseconds of the quantity."""
        if self.steps:
            return 1e3 * answer["decode_s"] / self.steps
        return 1e3 * answer["prefill_s"]


class Worker:
    """An engine's process, asked over pipes."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name, self.process = name, process
        self.versions: dict[str, str] = self._read()["versions"]

    def ask(self, prompts: list[list[int]], task: Task) -> dict[str, Any]:
        """One repetition."""
        assert self.process.stdin is not None
        rows = [row[: task.length] for row in prompts[: task.batch]]
        question = json.dumps({"prompts": rows, "steps": task.steps})
        with contextlib.suppress(BrokenPipeError):  # what went wrong is told below
            print(question, file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise UsageError(f"the {self.name} process ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise UsageError(f"the {self.name} process: {answer['error']}")
        return answer


@contextlib.contextmanager
def start(python: str, name: str, *argv: str) -> Iterator[Worker]:
    """A worker that is closed at the end."""
    command = [python, str(Path(__file__).with_name("speed_worker.py")), name, *argv]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
    except OSError as error:
        raise UsageError(f"{python} cannot be run: {error.strerror}") from None
    with process:
        try:
            yield Worker(name, process)
        finally:
            process.terminate()


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="python -m scripts.compare_speed", description=__doc__)
    parser.add_argument("model", metavar="MODEL", help="directory in the released layout")
    parser.add_argument("--transformers-python", required=True, metavar="PATH")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="has jaxspec")
    parser.add_argument("--experts", default="grouped_mm", help="transformers' implementation")
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], metavar="B")
    parser.add_argument("--context", type=int, default=256, metavar="N", help="before decoding")
    parser.add_argument("--steps", type=int, default=128, metavar="N", help="of decoding")
    parser.add_argument("--prefill", type=int, default=512, metavar="N", help="tokens")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random prompts")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    return parser


def warm_up(
    worker: Worker, prompts: list[list[int]], tasks: Sequence[Task], progress: Progress
) -> list[list[int]]:
    """One repetition that is not counted, as it compiles; the tokens of all sequences."""
    bar = progress.add_task(f"warm-up {worker.name}", total=len(tasks))
    tokens = []
    for task in tasks:
        tokens += worker.ask(prompts, task)["tokens"]
        progress.advance(bar)
    return tokens


def play_rounds(
    workers: Sequence[Worker],
    prompts: list[list[int]],
    tasks: Sequence[Task],
    progress: Progress,
    rounds: int,
) -> dict[Task, list[dict[str, float]]]:
    """Milliseconds of each task by engine, one entry a round; who begins alternates."""
    times: dict[Task, list[dict[str, float]]] = {task: [] for task in tasks}
    bar = progress.add_task("rounds", total=rounds)
    for number in range(rounds):
        for task in tasks:
            taken: dict[str, float] = {}
            for worker in workers if number % 2 else reversed(workers):
                time.sleep(PAUSE)
                taken[worker.name] = task.pick(worker.ask(prompts, task))
            times[task].append(taken)
        progress.advance(bar)
    return times


def summarise(name: str, rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians, and the median and range of the ratios that the rounds have each for itself."""
    ratios = [each["transformers"] / each["jaxspec"] for each in rounds]
    return {
        "quantity": name,
        "transformers": statistics.median(each["transformers"] for each in rounds),
        "jaxspec": statistics.median(each["jaxspec"] for each in rounds),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "rounds": list(rounds),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """All quantities."""
    lines = []
    for row in rows:
        low, high = row["ratio_range"]
        numbers = [f"{row[name]:.2f}" for name in ("transformers", "jaxspec", "ratio")]
        lines.append([row["quantity"], *numbers, f"{low:.2f} to {high:.2f}"])
    return markdown(["quantity", "transformers", "jaxspec", "ratio", "rounds' ratios"], lines)


def cpu_name() -> str:
    """As Linux calls it, or what else is known."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def check(args: argparse.Namespace) -> None:
    """Raises UsageError for what is wrong whatever the model is."""
    for name in ("threads", "rounds", "context", "steps", "prefill"):
        if getattr(args, name) < 1:
            raise UsageError(f"{name} must be at least 1, not {getattr(args, name)}")
    if min(args.batches) < 1:
        raise UsageError(f"batches must be at least 1, not {min(args.batches)}")
    if args.out is not None:
        report.check_writable(args.out)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Starts both engines and has them play all rounds."""
    directory = model_dir(args.model)
    vocab = read_config(directory / "config.json").vocab_size
    coin = random.Random(args.seed)
    longest = max(args.context, args.prefill)
    prompts = [[coin.randrange(2, vocab) for _ in range(longest)] for _ in range(max(args.batches))]
    tasks = [Task(batch, args.context, args.steps) for batch in args.batches]
    tasks += [Task(batch, args.prefill, 0) for batch in args.batches]
    common = [str(directory), "--threads", str(args.threads)]
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(console=Console(stderr=True)))
        theirs = stack.enter_context(
            start(args.transformers_python, "transformers", *common, "--experts", args.experts)
        )
        expected = warm_up(theirs, prompts, tasks, progress)
        # Their loop never ends early, so neither may ours: no token that they emit is an end.
        emitted = {token for row in expected for token in row}
        end = next(token for token in range(vocab) if token not in emitted)
        ours = stack.enter_context(start(args.python, "jaxspec", *common, "--eos", str(end)))
        found = warm_up(ours, prompts, tasks, progress)
        times = play_rounds([theirs, ours], prompts, tasks, progress, args.rounds)
    same = sum(mine == other for mine, other in zip(found, expected, strict=True))
    return {
        "cpu": cpu_name(),
        "versions": theirs.versions | ours.versions,
        "same_tokens": [same, len(expected)],
        "results": [summarise(task.name, rounds) for task, rounds in times.items()],
    }


def describe(args: argparse.Namespace, found: dict[str, Any]) -> str:
    """The table, and what it was measured with."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    same, compared = found["same_tokens"]
    return (
        f"{table(found['results'])}\n\nMedians of {args.rounds} alternating rounds, "
        f"milliseconds; ratio: transformers / jaxspec, median of the rounds'. {args.threads} "
        f"threads, float32, {found['cpu']}; {versions}. {same} of {compared} sequences have the "
        "same tokens from both."
    )


def compare(args: argparse.Namespace) -> int:
    """Does all that was asked."""
    check(args)
    found = measure(args)
    print(describe(args, found))
    if args.out is not None:
        report.write_json(args.out, {"config": asked(args), **found})
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit status."""
    return conclude("scripts.compare_speed", lambda: compare(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
