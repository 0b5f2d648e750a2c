"""The compressor: one cache entry per `ratio` tokens, a gated mean per channel (report 2.3).

The oracle keeps the projected rows themselves and pools them when a window is complete. It does
so on purpose: the engine keeps running softmax sums, so the two can only agree if both are right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .basic import Array, Tensors, rms_norm, rotate, softmax
from .config import CSA_RATIO


@dataclass(frozen=True)
class CompressorState:
    """Rows that later entries still need, and the entries that are complete."""

    values: Array
    """[<= 2 R, P K] with overlap (P = 2), [< R, K] without (P = 1)."""
    gates: Array
    """Like `values`; position bias included."""
    entries: Array
    """[C, K] after norm and rotary position."""


@dataclass(frozen=True)
class Compressor:
    """A layer's main compressor, or its indexer's.

    With overlap, a row has two halves: the first is for the window after the token's own, the
    second for the token's own.
    """

    weights: Tensors
    ratio: int
    frequencies: Array
    eps: float

    @property
    def overlap(self) -> bool:
        return self.ratio == CSA_RATIO

    @property
    def dims(self) -> int:
        """Width K of an entry."""
        return len(self.weights["norm.weight"])

    def start(self) -> CompressorState:
        rows = np.zeros((0, self.weights["ape"].shape[1]))
        return CompressorState(values=rows, gates=rows, entries=np.zeros((0, self.dims)))

    def step(self, state: CompressorState, x: Array, position: int) -> CompressorState:
        """Take in the token x [E] at `position`; the last token of a window adds an entry."""
        value = self.weights["wkv.weight"] @ x
        gate = self.weights["wgate.weight"] @ x + self.weights["ape"][position % self.ratio]
        values = np.vstack([state.values, value])
        gates = np.vstack([state.gates, gate])
        if (position + 1) % self.ratio != 0:
            return replace(state, values=values, gates=gates)

        first_own = position + 1 - self.ratio
        entry = pool(values, gates, self.ratio)
        entry = rms_norm(entry, self.eps, self.weights["norm.weight"])
        entry = rotate(entry, first_own * self.frequencies)
        drop = len(values) - (self.ratio if self.overlap else 0)
        return CompressorState(values[drop:], gates[drop:], np.vstack([state.entries, entry]))


def pool(values: Array, gates: Array, ratio: int) -> Array:
    """Mean of a window's rows, weighted per channel by the softmax of the gates over rows.

    Args:
      values: the window's R rows, with overlap after the R rows of the window before, if any.
      gates: like `values`.
      ratio: R.

    Returns:
      [K], half the width of a row with overlap.
    """
    if ratio == CSA_RATIO:
        values, gates = _halves(values, ratio), _halves(gates, ratio)
    return np.sum(softmax(gates, axis=0) * values, axis=0)


def _halves(rows: Array, ratio: int) -> Array:
    """First halves of the previous window's rows, then second halves of the window's own."""
    dims = rows.shape[1] // 2
    return np.vstack([rows[:-ratio, :dims], rows[-ratio:, dims:]])
