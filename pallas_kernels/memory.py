"""Sizes of operands in memory."""

from __future__ import annotations

import math
from typing import Any

import jax


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, abstract ones too; None has none."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def row_nbytes(tree: Any) -> int:
    """Bytes of one row, the last axis, of every array of a tree."""
    return sum(x.shape[-1] * x.dtype.itemsize for x in jax.tree.leaves(tree))
