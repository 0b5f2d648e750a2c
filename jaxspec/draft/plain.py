"""Plain decoding as a drafter: a tree of the root alone."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxspec.draft import Drafter, Score
from jaxspec.tree import NO_PARENT, DraftTree


def _propose(
    params: Any, state: None, root: Array, length: Array, *, live: Array, score: Score
) -> DraftTree:
    column = root[:, None]
    return DraftTree(
        token=column,
        parent=jnp.full_like(column, NO_PARENT),
        score=jnp.zeros(column.shape, jnp.float32),
        live=live[:, None],
    )


PLAIN = Drafter(
    init=lambda batch, max_len, dtype: None,
    propose=_propose,
    observe=lambda params, state, block, features, result: state,
    depth=0,
    features="none",
)
"""Proposes nothing: the target's own token is all that a step emits."""
