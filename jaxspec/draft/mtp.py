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
import functools
from typing import Any

import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxspec.cache import LayerCache, extend_layer, init_layer
from jaxspec.config import ModelConfig
from jaxspec.draft import Drafter, Score
from jaxspec.draft.grow import Candidates, Frontier, TreeShape, expand, frontier, select
from jaxspec.errors import UsageError
from jaxspec.model.attention import Scratch
from jaxspec.model.forward import LayerOut, last_valid
from jaxspec.model.mtp import mtp_logits, run_mtp
from jaxspec.model.params import ModelParams
from jaxspec.tree import DraftTree, TokenBlock, pack_bits
from jaxspec.verify import VerifyResult, next_tokens


@struct.dataclass
class MtpState:
    """What the block knows of the committed tokens (leaves `[B, ...]`)."""

    layer: LayerCache  # the ring of rows 0 to n - 1
    streams: Array  # [B, S, E]: output of row n - 1


@functools.cache
def make_drafter(cfg: ModelConfig, shape: TreeShape, impl: str = "auto") -> Drafter:
    """The drafter that grows trees of `shape` (a chain is one of width 1) with the MTP block.

    The same arguments give the same drafter, and so the same compilation.

    Raises:
        UsageError: the model has no MTP block, or one whose attention is not a plain window.
    """
    if not cfg.mtp_ratios:
        raise UsageError("the model has no MTP block to draft with; decode with method none")
    if cfg.mtp_ratios[0] != 0:
        raise UsageError(
            f"the MTP block has compress ratio {cfg.mtp_ratios[0]}; drafting needs 0, a window"
        )
    mtp = _Mtp(cfg, shape, impl)
    return Drafter(mtp.init, mtp.propose, mtp.observe, depth=shape.levels, features="streams")


@dataclasses.dataclass(frozen=True)
class _Mtp:
    """The functions of the drafter; see `Drafter` for what each does."""

    cfg: ModelConfig
    shape: TreeShape
    impl: str

    def init(self, batch: int, max_len: int, dtype: Any) -> MtpState:
        streams = jnp.zeros((batch, self.cfg.hc_mult, self.cfg.hidden_size), dtype)
        return MtpState(init_layer(self.cfg, 0, batch, max_len, dtype), streams)

    def propose(
        self,
        params: ModelParams,
        state: MtpState,
        root: Array,
        length: Array,
        *,
        live: Array,
        score: Score,
    ) -> DraftTree:
        batch, (levels, width) = root.shape[0], (self.shape.levels, self.shape.width)
        grown = Candidates.empty(batch, levels=levels, width=width, top_k=self.shape.top_k)
        streams = state.streams[:, None]  # of the parents of the nodes to come
        scores = score(mtp_logits(params, self.cfg, streams), length[:, None] + 1)
        grown = expand(grown, Frontier.root(root, width=width), scores)

        slots = (levels - 1) * width
        scratch = _empty_scratch(state.layer, slots)
        seen = jnp.zeros((batch, 1, slots), bool)  # which slots hold ancestors of a node
        for depth in range(1, levels):
            front = frontier(grown)
            own = jnp.arange(slots) == scratch.start + jnp.arange(width)[:, None]
            seen = _take(seen, front.parent_slot) | own
            block = TokenBlock(
                token=front.token,
                position=jnp.broadcast_to(length[:, None] + depth - 1, front.token.shape),
                valid=front.live & live[:, None],
                length=length,
                parent=None,
                ancestors=pack_bits(seen),
                kind="tree",
            )
            streams = _take(streams, front.parent_slot)
            out = self._run(params, streams, state.layer, block, scratch=scratch)
            streams, scratch = out.streams, out.attended.scratch
            scores = score(mtp_logits(params, self.cfg, streams), block.position + 2)
            grown = expand(grown, front, scores)
        return select(grown, root, self.shape.budget, live=live)

    def observe(
        self,
        params: ModelParams,
        state: MtpState,
        block: TokenBlock,
        features: Array,
        result: VerifyResult,
    ) -> MtpState:
        token = next_tokens(block.token, result)
        streams = features if result.path is None else _take(features, result.path)
        rows = TokenBlock.chain(token, block.length, result.count)
        out = self._run(params, streams, state.layer, rows)
        last = last_valid(rows, out.streams)[:, 0]
        moved = (result.count > 0)[:, None, None]
        return MtpState(
            layer=extend_layer(state.layer, out.attended.rows, None, block.length, result.count),
            streams=jnp.where(moved, last, state.streams),
        )

    def _run(
        self,
        params: ModelParams,
        streams: Array,
        layer: LayerCache,
        block: TokenBlock,
        *,
        scratch: Scratch | None = None,
    ) -> LayerOut:
        return run_mtp(params, self.cfg, streams, layer, block, scratch=scratch, impl=self.impl)


def _empty_scratch(layer: LayerCache, slots: int) -> Scratch:
    batch, _, dim = layer.ring.shape
    return Scratch(
        kv=jnp.zeros((batch, slots, dim), layer.ring.dtype),
        position=jnp.zeros((batch, slots), jnp.int32),
        start=0,
    )


def _take(x: Array, index: Array) -> Array:
    """Rows `index [B, P]` of `x [B, N, ...]`."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *([1] * (x.ndim - 2))), axis=1)
