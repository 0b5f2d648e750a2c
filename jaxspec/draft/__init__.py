"""Drafters: what proposes the tree that the target verifies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxspec.tree import DraftTree


class Drafter(NamedTuple):
    """A way to propose trees, as pure functions over a state that only it looks into.

    Any drafter is lossless: what is emitted depends on the target's choices alone, and a bad tree
    only emits fewer tokens a step.

    Attributes:
        init: `init(batch, max_len) -> state`: the state of `batch` sequences without a token, with
            room for `max_len` committed ones.
        propose: `propose(params, state, root, length, ...) -> DraftTree`: continuations of
            `root [B]`, the last emitted token, which stands at position `length [B]`. It changes
            neither the cache nor its own state: nothing that was only drafted outlives the step.
        observe: `observe(params, state, block, features, result) -> state`: takes in what the
            target has verified. `block` and `features` are what went into the forward and came
            out; of a tree, `result` says which nodes were accepted, and a chain (prefill), whose
            `result` is None, is committed whole.
    """

    init: Callable[[int, int], Any]
    propose: Callable[..., DraftTree]
    observe: Callable[..., Any]
