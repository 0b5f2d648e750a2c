"""What a block attends to: the committed keys and its own."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

FP8_GROUP = 64
"""Values that share one scale (V4 report: raw rows and entries, blocks of 64)."""


class Fp8Entries(NamedTuple):
    """Compressed entries as the release rounds them: FP8 but for the rotary part.

    The last group of a row may be smaller. `ref.quantise` makes it, `ref.dequantise` says what it
    means.
    """

    values: Array  # [B, C, K - r] float8_e4m3fn
    scale: Array  # [B, C, ceil((K - r) / FP8_GROUP)] uint8: exponent of two plus 127 (E8M0)
    rotary: Array  # [B, C, r] bfloat16


class Committed(NamedTuple):
    """Committed keys (K = V): the raw ring and, on compressed layers, the entries."""

    ring: Array  # [B, W, K]: position p in slot p mod W
    length: Array  # [B] int32
    entries: Any = None  # [B, C, K], Fp8Entries, or None
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
