"""Drafters: what proposes the tree that the target verifies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from jax import Array

from jaxspec.tree import DraftTree

Score = Callable[[Array, Array], Array]
"""`score(logits [B, N, V], position [B, N]) -> [B, N, V]`: `sample.perturb` with everything but the
logits and the positions of the tokens that they predict already given."""


class Drafter(NamedTuple):
    """A way to propose trees, as pure functions over a state that only it looks into.

    Any drafter is lossless: what is emitted depends on the target's choices alone, and a bad tree
    only emits fewer tokens a step. A drafter is a static argument of the compiled step, so one is
    made once and used again.

    Attributes:
        init: `init(batch, max_len, dtype) -> state`: the state of `batch` sequences without a
            token, with room for `max_len` committed ones. The leaves have B in front.
        propose: `propose(params, state, root, length, *, live, score) -> DraftTree`: continuations
            of `root [B]`, the last emitted token, which stands at position `length [B]`, for the
            sequences that are `live [B]`; `score` is a `Score`. It changes neither the cache nor
            its own state: nothing that was only drafted outlives the step.
        observe: `observe(params, state, block, features, result) -> state`: takes in what the
            target has verified. `block` and `features` are what went into the forward and came out;
            `result`, a `VerifyResult`, says which nodes were committed and which token follows the
            last of them. A sequence with count 0 keeps its state.
        depth: largest depth of the trees.
        features: what `observe` wants from `forward`.
    """

    init: Callable[[int, int, Any], Any]
    propose: Callable[..., DraftTree]
    observe: Callable[..., Any]
    depth: int
    features: Literal["none", "streams"]
