"""Serial decoding, one token a step: the truth that every other way of decoding must equal.

The compiled pieces are shared by all tests. What differs between tests is content (tokens, parents,
lengths), so a model is compiled once per shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import Cache, extend, init_cache
from jaxspec.checkpoint import load_checkpoint
from jaxspec.config import ModelConfig
from jaxspec.model.forward import ForwardOut, forward
from jaxspec.model.params import ModelParams
from jaxspec.tree import TokenBlock
from tests.oracle import Oracle, random_checkpoint, save_checkpoint

FULL_COMPILE = {"xla_backend_optimization_level": 3}
"""XLA's default, which the tests lower (`conftest.py`)."""

TRACES: Counter[str] = Counter()
"""How often each of the compiled pieces was traced."""


@dataclass(frozen=True)
class Model:
    """One set of weights: for the engine in float32, for the oracle in float64."""

    params: ModelParams
    cfg: ModelConfig
    oracle: Oracle

    def __repr__(self) -> str:
        return f"<model of ratios {self.cfg.compress_ratios}>"  # short in the report of a failure


def random_model(folder: Path, overrides: Mapping[str, Any], seed: int = 0) -> Model:
    """A random checkpoint, written to `folder` and read by the engine's own loader."""
    raw, tensors = random_checkpoint(overrides, seed)
    save_checkpoint(folder, raw, tensors)
    params, cfg = load_checkpoint(folder)
    return Model(params, cfg, Oracle(raw, tensors))


def compiled(function: Callable, options: Mapping[str, Any] | None = None) -> Callable:
    """`jax.jit` with `cfg` static, if there is one, which counts its traces in TRACES."""

    @wraps(function)
    def counted(*args, **kwargs):
        TRACES[function.__name__] += 1
        return function(*args, **kwargs)

    static = {"cfg"} & signature(function).parameters.keys()
    return jax.jit(counted, static_argnames=tuple(static), compiler_options=options)


@compiled
def advance(params, cfg, cache, token, valid) -> tuple[ForwardOut, Cache]:
    """A chain block `token [B, N]` of `valid [B]` tokens, run and committed."""
    out = forward(params, cfg, cache, TokenBlock.chain(token, cache.length, valid))
    return out, extend(cache, out.rows, None, valid)


@compiled
def verify(params, cfg, cache, tree) -> ForwardOut:
    """A tree block, run and not committed."""
    return forward(params, cfg, cache, TokenBlock.tree(tree, cache.length))


@compiled
def commit(cache, rows, path, count) -> Cache:
    return extend(cache, rows, path, count)


@compiled
def choose_rows(take: jax.Array, new: Any, old: Any) -> Any:
    """Leaf by leaf, the rows of `new` where `take [B]` and of `old` elsewhere."""
    return jax.tree.map(
        lambda a, b: jnp.where(take.reshape(-1, *([1] * (a.ndim - 1))), a, b), new, old
    )


class Decoded(NamedTuple):
    logits: np.ndarray
    """[B, T, V], row t after token t."""
    caches: list[Cache]
    """T + 1 of them, entry t after t tokens."""


def decode(model: Model, cache: Cache, tokens: np.ndarray) -> Decoded:
    """Takes in `tokens [B, T]` one at a time after `cache`."""
    one = np.ones(len(tokens), np.int32)
    logits, caches = [], [cache]
    for t in range(tokens.shape[1]):
        out, cache = advance(model.params, model.cfg, cache, tokens[:, t : t + 1], one)
        logits.append(out.logits[:, 0])
        caches.append(cache)
    return Decoded(np.stack(jax.device_get(logits), axis=1), caches)


def decode_until(model: Model, tokens: np.ndarray, length: np.ndarray, max_len: int) -> Cache:
    """The caches after the first `length [B]` of `tokens [B, T]`, each token by token."""
    one = np.ones(len(tokens), np.int32)
    cache = init_cache(model.cfg, len(tokens), max_len)
    for t in range(int(length.max())):
        _, new = advance(model.params, model.cfg, cache, tokens[:, t : t + 1], one)
        cache = choose_rows(t < length, new, cache)
    return cache
