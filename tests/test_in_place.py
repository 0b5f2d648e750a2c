"""A step writes what it commits and copies no buffer of the cache, read off the compiled loop.

The drafter's own ring is not held to it: `observe` writes it without waiting for what it reads, so
the compiler keeps the old one in a copy. It has the size of one window.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.draft.plain import PLAIN
from jaxspec.sample import Sampling
from jaxspec.state import init_state
from jaxspec.step import generate
from tests.conftest import TINY
from tests.doubles import VOCAB, dice_drafter, toy_model
from tests.serial import random_model

BATCH, WINDOW, MAX_LEN = 3, 40, 1000
"""So that the shapes of rings, entries and keys are those of nothing else."""

COPY = re.compile(r" = (\w+\[[\d,]*\])\S* copy(?:-start)?\(")


def copied_shapes(program: str) -> Iterator[str]:
    """Shapes of what a compiled program copies, as in `f32[3,40,16]`."""
    for line in program.splitlines():
        if found := COPY.search(line):
            yield found[1]


def shapes_of(buffers: object) -> set[str]:
    return {f"f32[{','.join(map(str, leaf.shape))}]" for leaf in jax.tree.leaves(buffers)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    sizes = {"sliding_window": WINDOW, "vocab_size": VOCAB}
    return random_model(tmp_path_factory.mktemp("model"), TINY | sizes)


@pytest.mark.parametrize("kind", ["one node", "tree"])
def test_no_buffer_of_the_cache_is_copied(model, tmp_path, kind):
    tree = dice_drafter(toy_model(tmp_path), nodes=6, depth=3, seed=0)
    drafter = PLAIN if kind == "one node" else tree
    state = init_state(
        model.cfg,
        Sampling.create(BATCH),
        np.zeros(BATCH, np.uint32),
        np.full(BATCH, 8, np.int32),
        max_len=MAX_LEN,
        max_new=8,
        drafter=drafter,
    )
    lowered = generate.lower(model.params, model.cfg, state, steps=4, drafter=drafter)
    program = lowered.compile().as_text()
    copied = {*copied_shapes(program)}
    assert copied  # counters, for example
    assert not copied & shapes_of(state.cache.layers)
    assert all(shape in program for shape in shapes_of(state.cache.layers))


def test_a_copy_is_recognised():
    """The control: a write that does not wait for what is read of the old buffer."""

    def body(i, carry):
        buffer, total = carry
        return buffer.at[i].set(total), buffer @ buffer

    def loop(buffer):
        return jax.lax.fori_loop(0, 5, body, (buffer, jnp.float32(0)))

    program = jax.jit(loop, donate_argnums=0).lower(jnp.ones(997)).compile().as_text()
    assert "f32[997]" in {*copied_shapes(program)}
