"""What a block attends to: the committed keys and its own."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import Array

FP8_GROUP = 64
"""Values that share one scale (V4 report: raw rows and entries, blocks of 64)."""


class Fp8Entries(NamedTuple):
    """Compressed entries as the release rounds them: FP8 but for the rotary part.

    The last group of a row may be smaller. `forms.quantise` makes it, `forms.dequantise` says
    what it means.
    """

    values: Array  # [B, C, K - r] float8_e4m3fn
    scale: Array  # [B, C, ceil((K - r) / FP8_GROUP)] uint8: exponent of two plus 127 (E8M0)
    rotary: Array  # [B, C, r] bfloat16


class Fp8Bytes(NamedTuple):
    """FP8 entries with all that belongs to a row in one row of bytes, for TPUs.

    Three arrays would be padded to 128 lanes each. A row is the values, the low bytes of the rotary
    dims, then a tail of min(K, 128) bytes: the scales at its start, the high bytes of the rotary
    dims at its end, so that these stand in the lanes of the low ones. `forms.to_bytes` makes it.
    """

    rows: Array  # [B, C, K + min(K, 128)] uint8
    rotary: int  # r, static


class Bf16Words(NamedTuple):
    """Entries in bfloat16, two dims a word, for TPUs.

    A row of 32-bit words can be fetched alone there; two rows of 16 bits share their words.
    `forms.to_words` makes it.
    """

    words: Array  # [B, C, K / 2] uint32: dim i in the low half, dim K / 2 + i in the high half


Entries = Array | Fp8Entries | Fp8Bytes | Bf16Words
"""Compressed entries `[B, C, K]` in one of their forms."""


class Committed(NamedTuple):
    """Committed keys (K = V): the raw ring and, on compressed layers, the entries."""

    ring: Array  # [B, W, K]: position p in slot p mod W
    length: Array  # [B] int32
    entries: Any = None  # Entries, or None
    selected: Any = None  # [B, N, ceil(C / 32)] uint32; None: every committed entry
    ratio: int = 0
    topk: int = 0  # with `selected`: a node selects at most so many; 0: no such bound is known


class Own(NamedTuple):
    """The block's own keys (K = V), each visible to whoever has its bit.

    `row_bits` is None for a chain: every row sees the rows up to itself.
    """

    rows: Array  # [B, M, K]
    row_position: Array  # [B, M] int32
    row_bits: Any  # [B, N, ceil(M / 32)] uint32: ancestors and the node itself
    entries: Any = None  # [B, J, K], or None
    entry_bits: Any = None  # [B, N, ceil(J / 32)] uint32


def capacity_of(committed: Committed) -> int:
    """Places for committed entries, C."""
    leaves = jax.tree.leaves(committed.entries)
    return leaves[0].shape[1] if leaves else 0
