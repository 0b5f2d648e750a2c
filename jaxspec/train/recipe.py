"""A training recipe: every choice of a run, read from TOML."""

from __future__ import annotations

import dataclasses
import reprlib
import tomllib
from pathlib import Path
from typing import Any

from jaxspec.errors import UsageError
from jaxspec.limits import FLOAT32_MAX, UINT32_MAX


@dataclasses.dataclass(frozen=True)
class Recipe:
    """See `configs/train/nano.toml` for what each field means; none has a default."""

    model: str
    tokenizer: str
    seed: int
    sequence: int
    batch: int
    micro: int
    steps: int
    warmup: int
    decay: float
    floor: float
    muon_rate: float
    adam_rate: float
    weight_decay: float
    clip: float
    bias_rate: float
    draft_depths: int
    draft_anchors: int
    draft_weight: float
    soft_labels: float
    index_weight: float
    repeat: tuple[tuple[str, int], ...]  # passes over each data set in an epoch
    evaluate_every: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        if not 0 <= self.seed <= UINT32_MAX:
            raise UsageError(f"seed is {self.seed}; it must be from 0 to {UINT32_MAX}")
        for name in ("sequence", "batch", "micro", "steps", "draft_depths", "draft_anchors"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sequence <= self.draft_depths + self.draft_anchors:
            raise UsageError("sequence must exceed draft_anchors + draft_depths")
        if self.batch % self.micro:
            raise UsageError(f"micro is {self.micro}; it must divide batch, {self.batch}")
        if not 0 <= self.decay <= 1:
            raise UsageError(f"decay is {self.decay}; it must be a part of the steps, 0 to 1")


MOST_PASSES = 1000


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    """Raises `UsageError` if a value is not of its field's type."""
    if field.name == "repeat":
        fits = all(type(times) is int and 0 <= times <= MOST_PASSES for _, times in value)
        wanted = f"a table of data sets with passes over each, integers from 0 to {MOST_PASSES}"
    elif field.type == "str":
        fits, wanted = isinstance(value, str), "text"
    else:
        kinds = (int,) if field.type == "int" else (int, float)
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        fits = fits and abs(value) <= FLOAT32_MAX  # false for NaN
        wanted = "an integer" if field.type == "int" else "a finite number"
    if not fits:
        raise UsageError(f"{field.name} must be {wanted}, not {reprlib.repr(value)}")


def read_recipe(path: Path, **changes: Any) -> Recipe:
    """Reads a recipe; `changes` that are not None replace its values.

    Raises:
        UsageError: the file cannot be read, lacks a key or has an unknown one.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from None
    names = {field.name for field in dataclasses.fields(Recipe)}
    if unknown := sorted(raw.keys() - names):
        raise UsageError(f"{path} has unknown keys {', '.join(unknown)}")
    raw |= {name: value for name, value in changes.items() if value is not None}
    if missing := sorted(names - raw.keys()):
        raise UsageError(f"{path} lacks {', '.join(missing)}")
    if not isinstance(raw["repeat"], dict):
        raise UsageError(f"{path}: repeat must be a table of data sets, such as gsm8k = 2")
    raw["repeat"] = tuple(sorted(raw["repeat"].items()))
    try:
        return Recipe(**raw)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
