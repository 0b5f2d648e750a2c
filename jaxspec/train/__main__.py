"""`python -m jaxspec.train`: trains a small model on folders of JSON lines."""

from __future__ import annotations

from jaxspec.signals import leave_quietly

if __name__ == "__main__":  # before the rest, which takes a while
    leave_quietly()

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from jaxspec.checkpoint import load_checkpoint
from jaxspec.command import Parser, conclude
from jaxspec.config import read_model_toml
from jaxspec.errors import UsageError
from jaxspec.resources import packaged_config
from jaxspec.train.loop import Run
from jaxspec.train.recipe import read_recipe


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(
        prog="python -m jaxspec.train",
        description="Train a small DeepSeek-V4 model. A run that was killed goes on from its last "
        "saved state when it is started again with the same --out.",
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of SET/{train,dev}*.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--config", type=Path, help="recipe in TOML (default: the embedded one)")
    parser.add_argument("--steps", type=int, help="steps in all, instead of the recipe's")
    parser.add_argument("--seed", type=int, help="seed, instead of the recipe's")
    parser.add_argument("--weights", help="model to start from: a directory or an embedded name")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status."""

    def body() -> int:
        train(build_parser().parse_args(argv))
        return 0

    told = "interrupted; the same command goes on from the last save"
    return conclude("jaxspec.train", body, told)


def train(args: argparse.Namespace) -> None:
    """Does what the command line asks for."""
    recipe = read_recipe(
        args.config or packaged_config("train/nano.toml"), steps=args.steps, seed=args.seed
    )
    cfg = read_model_toml(packaged_config(f"model/{recipe.model}.toml"))
    weights = load_checkpoint(args.weights, dtype="float32")[0] if args.weights else None
    run = Run(cfg, recipe, args.data, args.out)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{args.out} cannot be a run's folder: {error.strerror}") from None
    run.train(weights, Console(stderr=True))


if __name__ == "__main__":
    sys.exit(main())
