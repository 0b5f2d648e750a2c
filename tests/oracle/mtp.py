"""The multi-token-prediction block: from token t's streams and token t+1 to token t+2."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .attention import AttentionState
from .basic import Array, rms_norm, under
from .model import Block, Oracle

NAME = "mtp.0."


class MtpState(NamedTuple):
    """The block's own attention state; like the model's, no step changes it."""

    length: int
    layer: AttentionState


class MtpOut(NamedTuple):
    logits: Array
    """[V] for the token after the next."""
    streams: Array
    """[S, E] the block's output; a deeper draft step takes them in place of the main streams."""
    margin: float
    """Smallest gap by which the block's router, or its indexer if it has one, decided."""


class Mtp:
    """The MTP block of a model. Raises ValueError if the checkpoint has none."""

    def __init__(self, oracle: Oracle) -> None:
        if not oracle.has_mtp:
            raise ValueError("the checkpoint has no MTP block (num_nextn_predict_layers is 0)")
        self.oracle = oracle
        self.weights = under(oracle.tensors, NAME)
        self.block = Block.of(self.weights, oracle.config, oracle.config.num_hidden_layers)

    def start(self) -> MtpState:
        return MtpState(0, self.block.attention.start())

    def step(self, state: MtpState, streams: Array, next_token: int) -> tuple[MtpState, MtpOut]:
        """Take in position t = `state.length`.

        Args:
          state: the block's state after positions 0 to t - 1.
          streams: [S, E] after the main model's last layer at t, before the head.
          next_token: the token at t + 1.
        """
        w, eps = self.weights, self.oracle.config.rms_norm_eps
        embedding = self.oracle.tensors["embed.weight"][next_token]
        embedding = w["e_proj.weight"] @ rms_norm(embedding, eps, w["enorm.weight"])
        hidden = rms_norm(streams, eps, w["hnorm.weight"]) @ w["h_proj.weight"].T
        layer, out = self.block.step(state.layer, embedding + hidden, next_token, state.length)
        logits = self.oracle.logits(out.streams, owner=NAME)
        margin = min(out.experts.margin, out.entries.margin if out.entries else np.inf)
        return MtpState(state.length + 1, layer), MtpOut(logits, out.streams, margin)

    def run(self, streams: Array, tokens: Array) -> list[MtpOut]:
        """All T - 1 outputs of a sequence: main streams [T, S, E], tokens [T]."""
        state, outs = self.start(), []
        for position, next_token in enumerate(tokens[1:]):
            state, out = self.step(state, streams[position], int(next_token))
            outs.append(out)
        return outs


def mtp_logits(oracle: Oracle, streams: Array, tokens: Array) -> Array:
    """Logits [T - 1, V]; row t predicts token t + 2. `streams` [T, S, E] as in `Mtp.run`."""
    return np.stack([out.logits for out in Mtp(oracle).run(streams, tokens)])
