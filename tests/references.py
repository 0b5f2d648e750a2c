"""Recorded outputs of a model, and the ways of decoding that must reproduce them.

Whatever the way (one block, chunks of any size, single tokens, one-node trees), the logits and the
streams after every layer are those of the reference. Chunks of all sizes are one compilation: the
block has a fixed width and a traced number of valid tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import Cache, LayerCache, extend, extend_layer, init_cache, init_layer
from jaxspec.config import ModelConfig
from jaxspec.model.forward import forward
from jaxspec.model.mtp import mtp_logits, run_mtp
from jaxspec.model.params import ModelParams
from jaxspec.tree import NO_PARENT, DraftTree, TokenBlock
from tests.serial import FULL_COMPILE, compiled

TOLERANCE = 2e-5


@dataclass
class Reference:
    """What a model is known to give for some texts."""

    params: ModelParams
    cfg: ModelConfig
    tokens: np.ndarray
    """[B, T]"""
    logits: np.ndarray
    """[B, T, V]"""
    streams: Mapping[int, np.ndarray] = field(default_factory=dict)
    """Layer -> [B, P, S, E] after it, at the known `positions`."""
    positions: np.ndarray | None = None
    """[P]; None: all."""
    entries: Mapping[tuple[int, str], np.ndarray] = field(default_factory=dict)
    """(layer, "entries" or "keys") -> [B, C, d]."""
    mtp_logits: np.ndarray | None = None
    """[B, T - 1, V], row t for token t + 2."""
    end: np.ndarray | None = None
    """[B] positions before the first that an exact tie leaves undetermined; None: all count."""

    @property
    def until(self) -> np.ndarray:
        """[B] how many positions count."""
        rows, total = self.tokens.shape
        return np.full(rows, total) if self.end is None else self.end

    def errors(self, run: Run) -> dict[str, float]:
        """The largest difference of everything that is known, NaN counted as infinite."""
        total = run.logits.shape[1]
        seen = np.arange(total) < self.until[:, None]
        worst = {"logits": largest(run.logits, self.logits[:, :total], seen)}
        known = np.arange(total) if self.positions is None else self.positions
        known = known[known < total]
        for layer, want in self.streams.items():
            got = run.streams[:, known, layer]
            worst[f"layer {layer}"] = largest(got, want[:, : len(known)], seen[:, known])
        for (layer, name), want in self.entries.items():
            count = total // self.cfg.compress_ratios[layer]
            got = np.asarray(getattr(run.cache.layers[layer], name))[:, :count]
            last = (np.arange(count) + 1) * self.cfg.compress_ratios[layer] - 1
            worst[f"{name} {layer}"] = largest(got, want[:, :count], seen[:, last])
        if self.mtp_logits is not None:
            got = run.mtp_logits[:, : total - 1]
            worst["mtp"] = largest(got, self.mtp_logits[:, : total - 1], seen[:, : total - 1])
        return worst

    def main_only(self) -> Reference:
        """Without what is known of the MTP block."""
        return replace(self, mtp_logits=None)

    def check(self, run: Run) -> None:
        worst = self.errors(run)
        print("largest difference", max(worst.values()), worst)
        assert max(worst.values()) < TOLERANCE, worst


def largest(got: np.ndarray, want: np.ndarray, seen: np.ndarray) -> float:
    """Largest |got - want| where `seen [B, T]`."""
    assert got.shape == want.shape
    return float(np.nan_to_num(np.abs(got - want), nan=np.inf)[seen].max(initial=0.0))


class Run(NamedTuple):
    """What the engine gave for the first T tokens."""

    logits: np.ndarray
    """[B, T, V]"""
    streams: np.ndarray
    """[B, T, L, S, E]"""
    mtp_logits: np.ndarray | None
    """[B, T, V]; the last row has read a token that is not there."""
    cache: Cache


class State(NamedTuple):
    cache: Cache
    mtp: LayerCache | None


def run_chain(params, cfg, state, token, following, valid):
    """A chain block and, behind it, the MTP block on the same positions; both committed."""
    block = TokenBlock.chain(token, state.cache.length, valid)
    out = forward(params, cfg, state.cache, block, features="trace")
    streams = [layer.streams for layer in out.features]
    cache, mtp, drafts = extend(state.cache, out.rows, None, valid), state.mtp, None
    if mtp is not None:
        block = TokenBlock.chain(following, state.cache.length, valid)
        layer = run_mtp(params, cfg, streams[-1], mtp, block)
        drafts = mtp_logits(params, cfg, layer.streams)
        mtp = extend_layer(mtp, layer.attended.rows, None, state.cache.length, valid)
    return (out.logits, jnp.stack(streams, axis=2), drafts), State(cache, mtp)


def run_root(params, cfg, cache, token):
    """A tree of one node, `token [B, 1]`, committed."""
    none = jnp.zeros(token.shape)
    tree = DraftTree(token=token, parent=none.astype(int) + NO_PARENT, score=none, live=none == 0)
    out = forward(params, cfg, cache, TokenBlock.tree(tree, cache.length), features="trace")
    streams = jnp.stack([layer.streams for layer in out.features], axis=2)
    root = jnp.zeros_like(tree.parent)
    return (out.logits, streams), extend(cache, out.rows, root, root[:, 0] + 1)


QUICK_CHAIN, QUICK_ROOT = compiled(run_chain), compiled(run_root)
CHAIN, ROOT = compiled(run_chain, FULL_COMPILE), compiled(run_root, FULL_COMPILE)


def decode_chunks(
    known: Reference, sizes: Sequence[int], width: int, *, quick: bool = False
) -> Run:
    """The first sum(sizes) tokens in chunks of these sizes, in blocks of `width`."""
    chain = QUICK_CHAIN if quick else CHAIN
    state, parts, start = start_of(known), [], 0
    padded = np.pad(known.tokens, ((0, 0), (0, width + 1)))
    for size in sizes:
        block = padded[:, start : start + width + 1]
        valid = np.full(len(block), size, np.int32)
        part, state = chain(known.params, known.cfg, state, block[:, :-1], block[:, 1:], valid)
        parts.append([None if x is None else np.asarray(x)[:, :size] for x in part])
        start += size
    logits, streams, drafts = zip(*parts, strict=True)
    mtp = None if drafts[0] is None else np.concatenate(drafts, axis=1)
    return Run(np.concatenate(logits, 1), np.concatenate(streams, 1), mtp, state.cache)


def start_of(known: Reference) -> State:
    cfg, (rows, total) = known.cfg, known.tokens.shape
    mtp = init_layer(cfg, cfg.mtp_ratios[0], rows, total) if cfg.mtp_ratios else None
    return State(init_cache(cfg, rows, total), mtp)


def decode_roots(known: Reference, total: int, *, quick: bool = False) -> Run:
    """The first `total` tokens, each as a tree of one node."""
    root, cache, parts = QUICK_ROOT if quick else ROOT, start_of(known).cache, []
    for t in range(total):
        part, cache = root(known.params, known.cfg, cache, known.tokens[:, t : t + 1])
        parts.append(part)
    logits, streams = (np.concatenate(x, axis=1) for x in zip(*jax.device_get(parts), strict=True))
    return Run(logits, streams, None, cache)


def splits(total: int, width: int, seed: int = 0) -> Iterator[int]:
    """Sizes that add up to `total`: single tokens, small chunks, and large ones up to `width`."""
    rng = np.random.default_rng(seed)
    while total:
        largest = rng.choice([1, 3, 9, width])
        size = min(int(rng.integers(1, largest + 1)), total, width)
        yield size
        total -= size
