"""What the engine is asked: prompts from the command line or from JSONL, checked as they are read.

A prompts file has one JSON object a line. `prompt` (text, or token ids that are used as they are)
is required; `id`, `history`, `max_new_tokens` and `seed` are optional; other keys are ignored, so
that the file of a data set works as it is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
import reprlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxspec.errors import UsageError
from jaxspec.limits import UINT32_MAX

ROLES = ("system", "user", "assistant")


@dataclasses.dataclass(frozen=True)
class Turn:
    """One earlier message of a conversation; `role` is one of `ROLES`."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt: text that gets the chat form, or token ids that are used as they are.

    `max_new_tokens` and `seed` override the run's; `None` leaves them to it.
    """

    id: str | int
    prompt: str | tuple[int, ...]
    history: tuple[Turn, ...] = ()
    max_new_tokens: int | None = None
    seed: int | None = None

    def resolve_seed(self, run_seed: int) -> int:
        """The request's own seed, else one made of the run's seed and the id; 0 to 2**32 - 1.

        The slot that a request is decoded in has no part in it, nor has the order of requests.
        """
        if self.seed is not None:
            return self.seed
        digest = hashlib.blake2b(f"{run_seed}:{self.id}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little")


def requests_from_prompts(prompts: Sequence[str]) -> list[Request]:
    """Requests of prompts given one by one; their ids are 1, 2, 3.

    Raises:
        UsageError: a prompt is empty or is not valid text.
    """
    return [_request({"prompt": text}, i, f"prompt {i}") for i, text in enumerate(prompts, 1)]


def read_requests(source: str) -> list[Request]:
    """Reads a JSONL file of prompts, or standard input for `-`; blank lines are passed over.

    Raises:
        UsageError: the file cannot be read, holds no prompt, has a line that is wrong (its number
            is named) or an id twice. A line without an id has its number for an id.
    """
    name = "standard input" if source == "-" else source
    requests: list[Request] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(_read_lines(source, name), 1):
        if not line.strip():
            continue
        request = _parse_line(line, number, f"{name}, line {number}")
        first = line_of.setdefault(str(request.id), number)
        if first != number:
            raise UsageError(
                f"{name}, lines {first} and {number} have the same id {request.id!r}; each needs "
                "its own (a line without one has its number for an id)"
            )
        requests.append(request)
    if not requests:
        raise UsageError(
            f"{name} holds no prompt; one JSON object a line, with a prompt, is needed"
        )
    return requests


def with_integers(request: Request) -> Request:
    """The request with plain integers for token ids, limit and seed, whatever sequence held them.

    Raises:
        UsageError: one of them is no integer; it would be cut to one without a word.
    """

    def integer(value: Any, what: str) -> int:
        try:
            if not isinstance(value, bool):
                return operator.index(value)
        except TypeError:
            pass
        raise UsageError(
            f"prompt {request.id!r}: {what} must be an integer, not {reprlib.repr(value)}"
        )

    prompt, limit, seed = request.prompt, request.max_new_tokens, request.seed
    if not isinstance(prompt, str):
        prompt = tuple(integer(token, "each token id") for token in prompt)
    return dataclasses.replace(
        request,
        prompt=prompt,
        max_new_tokens=None if limit is None else integer(limit, "max_new_tokens"),
        seed=None if seed is None else integer(seed, "seed"),
    )


def check_token_ids(requests: Iterable[Request], vocab_size: int) -> None:
    """Raises `UsageError` if a prompt of token ids holds one that the vocabulary does not have."""
    for request in requests:
        if isinstance(request.prompt, tuple) and max(request.prompt) >= vocab_size:
            raise UsageError(
                f"prompt {request.id!r} holds token id {max(request.prompt)}; the vocabulary ends "
                f"at {vocab_size - 1}"
            )


def _read_lines(source: str, name: str) -> Iterator[bytes]:
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise UsageError(
            f"{name} cannot be read: {error.strerror}; give a JSONL file or - for standard input"
        ) from None
    yield from data.removeprefix(b"\xef\xbb\xbf").split(b"\n")


def _parse_line(line: bytes, number: int, where: str) -> Request:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise UsageError(f"{where} is not UTF-8; JSON text is needed") from None
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "it cannot be parsed"
        raise UsageError(
            f"{where} is not JSON ({reason}); one object a line, with a prompt, is needed"
        ) from None
    if not isinstance(row, dict):
        raise UsageError(f"{where} is {_kind(row)}; an object with a prompt is needed")
    if "prompt" not in row:
        keys = ", ".join(map(str, row)) or "none"
        raise UsageError(f"{where} has no prompt (its keys: {reprlib.repr(keys)[1:-1]})")
    return _request(row, number, where)


def _request(row: dict[str, Any], number: int, where: str) -> Request:
    prompt = row["prompt"]
    name = number if row.get("id") is None else row["id"]
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise UsageError(f"{where}: id must be text or an integer, not {_kind(name)}")
    _check_text(str(name), f"{where}: id")
    if isinstance(prompt, list):
        prompt = _token_ids(prompt, where)
        if row.get("history"):
            raise UsageError(f"{where}: history goes with a text prompt, not with token ids")
    elif not isinstance(prompt, str):
        raise UsageError(f"{where}: prompt must be text or token ids, not {_kind(prompt)}")
    elif not prompt.strip():
        raise UsageError(f"{where} is empty; a prompt needs text")
    else:
        _check_text(prompt, f"{where}: prompt")
    return Request(
        name,
        prompt,
        _history(row.get("history"), where),
        _optional_integer(row, "max_new_tokens", 1, None, where),
        _optional_integer(row, "seed", 0, UINT32_MAX, where),
    )


def _token_ids(ids: list[Any], where: str) -> tuple[int, ...]:
    if not ids:
        raise UsageError(f"{where} is empty; a prompt needs text or token ids")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise UsageError(
                f"{where}: prompt holds {reprlib.repr(token)}; token ids are integers >= 0"
            )
    return tuple(ids)


def _history(turns: Any, where: str) -> tuple[Turn, ...]:
    if turns is None:
        return ()
    form = "history must be a list of {role, content}"
    if not isinstance(turns, list):
        raise UsageError(f"{where}: {form}, not {_kind(turns)}")
    read: list[Turn] = []
    for place, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("content"), str):
            raise UsageError(f"{where}: {form}; item {place} is not, or its content is not text")
        if turn.get("role") not in ROLES:
            shown = reprlib.repr(turn.get("role"))
            raise UsageError(
                f"{where}: role of history item {place} must be {' or '.join(ROLES)}, not {shown}"
            )
        if turn["role"] == "system" and place > 1:
            raise UsageError(f"{where}: history item {place} is a system turn; it must come first")
        _check_text(turn["content"], f"{where}: history item {place}")
        read.append(Turn(turn["role"], turn["content"]))
    return tuple(read)


def _optional_integer(
    row: dict[str, Any], key: str, low: int, high: int | None, where: str
) -> int | None:
    value = row.get(key)
    if value is None:
        return None
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if not is_integer or value < low or (high is not None and value > high):
        bounds = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise UsageError(f"{where}: {key} must be {bounds}, not {reprlib.repr(value)}")
    return int(value)


def _check_text(text: str, what: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{what} is not valid text: it has half of a surrogate pair, "
            f"{text[error.start]!a}, at character {error.start}"
        ) from None


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", type(None): "null"}
    return kinds.get(type(value), "true or false" if isinstance(value, bool) else "a number")
