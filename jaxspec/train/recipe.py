"""A training recipe: every choice of a run, read from TOML."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from jaxspec.errors import UsageError


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
        for name in ("sequence", "batch", "micro", "steps", "draft_depths", "draft_anchors"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.sequence <= self.draft_depths + self.draft_anchors:
            raise UsageError("sequence must exceed draft_anchors + draft_depths")
        if self.batch % self.micro:
            raise UsageError(f"micro is {self.micro}; it must divide batch, {self.batch}")
        if not 0 <= self.decay <= 1:
            raise UsageError(f"decay is {self.decay}; it must be a part of the steps, 0 to 1")


def read_recipe(path: Path, **changes: Any) -> Recipe:
    """Reads a recipe; `changes` that are not None replace its values.

    Raises:
        UsageError: the file cannot be read, lacks a key or has an unknown one.
    """
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as TOML: {error}") from None
    names = {field.name for field in dataclasses.fields(Recipe)}
    if unknown := sorted(raw.keys() - names):
        raise UsageError(f"{path} has unknown keys {', '.join(unknown)}")
    raw |= {name: value for name, value in changes.items() if value is not None}
    if missing := sorted(names - raw.keys()):
        raise UsageError(f"{path} lacks {', '.join(missing)}")
    raw["repeat"] = tuple(sorted(raw["repeat"].items()))
    return Recipe(**raw)
