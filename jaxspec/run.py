"""`python -m jaxspec.run`: prompts in, completions out, by tree, linear or no speculation."""

from __future__ import annotations

from jaxspec.signals import leave_quietly

if __name__ == "__main__":  # before the rest, which takes a while
    leave_quietly()

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxspec import __version__, demo, report
from jaxspec.command import Parser, conclude
from jaxspec.errors import UsageError
from jaxspec.requests import Request, check_token_ids, read_requests, requests_from_prompts
from jaxspec.resources import EMBEDDED_MODEL, model_dir, run_config_file
from jaxspec.results import Completion, Emission, MethodRun
from jaxspec.settings import RunConfig, nearest, read_run_config
from jaxspec.signals import exit_status
from jaxspec.stream import Marks, StreamPrinter
from jaxspec.text import Tokenizer

EPILOG = """\
Without arguments a demonstration runs on the embedded model; with flags but no prompt, they apply
to the demonstration's prompts. A prompts file has one JSON object a line with "prompt" (text or
token ids) and optionally "id", "history" (a list of {"role", "content"}), "max_new_tokens" and
"seed"; other keys are ignored.

status: 0 done; 1 --compare found a difference that no near-tie excuses, or results could not be
written; 2 bad input, nothing was written; 130 interrupted by Ctrl-C, 143 by SIGTERM, finished
completions were written."""


@dataclasses.dataclass(frozen=True)
class Job:
    """All that the command line asks for, checked as far as that goes without the model."""

    model: str
    directory: Path
    run: RunConfig
    requests: list[Request]
    json: Path | None
    demo: bool


@dataclasses.dataclass(frozen=True)
class Session:
    """A loaded model."""

    params: Any
    cfg: Any
    tokenizer: Tokenizer | None


class Interrupted(Exception):
    """Ctrl-C or SIGTERM during generation; `run` holds what had finished by then."""

    def __init__(self, run: MethodRun, status: int) -> None:
        super().__init__(run.method)
        self.run, self.status = run, status


def build_parser() -> argparse.ArgumentParser:
    """The command line; each field of `RunConfig` is a flag, its text is read by `settings`."""
    parser = Parser(
        prog="python -m jaxspec.run",
        description="Decodes prompts with DeepSeek-V4 and tree-structured speculation.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jaxspec {__version__}")
    parser.add_argument(
        "--model",
        default=EMBEDDED_MODEL,
        metavar="nano|DIR",
        help="checkpoint in the released layout (default: nano, embedded)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", nargs="+", action="extend", metavar="TEXT", help="prompts")
    source.add_argument("--prompts", metavar="FILE", help="JSONL file of prompts; - is stdin")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument(
        "--config", metavar="FILE", help="TOML file of the settings below; flags override it"
    )
    settings = parser.add_argument_group("settings (flags, or keys of the TOML file)")
    for field in dataclasses.fields(RunConfig):
        _add_setting(settings, field)
    return parser


def _add_setting(group: argparse._ArgumentGroup, field: dataclasses.Field[Any]) -> None:
    flag, rule = "--" + field.name.replace("_", "-"), field.metadata["rule"]
    text = field.metadata["help"]
    if isinstance(field.default, bool):
        group.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)
        return
    if isinstance(field.default, int | float | str):
        text += f" (default: {field.default})"
    action = "append" if isinstance(field.default, tuple) else "store"
    group.add_argument(
        flag, action=action, metavar=rule.metavar, default=argparse.SUPPRESS, help=text
    )


def prepare(argv: Sequence[str]) -> Job:
    """Reads and checks the command line, the settings, the prompts and the output's place.

    Raises:
        UsageError: anything of it is wrong; nothing has been written.
    """
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0]
        near = nearest(name, sorted(parser._option_string_actions))
        raise UsageError(f"unknown argument {name!r} (nearest: {near})")
    config = args.config if argv else demo.CONFIG
    settings = {field.name for field in dataclasses.fields(RunConfig)}
    flags = {name: value for name, value in vars(args).items() if name in settings}
    run = read_run_config(run_config_file(config) if config is not None else None, flags)
    if args.prompts is not None:
        requests = read_requests(args.prompts)
    else:
        requests = requests_from_prompts(demo.PROMPTS if args.prompt is None else args.prompt)
    if args.json is not None:
        report.check_writable(args.json)
        if args.prompts is not None and args.json.resolve() == Path(args.prompts).resolve():
            raise UsageError(f"--json {str(args.json)!r} is the prompts file; name another file")
    is_demo = args.prompt is None and args.prompts is None
    return Job(args.model, model_dir(args.model), run, requests, args.json, is_demo)


