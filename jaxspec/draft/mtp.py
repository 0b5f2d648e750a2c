"""Drafting with the multi-token-prediction block, level by level.

The block's row t reads the target's streams at position t and the embedding of the token at t + 1,
and predicts t + 2. With the root at position n, rows 0 to n - 1 are committed: they have read
verified streams, and the output of row n - 1 scores the children of the root. A node at depth d is
a row at position n + d - 1 that reads its parent's output streams in the place of the target's; it
attends to the committed rows, to those of its own ancestors, which lie in a scratch, and to itself.
The ring is written only by `observe`, which runs the accepted rows again on verified streams.

Source: V4 report, section 2 (the MTP block); its tree drafting follows EAGLE-2, arXiv 2406.16858.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxspec.cache import LayerCache, extend_layer, init_layer
from jaxspec.config import ModelConfig
from jaxspec.draft import Drafter, Score
from jaxspec.draft.grow import Candidates, Frontier, TreeShape, expand, frontier, select
from jaxspec.errors import UsageError
from jaxspec.model.attention import Scratch
from jaxspec.model.forward import last_valid
from jaxspec.model.mtp import mtp_logits, run_mtp
from jaxspec.model.params import ModelParams
from jaxspec.tree import DraftTree, TokenBlock, pack_bits
from jaxspec.verify import VerifyResult, next_tokens


class MtpState(struct.PyTreeNode):
    """What the block knows of the committed tokens (leaves `[B, ...]`)."""

    layer: LayerCache  # the ring of rows 0 to n - 1
    streams: Array  # [B, S, E]: output of row n - 1


class _Drafted(struct.PyTreeNode):
    """A draft between two levels; streams and `seen` are those of the parents' `width` nodes."""

    grown: Candidates
    front: Frontier  # of the newest level
    streams: Array  # [B, width, S, E]: the MTP block's output
    scratch: Scratch
    seen: Array  # [B, width, M] bool: the scratch slots of a node's ancestors and itself

    @staticmethod
    def begin(state: MtpState, grown: Candidates, shape: TreeShape) -> _Drafted:
        """After the root's children were scored, from the state's streams alone."""
        slots = (shape.levels - 1) * shape.width
        return _Drafted(
            grown,
            frontier(grown, shape.budget),
            streams=jnp.repeat(state.streams[:, None], shape.width, axis=1),
            scratch=Scratch.empty(state.layer, slots),
            seen=jnp.zeros((len(state.streams), shape.width, slots), bool),
        )

    def may_grow(self, levels: int, live: Array) -> Array:
        """Whether another level could put a node into the tree of a sequence that is `live [B]`."""
        return (self.grown.level < levels) & jnp.any(self.front.live & live[:, None])


def make_drafter(cfg: ModelConfig, shape: TreeShape, *, impl: str = "auto") -> Drafter:
    """The drafter that grows trees of `shape` (a chain is one of width 1) with the MTP block.

    Drafters of equal arguments are equal, and those that differ in their shape share a state.

    Raises:
        UsageError: the model has no MTP block, or one whose attention is not a plain window.
    """
    if not cfg.mtp_ratios:
        raise UsageError("the model has no MTP block to draft with; decode with method none")
    if cfg.mtp_ratios[0] != 0:
        raise UsageError(
            f"the MTP block has compress ratio {cfg.mtp_ratios[0]}; drafting needs 0, a window"
        )
    return Drafter(
        init=Init(cfg),
        propose=Propose(cfg, shape, impl),
        observe=Observe(cfg, impl),
        depth=shape.levels,
        features="streams",
    )


@dataclasses.dataclass(frozen=True)
class Init:
    """The drafter's `init`."""

    cfg: ModelConfig

    def __call__(self, batch: int, max_len: int, dtype: Any) -> MtpState:
        """See `Drafter`."""
        streams = jnp.zeros((batch, self.cfg.hc_mult, self.cfg.hidden_size), dtype)
        return MtpState(init_layer(self.cfg, 0, batch, max_len, dtype), streams)


@dataclasses.dataclass(frozen=True)
class Propose:
    """The drafter's `propose`."""

    cfg: ModelConfig
    shape: TreeShape
    impl: str

    def __call__(
        self,
        params: ModelParams,
        state: MtpState,
        root: Array,
        length: Array,
        *,
        live: Array,
        score: Score,
    ) -> DraftTree:
        """See `Drafter`."""
        cfg, shape, batch = self.cfg, self.shape, root.shape[0]
        grown = Candidates.empty(batch, levels=shape.levels, width=shape.width, top_k=shape.top_k)
        scores = score(mtp_logits(params, cfg, state.streams[:, None]), length[:, None] + 1)
        first = Frontier.root(root, width=shape.width)
        grown = expand(grown, first, scores, sharpness=shape.sharpness)

        def descend(drafted: _Drafted) -> _Drafted:
            """One pass of the block over the newest frontier, for the scores of its children."""
            front, depth = drafted.front, drafted.grown.level
            slot = drafted.scratch.start + jnp.arange(shape.width)
            seen = _take(drafted.seen, front.parent_slot)
            seen |= jnp.arange(seen.shape[2]) == slot[:, None]
            block = TokenBlock(
                token=front.token,
                position=jnp.broadcast_to(length[:, None] + depth - 1, front.token.shape),
                valid=front.live & live[:, None],
                length=length,
                parent=None,
                ancestors=pack_bits(seen),
                kind="tree",
            )
            streams = _take(drafted.streams, front.parent_slot)
            out = run_mtp(
                params, cfg, streams, state.layer, block, scratch=drafted.scratch, impl=self.impl
            )
            scores = score(mtp_logits(params, cfg, out.streams), block.position + 2)
            grown = expand(drafted.grown, front, scores, sharpness=shape.sharpness)
            return drafted.replace(
                grown=grown,
                front=frontier(grown, shape.budget),
                streams=out.streams,
                scratch=out.attended.scratch,
                seen=seen,
            )

        if shape.levels > 1:
            start = _Drafted.begin(state, grown, shape)
            grown = lax.while_loop(lambda x: x.may_grow(shape.levels, live), descend, start).grown
        return select(grown, root, shape.budget, live=live)


@dataclasses.dataclass(frozen=True)
class Observe:
    """The drafter's `observe`: the accepted rows once more, on what the target has verified."""

    cfg: ModelConfig
    impl: str

    def __call__(
        self,
        params: ModelParams,
        state: MtpState,
        block: TokenBlock,
        features: Array,
        result: VerifyResult,
    ) -> MtpState:
        """See `Drafter`."""
        token = next_tokens(block.token, result)
        streams = features if block.kind == "chain" else _take(features, result.path)
        rows = TokenBlock.chain(token, block.length, result.count)
        out = run_mtp(params, self.cfg, streams, state.layer, rows, impl=self.impl)
        last = last_valid(rows, out.streams)[:, 0]
        moved = (result.count > 0)[:, None, None]
        return MtpState(
            layer=extend_layer(state.layer, out.attended.rows, None, block.length, result.count),
            streams=jnp.where(moved, last, state.streams),
        )


def _take(x: Array, index: Array) -> Array:
    """Rows `index [B, P]` of `x [B, N, ...]`."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *([1] * (x.ndim - 2))), axis=1)
