"""Completions printed as they come, in input order, with the accepted drafts marked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from rich.console import Console
from rich.text import Text

from jaxspec.results import Emission
from jaxspec.text import TextStream, Tokenizer

Marks = Literal["style", "plain", "none"]
DRAFT_STYLE = "green underline"
PLAIN_MARKS = ("‹", "›")


class StreamPrinter:
    """Prints each request's text as its tokens come; give it to the engine as `on_tokens`.

    The first request that has not finished is printed live, later ones wait for their turn. Marks:
    `style` colours and underlines accepted drafts, `plain` puts them in brackets, `none` leaves
    the bare text. Without a tokenizer the token ids are printed.
    """

    def __init__(
        self,
        console: Console,
        tokenizer: Tokenizer | None,
        headings: Sequence[str],
        *,
        marks: Marks,
        legend: Text | None = None,
    ) -> None:
        """`headings` has a line for each request, printed above its text unless it is empty.

        Nothing is printed before the first tokens come, so that a refusal leaves no output.
        """
        self._console = console
        self._headings = headings
        self._marks = marks
        self._streams = [_PieceStream(tokenizer) for _ in headings]
        self._waiting: list[list[tuple[str, bool]]] = [[] for _ in headings]
        self._finished = [False] * len(headings)
        self._legend = legend
        self._current = -1

    def __call__(self, emission: Emission) -> None:
        """Takes the tokens of one request's step."""
        pieces = self._waiting[emission.index]
        stream = self._streams[emission.index]
        for place, token in enumerate(emission.token_ids):
            pieces.append((stream.push(token), place < emission.drafted))
        if emission.completion is not None:
            pieces.append((stream.finish(), False))
            self._finished[emission.index] = True
        if self._current < 0:
            if self._legend is not None:
                self._console.print(self._legend, end="\n\n", soft_wrap=True)
            self._advance()
        while self._current < len(self._headings):
            self._flush()
            if not self._finished[self._current]:
                return
            self._console.file.write("\n\n" if len(self._headings) > 1 else "\n")
            self._console.file.flush()
            self._advance()

    def _advance(self) -> None:
        self._current += 1
        if self._current < len(self._headings) and (heading := self._headings[self._current]):
            self._console.print(Text(heading, "bold"), soft_wrap=True)

    def _flush(self) -> None:
        pieces = self._waiting[self._current]
        shown = [(text, drafted) for text, drafted in pieces if text]
        for drafted, group in itertools.groupby(shown, key=lambda piece: piece[1]):
            self._write("".join(text for text, _ in group), drafted)
        pieces.clear()
        self._console.file.flush()

    def _write(self, text: str, drafted: bool) -> None:
        if self._marks == "style":
            self._console.print(Text(text, DRAFT_STYLE if drafted else ""), end="", soft_wrap=True)
        elif self._marks == "plain" and drafted:
            self._console.file.write(f"{PLAIN_MARKS[0]}{text}{PLAIN_MARKS[1]}")
        else:
            self._console.file.write(text)


class _PieceStream:
    """`TextStream`, or the ids themselves where there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._stream = TextStream(tokenizer) if tokenizer is not None else None

    def push(self, token: int) -> str:
        return f"{token} " if self._stream is None else self._stream.push(token)

    def finish(self) -> str:
        return "" if self._stream is None else self._stream.finish()
