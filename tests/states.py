"""Comparing the committed content of caches, and filling the rest with poison."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import Cache, LayerCache


def committed_slots(layer: LayerCache, length: np.ndarray) -> np.ndarray:
    """[B, W]: whether a ring slot holds a committed row."""
    window = layer.ring.shape[1]
    return np.arange(window) < length[:, None]


def committed_entries(layer: LayerCache, length: np.ndarray) -> np.ndarray:
    """[B, C]: whether an entry is complete."""
    return np.arange(layer.entries.shape[1]) < (length // layer.ratio)[:, None]


def state_error(got: Cache, want: Cache) -> np.ndarray:
    """[B] largest difference of the committed content; infinite where a NaN is or lengths differ.

    Of an open pool the pooled value and the logarithm of its denominator count, which do not
    depend on the running maximum that the pool happens to be scaled by.
    """
    got, want = jax.device_get((got, want))
    length = want.length
    worst = np.where(got.length == length, 0.0, np.inf)

    def compare(a: np.ndarray, b: np.ndarray, there: np.ndarray) -> None:
        difference = np.where(there[..., None], np.abs(a - b), 0.0).max(axis=-1)
        difference = difference.reshape(len(length), -1).max(axis=1)
        np.maximum(worst, np.nan_to_num(difference, nan=np.inf), out=worst)

    for a, b in zip(got.layers, want.layers, strict=True):
        compare(a.ring, b.ring, committed_slots(b, length))
        for name in ("entries", "keys"):
            if getattr(b, name) is not None:
                compare(getattr(a, name), getattr(b, name), committed_entries(b, length))
        for name in ("open", "key_open"):
            if getattr(b, name) is not None:
                pools = [pooled(getattr(x, name)) for x in (a, b)]
                compare(*pools, np.ones(pools[0].shape[:-1], bool))
    return worst


def pooled(pool: np.ndarray) -> np.ndarray:
    """[..., 3, d] (maximum, denominator, numerator) to [..., 2, d]: log weight and mean.

    An empty pool gives a log weight of 0 and a mean of 3e38, which no other pool has.
    """
    top, denominator, numerator = (pool[..., i, :] for i in range(3))
    empty = denominator == 0
    share = np.where(empty, 1.0, denominator)
    mean = np.where(empty, np.finfo(np.float32).max, numerator / share)
    return np.stack([np.where(empty, 0.0, top + np.log(share)), mean], axis=-2)


def poison(cache: Cache, value: float = np.nan) -> Cache:
    """`cache` with `value` wherever nothing is committed: ring slots, entries and keys."""

    def spoil(buffer: Any, there: np.ndarray) -> Any:
        return None if buffer is None else jnp.where(there[..., None], buffer, value)

    length = np.asarray(cache.length)
    layers = []
    for layer in cache.layers:
        ring = spoil(layer.ring, committed_slots(layer, length))
        entries, keys = layer.entries, layer.keys
        if entries is not None:
            there = committed_entries(layer, length)
            entries, keys = spoil(entries, there), spoil(keys, there)
        layers.append(layer.replace(ring=ring, entries=entries, keys=keys))
    return cache.replace(layers=tuple(layers))


def same_bits(got: Any, want: Any) -> bool:
    """Whether two trees of arrays are equal bit for bit, NaN included."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    arrays = [(np.asarray(a), np.asarray(b)) for a, b in pairs]
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in arrays
    )
