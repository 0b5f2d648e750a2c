"""Check reduced precision. From the repository's root: `python -m scripts.teacher_forced`.

Decodes prompts in bfloat16 by each method, then has the target read every completion in one pass
(teacher-forced) and looks at each emitted token: is it the choice that the target makes there, and
if not, how far below it? In bfloat16 a step of one token, a tree and a whole pass round
differently, so near-ties may fall either way; a wrong state moves tokens much further. Status 1 if
a method has more of them, or a wider gap, than the stated floors.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxspec import __version__, demo, report
from jaxspec.answer import Answer
from jaxspec.command import Parser, conclude
from jaxspec.errors import UsageError
from jaxspec.requests import Request, read_requests, requests_from_prompts
from jaxspec.resources import EMBEDDED_MODEL, model_dir
from jaxspec.settings import RunConfig
from jaxspec.text import Tokenizer
from scripts.figures import asked, markdown

METHODS = ("none", "linear", "tree")
MAX_RATE, MAX_GAP = 0.02, 0.1
"""Floors; the embedded model's own figures are in the README."""

CONVENTION = (
    "A token diverges if the one-pass target would choose another; its gap is the difference of "
    "the two scores (log p, divided by the temperature and with the position's noise if sampled)."
)
PAD = 64
"""Passes are padded to a multiple of this, so that few are compiled."""


class Forced(NamedTuple):
    """One completion under the target's eyes: `gap [tokens]`, 0 where it is the target's choice."""

    id: str | int
    gap: np.ndarray


