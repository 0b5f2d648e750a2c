"""The static sizes of a run: what its compilations depend on, chosen from its requests."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxspec.answer import Answer
from jaxspec.settings import RunConfig

CHUNKS = (32, 64, 128, 256, 512)
"""Sizes of a prefill's forward; a run compiles one, the cheapest for its prompts."""

CHUNK_COST = 32
"""What a forward costs beside its tokens, in tokens: it weighs many forwards against padding."""

ROUND = 64
"""Capacities are multiples of this, so that similar runs share their compilations."""


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What the compilations of a run depend on beside the model and the drafter."""

    batch: int
    max_len: int
    max_new: int
    chunk: int


def plan(answers: Sequence[Answer], run: RunConfig) -> Shapes:
    """The shapes that these answers need."""
    needed = max(len(answer.prompt) + answer.limit - 1 for answer in answers)

    def cost(chunk: int) -> int:
        forwards = sum(-(-len(answer.prompt) // chunk) for answer in answers)
        return forwards * (chunk + CHUNK_COST)

    return Shapes(
        batch=min(run.batch_size, len(answers)),
        max_len=run.max_len or round_up(needed, ROUND),
        max_new=round_up(max(answer.limit for answer in answers), ROUND),
        chunk=min(CHUNKS, key=cost),
    )


def round_up(number: int, step: int) -> int:
    """The next multiple of `step`."""
    return -(-number // step) * step
