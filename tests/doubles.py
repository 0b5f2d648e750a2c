"""Stand-ins for the slow parts of decoding: a model without layers, a drafter that guesses by dice.

The model's logits follow from the last token alone, so a loop over a table is its plain decoding;
sampling, trees, the cache's length and the state are the real ones. The drafter is right often but
not always, writes down what it is told, and counts how often it is traced.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxspec.api import score as score_tokens
from jaxspec.config import ModelConfig
from jaxspec.draft import Drafter
from jaxspec.model.params import ModelParams
from jaxspec.sample import gumbel_noise
from jaxspec.tree import NO_PARENT, DraftTree
from tests.conftest import TINY
from tests.random_trees import depths, random_parents
from tests.serial import random_model

VOCAB = 24
FIRST_LETTER = ord("a")
ROUTES = 11
"""Trees that a drafter has; a step takes one by the root's position and token."""

TRACES: Counter[str] = Counter()
"""How often the drafters' functions were traced."""


class Toy(NamedTuple):
    """A model without layers."""

    params: ModelParams
    cfg: ModelConfig
    logits: np.ndarray
    """[V, V] after each token"""

    def ending_with(self, token: int) -> Toy:
        """The same model with another end token."""
        return self._replace(cfg=dataclasses.replace(self.cfg, eos_token_id=token))


def toy_model(folder: Path) -> Toy:
    model = random_model(
        folder, TINY | {"compress_ratios": [0], "num_hidden_layers": 1, "vocab_size": VOCAB}
    )
    cfg = dataclasses.replace(model.cfg, compress_ratios=(), mtp_ratios=())
    params = model.params.replace(layers=(), head=model.params.head * 2)
    logits = score_tokens(params, cfg, np.arange(VOCAB, dtype=np.int32)[None])[0]
    return Toy(params, cfg, np.asarray(logits))


class Wish(NamedTuple):
    """What one sequence asks for."""

    prompt: tuple[int, ...]
    limit: int
    temperature: float
    seed: int


def plain_stream(toy: Toy, wish: Wish, steps: int | None = None) -> tuple[list[int], list[float]]:
    """Tokens and margins of plain decoding, one argmax(log p + g) after the other.

    With `steps` there are so many of them, and neither the limit nor the end token counts.
    """
    last, tokens, margins = wish.prompt[-1], [], []
    while len(tokens) < (wish.limit if steps is None else steps):
        scores = toy.logits[last].astype(np.float64)
        if wish.temperature:
            scores = scores / wish.temperature + noise_of(wish.seed, len(wish.prompt) + len(tokens))
        best = np.sort(scores)
        last = int(scores.argmax())
        tokens.append(last)
        margins.append(float(best[-1] - best[-2]))
        if steps is None and last == toy.cfg.eos_token_id:
            break
    return tokens, margins


_NOISE: dict[int, np.ndarray] = {}


def noise_of(seed: int, position: int) -> np.ndarray:
    """[V] noise of one position (`test_sample.py` tests it)."""
    if seed not in _NOISE:
        many = np.arange(128, dtype=np.int32)[None]
        _NOISE[seed] = np.asarray(_draw(np.uint32([seed]), many)[0], np.float64)
    return _NOISE[seed][position]


_draw = jax.jit(lambda seed, position: gumbel_noise(seed, position, VOCAB))


class Diary(struct.PyTreeNode):
    """What a drafter was told of each committed position (leaves `[B, max_len]`, -1 if nothing)."""

    token: Array
    following: Array
    feature: Array  # first number of the first stream


def dice_drafter(toy: Toy, *, nodes: int, depth: int, seed: int, skill: float = 0.8) -> Drafter:
    """Draws random trees of `nodes` nodes whose children are mostly the target's best ones."""
    rng = np.random.default_rng(seed)
    parents = []
    while len(parents) < ROUTES:
        parent = random_parents(rng, nodes)
        if depths(parent).max() <= depth:
            parents.append(parent)
    parent = np.stack(parents)
    parent[::2] = [NO_PARENT, *(min(i, depth - 1) for i in range(nodes - 1))]  # as deep as may be
    live = rng.random(parent.shape) < 0.9
    live[:, 0] = live[0] = True
    for i in range(1, nodes):
        live[:, i] &= np.take_along_axis(live, parent[:, i, None], axis=1)[:, 0]
    wild = np.where(rng.random(parent.shape) < skill, -1, rng.integers(VOCAB, size=parent.shape))
    guess = Guess(toy.logits, parent, live, wild)
    return Drafter(
        init=keep_diary, propose=guess, observe=write_diary, depth=depth, features="streams"
    )


