"""Forms of a cache's entries: the same values, the same tokens, and rows that may be fetched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.checkpoint import load_checkpoint
from jaxspec.draft.plain import PLAIN
from jaxspec.model.entries import cache_for
from jaxspec.sample import Sampling
from jaxspec.state import init_state
from pallas_kernels.tree_attention import forms
from pallas_kernels.tree_attention.forms import alike, fitting, from_words, quantise, to_bytes
from pallas_kernels.tree_attention.op import Bf16Words
from tests.conftest import TINY
from tests.random_trees import random_trees
from tests.serial import advance, commit, random_model, verify

BATCH, NODES, PROMPT, MAX_LEN = 3, 6, 21, 64


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory):
    """A small model of all three layer kinds."""
    folder = tmp_path_factory.mktemp("model")
    random_model(folder, TINY | {"compress_ratios": [0, 4, 8]})
    return load_checkpoint(folder, dtype="bfloat16")


def plain(cache):
    """The cache with its entries as plain arrays."""
    layers = tuple(
        layer.replace(entries=from_words(layer.entries)) if layer.ratio else layer
        for layer in cache.layers
    )
    return cache.replace(layers=layers)


def same_bits(got, want) -> None:
    got, want = jax.device_get((got, want))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_entries_in_words_are_those_of_a_plain_cache(bfloat16) -> None:
    """Prefill, trees and commits of random paths, bit for bit."""
    params, cfg = bfloat16
    rng = np.random.default_rng(5)
    impls = {"plain": "ref", "words": "tpu"}
    caches = {
        name: cache_for(impl, cfg, BATCH, MAX_LEN, jnp.bfloat16) for name, impl in impls.items()
    }
    assert all(isinstance(x.entries, Bf16Words) for x in caches["words"].layers if x.ratio)
    token = rng.integers(0, cfg.vocab_size, (BATCH, PROMPT)).astype(np.int32)
    valid = np.array([PROMPT, 13, 2], np.int32)
    steps = {name: advance(params, cfg, cache, token, valid) for name, cache in caches.items()}
    for seed in range(3):
        (out, cache), (other, words) = steps["plain"], steps["words"]
        same_bits((other.logits, plain(words)), (out.logits, cache))
        tree = random_trees(np.random.default_rng(seed), BATCH, NODES, cfg.vocab_size)
        path, count = random_paths(rng, np.asarray(tree.parent))
        for name, (_, cache) in steps.items():
            out = verify(params, cfg, cache, tree)
            steps[name] = out, commit(cache, out.rows, path, count)
    (_, cache), (_, words) = steps["plain"], steps["words"]
    assert min(cache.length) > 4  # entries were written, read and added to
    same_bits(plain(words), cache)


def random_paths(rng, parent):
    """Of each tree `[B, N]` a path from the root, `[B, N]`, and its length, `[B]`."""
    paths = np.zeros(parent.shape, np.int32)
    counts = np.zeros(len(parent), np.int32)
    for b, row in enumerate(parent):
        node, path = int(rng.integers(len(row))), []
        while node >= 0:
            path.append(node)
            node = int(row[node])
        counts[b] = len(path)
        paths[b, : len(path)] = path[::-1]
    return paths, counts


@pytest.mark.parametrize(
    ("impl", "dtype", "is_words"),
    [("tpu", "bfloat16", True), ("tpu", "float32", False), ("ref", "bfloat16", False),
     ("auto", "bfloat16", False)],
)  # fmt: skip
def test_a_state_for_tpu_kernels_holds_words(bfloat16, impl, dtype, is_words) -> None:
    _, cfg = bfloat16
    state = init_state(
        cfg,
        Sampling.create(1),
        np.zeros(1, np.uint32),
        np.ones(1, np.int32),
        max_len=32,
        max_new=1,
        drafter=PLAIN,
        dtype=jnp.dtype(dtype),
        impl=impl,
    )
    sliding, *compressed = state.cache.layers
    assert sliding.entries is None
    assert [isinstance(layer.entries, Bf16Words) for layer in compressed] == [is_words] * 2


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_the_platform_decides_where_nothing_is_named(monkeypatch, platform) -> None:
    monkeypatch.setattr(forms, "target_platform", lambda: platform)
    bits = np.random.default_rng(0).integers(0, 1 << 14, (2, 3, 8)).astype(np.uint16)
    entries = jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.bfloat16)
    got = fitting(entries, "auto")
    assert isinstance(got, Bf16Words) == (platform == "tpu")
    if platform == "tpu":  # dim d is the low half of word d, dim d + K/2 its high half
        words = bits[..., :4] | bits[..., 4:].astype(np.uint32) << 16
        np.testing.assert_array_equal(got.words, words)
    assert fitting(entries, "gpu") is entries


def test_what_cannot_be_words_stays_and_no_form_rounds_in_silence() -> None:
    odd = jnp.zeros((1, 3, 5), jnp.bfloat16)
    assert fitting(odd, "tpu") is odd
    entries = jnp.ones((1, 3, 8), jnp.bfloat16)
    assert alike(entries, entries) is entries
    for stored in (quantise(entries, 2), to_bytes(quantise(entries, 2))):
        with pytest.raises(TypeError, match="quantise"):
            alike(entries, stored)
