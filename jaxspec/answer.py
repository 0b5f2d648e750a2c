"""A request while it is decoded: its prompt, the tokens so far, and where they end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from jaxspec.results import Completion, Emission, Statistics
from jaxspec.text import StopScan, Tokenizer


class News(NamedTuple):
    """Tokens that the device has emitted for one request since the last look."""

    token: Sequence[int]
    rank: Sequence[int]  # 0: not drafted; see `state.Emitted`
    offered: Sequence[int]
    margin: Sequence[float] | None
    is_done: bool


@dataclasses.dataclass
class Answer:
    """One request's tokens, step by step, until an end token, a stop string or the limit.

    `drafted` counts for every step the accepted drafts among its tokens; prefill, which gives the
    first token, is no step. `completion` is set at the end.
    """

    index: int
    id: str | int
    prompt: tuple[int, ...]
    limit: int
    seed: int
    eos: int
    tokenizer: Tokenizer | None
    scan: StopScan | None
    tokens: list[int] = dataclasses.field(default_factory=list)
    ranks: list[int] = dataclasses.field(default_factory=list)
    offered: list[int] = dataclasses.field(default_factory=list)
    margins: list[float] = dataclasses.field(default_factory=list)
    drafted: list[int] = dataclasses.field(default_factory=list)
    completion: Completion | None = None

    def take(self, news: News) -> list[Emission]:
        """Adds what is new, up to a stop string; returns it step by step."""
        emissions: list[Emission] = []
        step: list[int] = []
        drafts = 0
        before_stop = None
        for place, token in enumerate(news.token):
            is_drafted = news.rank[place] > 0
            is_first = not self.tokens
            self.tokens.append(token)
            self.ranks.append(news.rank[place])
            self.offered.append(news.offered[place])
            if news.margin is not None:
                self.margins.append(news.margin[place])
            step.append(token)
            drafts += is_drafted
            before_stop = self.scan.push(token) if self.scan is not None else None
            is_last = before_stop is not None or place == len(news.token) - 1
            if is_last or not is_drafted:
                emissions.append(Emission(self.index, tuple(step), drafts))
                if not is_first:
                    self.drafted.append(drafts)
                step, drafts = [], 0
            if is_last:
                break
        if before_stop is not None or news.is_done:
            self.completion = self._complete(before_stop)
            last = emissions.pop() if emissions else Emission(self.index, (), 0)
            emissions.append(dataclasses.replace(last, completion=self.completion))
        return emissions

    def _complete(self, before_stop: str | None) -> Completion:
        text = before_stop
        if text is None and self.tokenizer is not None:
            text = self.tokenizer.decode(self.tokens)
        is_stopped = before_stop is not None or self.tokens[-1] == self.eos
        reason: Literal["stop", "length"] = "stop" if is_stopped else "length"
        margins = tuple(self.margins) if self.margins else None
        return Completion(self.id, tuple(self.tokens), text, reason, margins)


def tally(answers: Iterable[Answer], depth: int, seconds: float) -> Statistics:
    """Counts of the answers that have begun; `depth` is the largest of the drafter's trees."""
    begun = [answer for answer in answers if answer.tokens]
    steps = [drafted for answer in begun for drafted in answer.drafted]
    return Statistics(
        rows=len(begun),
        tokens=sum(len(answer.tokens) for answer in begun),
        steps=len(steps),
        reached=tuple(sum(drafted > level for drafted in steps) for level in range(depth)),
        seconds=seconds,
    )


class RankCount(NamedTuple):
    """How a draft's r-th best children fared, for one r."""

    offered: int  # accepted nodes that had at least r children
    accepted: int  # of these, nodes whose r-th best child was the target's own choice


def acceptance_by_rank(answers: Iterable[Answer]) -> tuple[RankCount, ...]:
    """Counts for rank 1, 2, ... up to the largest that was offered.

    Every accepted node of every step counts once, the root among them, as far as the token after it
    was emitted: what an end or a limit cut off counts for no rank.
    """
    places = [pair for answer in answers for pair in zip(answer.ranks, answer.offered, strict=True)]
    most = max((offered for _, offered in places), default=0)
    return tuple(
        RankCount(
            offered=sum(offered >= rank for _, offered in places),
            accepted=sum(found == rank for found, _ in places),
        )
        for rank in range(1, most + 1)
    )
