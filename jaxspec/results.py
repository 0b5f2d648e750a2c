"""What the engine gives back: completions, the tokens of one step as they come, and counts."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to one request.

    `token_ids` includes the end token, `text` does not; `text` is `None` without a tokenizer.
    `margins`, if recorded, holds for each token the smallest gap that its choice rests on: between
    the two best of log p + g, or at an index or top-p boundary.
    """

    id: str | int
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: Literal["stop", "length"]
    margins: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Emission:
    """Tokens that one step gave to one request: first `drafted` accepted drafts, then the bonus.

    `index` is the request's place in the input. `completion` is set on the last emission of a
    request, which may hold no tokens.
    """

    index: int
    token_ids: tuple[int, ...]
    drafted: int
    completion: Completion | None = None


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Counts and seconds of one run, compilation left out; one row in one step is a row-step.

    `rows` is the number of requests begun: prefill gives each of them its first token, which is in
    `tokens` but in no step. `reached[d]` counts the row-steps whose accepted path had more than d
    drafts. Seconds of the three phases are `None` where they were not measured.
    """

    rows: int
    tokens: int
    steps: int
    reached: tuple[int, ...]
    seconds: float
    draft_s: float | None = None
    verify_s: float | None = None
    commit_s: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second, or `None` if no time was measured."""
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def accepted_length(self) -> float | None:
        """Tokens a row-step, the bonus included: 41 tokens of 1 row in 10 steps make 4.0."""
        return (self.tokens - self.rows) / self.steps if self.steps else None

    @property
    def per_depth(self) -> tuple[float, ...]:
        """P(depth d+1 accepted | depth d accepted), up to the depth that was last tried."""
        tried = (self.steps, *self.reached)
        return tuple(hit / of for hit, of in zip(self.reached, tried, strict=False) if of)


@dataclasses.dataclass(frozen=True)
class MethodRun:
    """One method over all requests; `completions` in input order, those that finished."""

    method: str
    statistics: Statistics
    completions: tuple[Completion, ...]
