"""Training text: conversations from JSON lines, encoded and packed into equal sequences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import UsageError
from jaxspec.requests import Turn
from jaxspec.text import Tokenizer


def read_documents(path: Path, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Each line's conversation with its answer as token ids.

    A line is an object with `prompt`, `response` and optionally `history`, turns of `role` and
    `content`.
    """
    documents = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                documents.append(_encode(tokenizer, line, f"{path}:{number}"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    return documents


def _encode(tokenizer: Tokenizer, line: bytes, where: str) -> np.ndarray:
    try:
        item: dict[str, Any] = json.loads(line.decode("utf-8"))
        prompt, response = item["prompt"], item["response"]
        history = [Turn(turn["role"], turn["content"]) for turn in item.get("history", ())]
        ids = tokenizer.encode_chat(prompt, history) + tokenizer.encode(response)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(
            f"{where} must be a JSON object with prompt and response, both text in UTF-8"
        ) from None
    return np.array([*ids, tokenizer.special.eos], np.int32)


def read_sets(data: Path, split: str, tokenizer: Tokenizer) -> dict[str, list[np.ndarray]]:
    """Documents of every data set, `data/SET/SPLIT*.jsonl`.

    Raises:
        UsageError: there is none.
    """
    sets: dict[str, list[np.ndarray]] = {}
    for file in sorted(data.glob(f"*/{split}*.jsonl")):
        sets.setdefault(file.parent.name, []).extend(read_documents(file, tokenizer))
    if not sets:
        raise UsageError(f"{data} holds no SET/{split}*.jsonl; name the folder with the data sets")
    return sets


def pack(documents: Sequence[np.ndarray], sequence: int) -> np.ndarray:
    """Documents in order as rows of `sequence` tokens, `[rows, sequence]` int32.

    Every row starts with a document's start, as at inference, and its last document is cut at the
    row's end. A row that is not full at the end is left out.
    """
    rows, row, room = [], [], sequence
    for document in documents:
        row.append(document[:room])
        room -= len(row[-1])
        if room == 0:
            rows.append(np.concatenate(row))
            row, room = [], sequence
    return np.stack(rows) if rows else np.zeros((0, sequence), np.int32)


class Batches:
    """Batch number n of a run, the same whenever it is asked for: a resumed run goes on exactly.

    Each epoch holds every set as often as `repeat` says, in an order of its own.
    """

    def __init__(
        self,
        sets: Mapping[str, Sequence[np.ndarray]],
        repeat: Mapping[str, int],
        *,
        sequence: int,
        batch: int,
        seed: int,
    ) -> None:
        if unknown := sorted(repeat.keys() - sets.keys()):
            raise UsageError(f"repeat names the sets {', '.join(unknown)}, which the data lack")
        self._documents = [
            document for name, docs in sets.items() for document in [*docs] * repeat.get(name, 1)
        ]
        self._sequence, self._batch, self._seed = sequence, batch, seed
        self._epoch, self._rows = -1, np.zeros((0, sequence), np.int32)
        self._per_epoch = len(self._pack(0)) // batch
        if self._per_epoch == 0:
            raise UsageError(f"the data fill no batch of {batch} sequences of {sequence} tokens")

    def _pack(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._documents))
            self._rows = pack([self._documents[i] for i in order], self._sequence)
            self._epoch = epoch
        return self._rows

    def __getitem__(self, step: int) -> np.ndarray:
        """Batch `[batch, sequence]` int32. Epochs can differ by a row; the longer drops it."""
        epoch, index = divmod(step, self._per_epoch)
        rows = self._pack(epoch)
        start = min(index * self._batch, len(rows) - self._batch)
        return rows[start : start + self._batch]


def dev_batches(documents: Sequence[np.ndarray], sequence: int, batch: int) -> Iterator[np.ndarray]:
    """Documents one a row, cut and padded with -1 to `sequence`, whole batches only."""
    for start in range(0, len(documents) - batch + 1, batch):
        rows = np.full((batch, sequence), -1, np.int32)
        for row, document in zip(rows, documents[start : start + batch], strict=True):
            row[: len(document)] = document[:sequence]
        yield rows
