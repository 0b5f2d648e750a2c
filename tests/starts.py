"""Sequences that stand at every position where a window, a ring or a pool could go wrong."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxspec.cache import Cache
from tests.serial import Model, decode_until

POSITIONS = (*range(41), *range(126, 131), *range(254, 259))
"""Around every edge of windows of 4 and 8, of a window of 128 and of two of them."""

MAX_LEN = 320


class Started(NamedTuple):
    """A batch with one sequence per start position."""

    tokens: np.ndarray
    """[B, T] of which row b has taken in the first `length[b]`."""
    length: np.ndarray
    """[B]"""
    cache: Cache
    """Serially decoded: the common past of serial decoding and of whatever is compared to it."""

    def __repr__(self) -> str:
        return f"<{len(self.length)} sequences>"  # short in the report of a failure


def start_at(model: Model, positions: Iterable[int]) -> Started:
    """Decodes random tokens up to each of `positions`."""
    length = np.array([*positions], np.int32)
    size = (len(length), int(length.max()))
    tokens = np.random.default_rng(0).integers(model.cfg.vocab_size, size=size, dtype=np.int32)
    return Started(tokens, length, decode_until(model, tokens, length, MAX_LEN))
