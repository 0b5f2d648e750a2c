"""Figures as the scripts print them, and what they were asked for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; the first column is to the left."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a command as its JSON file keeps them."""
    return {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