def open_session(job: Job) -> Session:
    """Loads the model and its tokenizer. JAX is imported only here, after the cheap checks."""
    tokenizer = None
    if (job.directory / "tokenizer.json").exists():
        tokenizer = Tokenizer.load(job.directory)
    elif any(isinstance(request.prompt, str) for request in job.requests):
        raise UsageError(f"model {job.model!r} has no tokenizer.json; give prompts as token ids")
    import jax

    from jaxspec.checkpoint import load_checkpoint

    dtype = job.run.dtype or ("float32" if jax.default_backend() == "cpu" else None)
    params, cfg = load_checkpoint(job.directory, dtype=dtype)
    if tokenizer is not None and tokenizer.vocab_size > cfg.vocab_size:
        raise UsageError(
            f"model {job.model!r} has {cfg.vocab_size} token ids, its tokenizer.json "
            f"{tokenizer.vocab_size}; they do not belong together"
        )
    check_token_ids(job.requests, cfg.vocab_size)
    return Session(params, cfg, tokenizer)


def decode(
    session: Session,
    run: RunConfig,
    requests: list[Request],
    on_tokens: Callable[[Emission], None] | None = None,
) -> MethodRun:
    """Runs one method over all requests. Raises `Interrupted` on Ctrl-C and SIGTERM."""
    from jaxspec.engine import Engine

    finished: dict[int, Completion] = {}

    def collect(emission: Emission) -> None:
        if emission.completion is not None:
            finished[emission.index] = emission.completion
        if on_tokens is not None:
            on_tokens(emission)

    engine = Engine(session.params, session.cfg, run, tokenizer=session.tokenizer)
    try:
        completions = engine.generate(requests, on_tokens=collect)
    except KeyboardInterrupt as interrupt:
        done = tuple(finished[index] for index in sorted(finished))
        so_far = MethodRun(run.method, engine.statistics, done)
        raise Interrupted(so_far, exit_status(interrupt)) from None
    return MethodRun(run.method, engine.statistics, tuple(completions))


def execute(job: Job, session: Session, console: Console) -> int:
    """Does the job and writes the JSON file last; returns the exit status."""
    runs: list[MethodRun] = []
    divergences: list[report.Divergence] | None = None
    status = 0
    try:
        if job.demo or not job.run.compare:
            streamed = _stream(job, session, console)
            if not job.run.compare:
                runs.append(streamed)
        if job.run.compare:
            for method in ("none", "linear", "tree"):
                print(f"comparing: {method} (compiled first, then timed)", file=sys.stderr)
                run = dataclasses.replace(job.run, method=method)
                runs.append(decode(session, run, job.requests))
            divergences = _compare(job, runs, console)
            status = int(any(not each.excused for each in divergences))
    except Interrupted as interrupt:
        runs.append(interrupt.run)
        print("interrupted", file=sys.stderr)
        status = interrupt.status
    if job.json is not None:
        try:
            report.write_json(job.json, report.to_json(job.model, job.run, runs, divergences))
        except OSError as error:
            print(
                f"jaxspec.run: {job.json} was not written: {error.strerror or error}",
                file=sys.stderr,
            )
            return 1
    return status


def _stream(job: Job, session: Session, console: Console) -> MethodRun:
    marks: Marks = "plain" if job.demo else "none"
    if console.is_terminal and console.color_system is not None:
        marks = "style"
    headings = [_heading(request, job) for request in job.requests]
    legend = demo.legend(marks) if job.demo else None
    printer = StreamPrinter(console, session.tokenizer, headings, marks=marks, legend=legend)
    run = decode(session, job.run, job.requests, printer)
    print(report.summary(run), file=sys.stderr)
    return run


def _heading(request: Request, job: Job) -> str:
    if job.demo:
        return str(request.prompt)
    return f"== {request.id} ==" if len(job.requests) > 1 else ""


def _compare(job: Job, runs: list[MethodRun], console: Console) -> list[report.Divergence]:
    plain, *others = runs
    divergences = [each for other in others for each in report.find_divergences(plain, other)]
    console.print(report.comparison_table(job.run, runs, divergences))
    for divergence in divergences:
        console.print(report.describe(divergence), soft_wrap=True)
    return divergences


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit status."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a narrow encoding must not end a run

    def body() -> int:
        job = prepare(sys.argv[1:] if argv is None else argv)
        return execute(job, open_session(job), Console(highlight=False, markup=False))

    return conclude("jaxspec.run", body)


if __name__ == "__main__":
    sys.exit(main())
