"""Attention of one layer, for one token at a time: sliding window, CSA or HCA (report 2.3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .basic import Array, Tensors, rms_norm, rope_frequencies, rotate, under
from .compressor import Compressor, CompressorState
from .config import CSA_RATIO, Config
from .indexer import index_query, index_scores
from .topk import Selection, select


@dataclass(frozen=True)
class AttentionState:
    """What a layer remembers of a sequence. Values are never changed in place."""

    raw: Array
    """[<= W, K] key-value rows of the last W positions, oldest first."""
    compressed: CompressorState | None
    index: CompressorState | None


@dataclass(frozen=True)
class Attention:
    """One layer's attention. Every head shares one key-value row per position, K = V."""

    weights: Tensors
    config: Config
    ratio: int

    @cached_property
    def frequencies(self) -> Array:
        return rope_frequencies(self.config, self.ratio)

    @cached_property
    def compressor(self) -> Compressor | None:
        return self._compressor("compressor.") if self.ratio else None

    @cached_property
    def index_compressor(self) -> Compressor | None:
        return self._compressor("indexer.compressor.") if self.ratio == CSA_RATIO else None

    @cached_property
    def index_weights(self) -> Tensors:
        return under(self.weights, "indexer.")

    def _compressor(self, prefix: str) -> Compressor:
        weights = under(self.weights, prefix)
        return Compressor(weights, self.ratio, self.frequencies, self.config.rms_norm_eps)

    def start(self) -> AttentionState:
        return AttentionState(
            raw=np.zeros((0, self.config.head_dim)),
            compressed=self.compressor.start() if self.compressor else None,
            index=self.index_compressor.start() if self.index_compressor else None,
        )

    def step(
        self, state: AttentionState, x: Array, position: int
    ) -> tuple[AttentionState, Array, Selection | None]:
        """Attend with the token x [E] at `position`, which sees itself and its window's entry.

        Returns:
          The state after the token, the output [E], and the entries that a CSA layer selected.
        """
        w, eps = self.weights, self.config.rms_norm_eps
        angles = position * self.frequencies
        latent = rms_norm(w["wq_a.weight"] @ x, eps, w["q_norm.weight"])
        state = self._remember(state, x, position)
        candidates, selection = self._candidates(state, x, latent, angles)
        heads = self._attend(latent, candidates, angles)
        return state, self._project_out(heads), selection

    def _remember(self, state: AttentionState, x: Array, position: int) -> AttentionState:
        w, window = self.weights, self.config.sliding_window
        row = rms_norm(w["wkv.weight"] @ x, self.config.rms_norm_eps, w["kv_norm.weight"])
        row = rotate(row, position * self.frequencies)
        compressed, index = state.compressed, state.index
        if self.compressor and compressed:
            compressed = self.compressor.step(compressed, x, position)
        if self.index_compressor and index:
            index = self.index_compressor.step(index, x, position)
        return AttentionState(np.vstack([state.raw, row])[-window:], compressed, index)

    def _candidates(
        self, state: AttentionState, x: Array, latent: Array, angles: Array
    ) -> tuple[Array, Selection | None]:
        """Rows to attend to: the window, then all entries (HCA) or the selected ones (CSA)."""
        if state.compressed is None:
            return state.raw, None
        entries = state.compressed.entries
        if state.index is None:
            return np.vstack([state.raw, entries]), None
        query = index_query(self.index_weights, self.config, latent, angles)
        scores = index_scores(self.index_weights, self.config, x, query, state.index.entries)
        selection = select(scores, self.config.index_topk)
        return np.vstack([state.raw, entries[selection.ids]]), selection

    def _attend(self, latent: Array, rows: Array, angles: Array) -> Array:
        """Softmax attention of every head over `rows` and the head's sink, [H, K].

        Rows serve as values with their rotation; the inverse rotation by the query's position
        leaves the relative one.
        """
        H, K = self.config.num_attention_heads, self.config.head_dim
        query = (self.weights["wq_b.weight"] @ latent).reshape(H, K)
        query = rotate(rms_norm(query, self.config.rms_norm_eps), angles)
        logits = query @ rows.T * K**-0.5
        sink = self.weights["attn_sink"]
        top = np.maximum(logits.max(axis=1), sink)
        weights = np.exp(logits - top[:, None])
        total = weights.sum(axis=1) + np.exp(sink - top)
        return rotate(weights @ rows / total[:, None], -angles)

    def _project_out(self, heads: Array) -> Array:
        """Low-rank output projection, first within each group of heads, then over all, [E]."""
        G, rank = self.config.o_groups, self.config.o_lora_rank
        wo_a = self.weights["wo_a.weight"].reshape(G, rank, -1)
        grouped = np.matmul(wo_a, heads.reshape(G, -1, 1))
        return self.weights["wo_b.weight"] @ grouped.reshape(-1)
