"""Top-k with the margin by which it was decided."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .basic import Array


class Selection(NamedTuple):
    """Outcome of a top-k."""

    ids: Array
    """[<= k] by falling score; among equals the lowest index first."""
    margin: float
    """Score gap between the last that is in and the first that is out; inf if none is out.
    Below the arithmetic's error, another set is as right as this one."""


def select(scores: Array, k: int) -> Selection:
    """The k best of `scores`, or all of them if there are fewer."""
    order = np.argsort(-scores, kind="stable")
    if len(order) <= k:
        return Selection(order, np.inf)
    return Selection(order[:k], float(scores[order[k - 1]] - scores[order[k]]))