class Figures(NamedTuple):
    """Of one method."""

    method: str
    tokens: int
    diverging: int
    rate: float
    worst: float
    mean: float
    """Mean gap of the tokens that diverge."""


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="python -m scripts.teacher_forced", description=__doc__)
    parser.add_argument("--model", default=EMBEDDED_MODEL, metavar="nano|DIR")
    parser.add_argument("--prompts", metavar="FILE.jsonl", help="default: the demonstration's")
    parser.add_argument("--count", type=int, metavar="N", help="of the first prompts of the file")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=METHODS)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--budget", type=int, default=8, metavar="D")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--max-rate", type=float, default=MAX_RATE, metavar="X", help="the most that passes"
    )
    parser.add_argument(
        "--max-gap", type=float, default=MAX_GAP, metavar="X", help="the most that passes"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    return parser


def force(params: Any, cfg: Any, run: RunConfig, answers: Sequence[Answer]) -> list[Forced]:
    """Has the target read prompt and completion of each answer in one pass, and measures gaps."""
    found: list[Forced] = []
    longest = max(len(each.prompt) + len(each.tokens) for each in answers)
    length, most = longest + -longest % PAD, max(len(each.tokens) for each in answers)
    for start in range(0, len(answers), run.batch_size):
        batch = [*answers[start : start + run.batch_size]]
        filled = batch + [batch[0]] * (run.batch_size - len(batch))  # one shape for all passes
        gaps = measure_gaps(params, cfg, run, filled, (length, most))
        for answer, gap in zip(batch, gaps, strict=False):
            found.append(Forced(answer.id, gap[: len(answer.tokens)]))
    return found


def measure_gaps(
    params: Any, cfg: Any, run: RunConfig, answers: Sequence[Answer], size: tuple[int, int]
) -> np.ndarray:
    """How far each emitted token is below the target's choice, `[B, M]`, of `size` (T, M)."""
    import jax.numpy as jnp

    from jaxspec import Sampling, score
    from jaxspec.sample import perturb

    length, most = size
    token = np.zeros((len(answers), length), np.int32)
    emitted = np.zeros((len(answers), most), np.int32)
    for row, answer in enumerate(answers):
        whole = [*answer.prompt, *answer.tokens]
        token[row, : len(whole)] = whole
        emitted[row, : len(answer.tokens)] = answer.tokens
    prompt = np.array([[len(answer.prompt)] for answer in answers], np.int32)
    position = np.minimum(prompt + np.arange(most, dtype=np.int32), length - 1)
    # Causal: what a row is padded with at its end no row before it sees.
    logits = score(params, cfg, token, impl=run.impl)
    logits = jnp.take_along_axis(logits, jnp.asarray(position - 1)[..., None], axis=1)
    sampling = Sampling.create(len(answers), temperature=run.temperature)
    seed = jnp.asarray([answer.seed for answer in answers], jnp.uint32)
    scores = perturb(logits, sampling, seed, jnp.asarray(position))
    own = jnp.take_along_axis(scores, jnp.asarray(emitted)[..., None], axis=-1)[..., 0]
    return np.asarray(scores.max(-1) - own)


def summarise(method: str, forced: Sequence[Forced]) -> Figures:
    """Rate and gaps over all tokens of a method."""
    gap = np.concatenate([each.gap for each in forced])
    apart = gap[gap > 0]
    return Figures(
        method=method,
        tokens=len(gap),
        diverging=len(apart),
        rate=len(apart) / len(gap),
        worst=float(apart.max(initial=0.0)),
        mean=float(apart.mean()) if len(apart) else 0.0,
    )


def table(figures: Sequence[Figures]) -> str:
    """Markdown."""
    lines = [
        [each.method, str(each.tokens), str(each.diverging)]
        + [f"{number:.4f}" for number in (each.rate, each.worst, each.mean)]
        for each in figures
    ]
    header = ["method", "tokens", "diverging", "rate", "worst gap", "mean gap of those"]
    return markdown(header, lines)


def check_floors(figures: Sequence[Figures], max_rate: float, max_gap: float) -> list[str]:
    """A line for each floor that a method is above."""
    said = []
    for each in figures:
        if not each.rate <= max_rate:
            said.append(f"{each.method}: rate {each.rate:.4f} is above the floor of {max_rate:g}")
        if not each.worst <= max_gap:
            said.append(f"{each.method}: gap {each.worst:.4f} is above the floor of {max_gap:g}")
    return said


def read_prompts(args: argparse.Namespace) -> list[Request]:
    """The file's first prompts, or the demonstration's."""
    if args.count is not None and args.count < 1:
        raise UsageError(f"count must be at least 1, not {args.count}")
    if args.prompts is None:
        return requests_from_prompts(demo.PROMPTS)[: args.count]
    return read_requests(args.prompts)[: args.count]


def measure(args: argparse.Namespace) -> int:
    """Does all that was asked; returns the exit status."""
    shared = RunConfig(
        batch_size=args.batch_size,
        budget=args.budget,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        dtype=args.dtype,
    )
    if not (args.max_rate >= 0 and args.max_gap >= 0):
        raise UsageError("max-rate and max-gap must be numbers >= 0")
    requests = read_prompts(args)
    if args.out is not None:
        report.check_writable(args.out)
    directory = model_dir(args.model)
    tokenizer = Tokenizer.load(directory)
    import jax

    from jaxspec.checkpoint import load_checkpoint
    from jaxspec.engine import Engine

    params, cfg = load_checkpoint(directory, dtype=args.dtype)
    figures, details = [], {}
    for method in dict.fromkeys(args.methods):
        run = dataclasses.replace(shared, method=method)
        print(f"decoding: {method}", file=sys.stderr)
        engine = Engine(params, cfg, run, tokenizer=tokenizer)
        engine.generate(requests)
        forced = force(params, cfg, run, engine.answers)
        figures.append(summarise(method, forced))
        details[method] = [
            {"id": each.id, "place": int(place), "gap": float(each.gap[place])}
            for each in forced
            for place in np.flatnonzero(each.gap > 0)
        ]
    above = check_floors(figures, args.max_rate, args.max_gap)
    print(f"{CONVENTION}\n\n{table(figures)}\n")
    print("\n".join(above) or f"Within the floors: rate {args.max_rate:g}, gap {args.max_gap:g}.")
    if args.out is not None:
        value = {
            "convention": CONVENTION,
            "config": asked(args),
            "versions": {"jaxspec": __version__, "jax": jax.__version__},
            "results": [each._asdict() for each in figures],
            "diverging": details,
        }
        report.write_json(args.out, value)
    return int(bool(above))


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit status."""
    return conclude("scripts.teacher_forced", lambda: measure(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