def keep_diary(batch: int, max_len: int, dtype: Any) -> Diary:
    nothing = jnp.full((batch, max_len), -1, jnp.int32)
    return Diary(nothing, nothing + 0, jnp.full((batch, max_len), -1.0, dtype))


def write_diary(params, state: Diary, block, features, result) -> Diary:
    TRACES["observe"] += 1
    step = jnp.arange(result.path.shape[1])
    place = jnp.where(step < result.count[:, None], block.length[:, None] + step, 10**6)
    token = jnp.take_along_axis(block.token, result.path, axis=1)
    feature = jnp.take_along_axis(features[:, :, 0, 0], result.path, axis=1)
    after = jnp.concatenate([token[:, 1:], token[:, :1]], axis=1)
    following = jnp.where(step == result.count[:, None] - 1, result.bonus[:, None], after)
    row = jnp.arange(len(place))[:, None]
    return Diary(
        token=state.token.at[row, place].set(token, mode="drop"),
        following=state.following.at[row, place].set(following, mode="drop"),
        feature=state.feature.at[row, place].set(feature, mode="drop"),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Guess:
    """A drafter's `propose`: the tree of the step's route.

    The k-th child of a node is the target's k-th best token there, noise included, or a wild one.
    """

    logits: np.ndarray
    parent: np.ndarray  # [routes, N]
    live: np.ndarray
    wild: np.ndarray  # a token, or -1

    def __call__(self, params, state, root, length, *, live, score) -> DraftTree:
        TRACES["propose"] += 1
        nodes = self.parent.shape[1]
        route = (length + 3 * root) % ROUTES
        parent = jnp.asarray(self.parent)[route]
        depth = jnp.asarray(np.stack([depths(parent) for parent in self.parent]))[route]
        older = [[int(sum(p[:i] == p[i])) for i in range(nodes)] for p in self.parent]
        place = jnp.asarray(np.array(older))[route]
        # Scores at every depth after every token, [B, depth * V, V].
        levels = int(max(depths(parent).max() for parent in self.parent))
        batch = root.shape[0]
        every = jnp.tile(jnp.asarray(self.logits), (batch, levels, 1))
        ahead = jnp.repeat(jnp.arange(levels), VOCAB)
        scores = score(every, length[:, None] + 1 + ahead)
        best = jnp.argsort(-scores, axis=-1).reshape(batch, levels, VOCAB, VOCAB)
        wild = jnp.asarray(self.wild)[route]
        row = jnp.arange(batch)
        token = [root]
        for i in range(1, nodes):
            above = jnp.stack(token, axis=1)[row, parent[:, i]]
            right = best[row, depth[:, i] - 1, above, place[:, i]]
            token.append(jnp.where(wild[:, i] < 0, right, wild[:, i]))
        return DraftTree(
            token=jnp.stack(token, axis=1).astype(jnp.int32),
            parent=parent,
            score=jnp.zeros(parent.shape, jnp.float32),
            live=jnp.asarray(self.live)[route] & live[:, None],
        )


class Letters:
    """A tokenizer whose tokens are the letters from `a` on; token 1, the end, has no text."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(FIRST_LETTER + id) for id in ids if id != 1)

    def encode_chat(self, prompt: str, history: Sequence[Any] = ()) -> list[int]:
        return [0, *(ord(letter) - FIRST_LETTER for letter in prompt)]


def rows_of(state: Any, row: int) -> Iterator[np.ndarray]:
    """One sequence's part of every leaf."""
    for leaf in jax.tree.leaves(state):
        yield np.asarray(leaf)[row]
