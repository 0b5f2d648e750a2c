"""DeepSeek-V4 in float64, one token of one sequence at a time, with explicit state.

The reference that the engine is tested against. It is written to be read and to be right, and
shares no code with the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .attention import Attention, AttentionState
from .basic import Array, Tensors, rms_norm, under
from .checkpoint import check_tensors, read_checkpoint
from .config import Config
from .hyper import Mixing, collapse, head_collapse, mixing, spread
from .moe import moe
from .topk import Selection


class State(NamedTuple):
    """A sequence so far. No step changes it, so the branches of a tree may share it."""

    length: int
    """Tokens taken in; the next token has this position."""
    layers: tuple[AttentionState, ...]


class StepOut(NamedTuple):
    """What one token gave rise to."""

    logits: Array
    """[V] for the next token."""
    streams: Array
    """[L + 1, S, E] the embedding's copies, then the streams after every layer."""
    topk: dict[int, Array]
    """CSA layer -> ids of the selected entries, by falling score."""
    topk_margin: dict[int, float]
    """CSA layer -> gap at the top-k boundary."""
    experts: tuple[Array, ...]
    """Per layer the ids of the routed experts."""
    experts_margin: tuple[float, ...]
    """Per layer the gap at the routing boundary; inf in hash layers."""

    @property
    def margin(self) -> float:
        """Smallest gap by which any indexer or router decided."""
        return min(*self.topk_margin.values(), *self.experts_margin, np.inf)


class BlockOut(NamedTuple):
    """What one block (attention, then experts) made of one token."""

    streams: Array
    entries: Selection | None
    experts: Selection


@dataclass(frozen=True)
class Block:
    """A decoder block on hyper-connected streams."""

    weights: Tensors
    config: Config
    attention: Attention
    ffn: Tensors

    @classmethod
    def of(cls, weights: Tensors, config: Config, layer: int) -> Block:
        attention = Attention(under(weights, "attn."), config, config.compress_ratios[layer])
        return cls(weights, config, attention, under(weights, "ffn."))

    def step(
        self, state: AttentionState, streams: Array, token: int, position: int
    ) -> tuple[AttentionState, BlockOut]:
        """Take in the streams [S, E] of `token` at `position`."""
        w, eps = self.weights, self.config.rms_norm_eps

        mix = self._mixing("attn", streams)
        x = rms_norm(collapse(streams, mix), eps, w["attn_norm.weight"])
        state, y, entries = self.attention.step(state, x, position)
        streams = spread(streams, y, mix)

        mix = self._mixing("ffn", streams)
        x = rms_norm(collapse(streams, mix), eps, w["ffn_norm.weight"])
        y, experts = moe(self.ffn, self.config, x, token)
        return state, BlockOut(spread(streams, y, mix), entries, experts)

    def _mixing(self, name: str, streams: Array) -> Mixing:
        fn, base, scale = (self.weights[f"hc_{name}_{part}"] for part in ("fn", "base", "scale"))
        return mixing(streams, fn, base, scale, self.config)


class Oracle:
    """A model: `state = oracle.start()`, then `state, out = oracle.step(state, token)`."""

    def __init__(self, config: Config | Mapping[str, Any], tensors: Tensors) -> None:
        """Take a configuration and unquantised tensors by their released names.

        Raises:
          ValueError: a tensor is missing, superfluous or misshapen.
        """
        self.config = config if isinstance(config, Config) else Config.from_released(config)
        check_tensors(self.config, tensors)
        self.tensors = {
            name: tensor if name.endswith("tid2eid") else tensor.astype(np.float64)
            for name, tensor in tensors.items()
        }
        self.blocks = tuple(
            Block.of(under(self.tensors, f"layers.{layer}."), self.config, layer)
            for layer in range(self.config.num_hidden_layers)
        )

    @classmethod
    def load(cls, folder: str | Path) -> Oracle:
        """Read `config.json` and `model.safetensors` of an unquantised checkpoint."""
        return cls(*read_checkpoint(folder))

    @property
    def has_mtp(self) -> bool:
        return self.config.num_nextn_predict_layers > 0

    def start(self) -> State:
        """State of an empty sequence."""
        return State(0, tuple(block.attention.start() for block in self.blocks))

    def step(self, state: State, token: int) -> tuple[State, StepOut]:
        """Take in one token; its logits predict the next one."""
        embedding = self.tensors["embed.weight"][token]
        streams = [np.tile(embedding, (self.config.hc_mult, 1))]
        layers, outs = [], []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            layer, out = block.step(layer, streams[-1], token, state.length)
            layers.append(layer)
            outs.append(out)
            streams.append(out.streams)
        picked = {i: out.entries for i, out in enumerate(outs) if out.entries is not None}
        return State(state.length + 1, tuple(layers)), StepOut(
            logits=self.logits(streams[-1]),
            streams=np.stack(streams),
            topk={layer: entries.ids for layer, entries in picked.items()},
            topk_margin={layer: entries.margin for layer, entries in picked.items()},
            experts=tuple(out.experts.ids for out in outs),
            experts_margin=tuple(out.experts.margin for out in outs),
        )

    def run(self, tokens: Iterable[int], state: State | None = None) -> tuple[State, list[StepOut]]:
        """Take in several tokens, after `state` if it is given."""
        state = self.start() if state is None else state
        outs = []
        for token in tokens:
            state, out = self.step(state, int(token))
            outs.append(out)
        return state, outs

    def logits(self, streams: Array, owner: str = "") -> Array:
        """[V] of the output head on streams [S, E], by the collapse and norm of `owner`.

        The owner is a prefix of tensor names: empty for the main model, `mtp.0.` for the MTP
        block, which shares the head matrix alone.
        """
        t = self.tensors
        fn, base, scale = (t[f"{owner}hc_head_{part}"] for part in ("fn", "base", "scale"))
        hidden = head_collapse(streams, fn, base, scale, self.config)
        hidden = rms_norm(hidden, self.config.rms_norm_eps, t[f"{owner}norm.weight"])
        return t["head.weight"] @ hidden
