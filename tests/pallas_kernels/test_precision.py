"""Products of float32 are asked for in float32: elsewhere than on CPUs they are not by default."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.cache import init_cache
from jaxspec.checkpoint import load_checkpoint
from jaxspec.model.forward import forward
from jaxspec.tree import TokenBlock
from tests.conftest import TINY
from tests.serial import random_model

PRODUCTS = ("dot_general", "ragged_dot_general")


def products(jaxpr: Any) -> list[Any]:
    """Equations of all products in a program, those of inner programs too."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in PRODUCTS:
            found.append(eqn)
        for value in eqn.params.values():
            for inner in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += products(inner)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_forward_asks_for_whole_float32_products(tmp_path, dtype: str) -> None:
    random_model(tmp_path, TINY)
    params, cfg = load_checkpoint(tmp_path, dtype=dtype)
    cache = init_cache(cfg, 2, 16, jnp.dtype(dtype))
    token = jnp.zeros((2, 5), jnp.int32)
    block = TokenBlock.chain(token, cache.length, jnp.array([5, 3]))
    program = jax.make_jaxpr(lambda params: forward(params, cfg, cache, block, impl="ref"))(params)
    every = products(program.jaxpr)
    assert len(every) > 20
    for eqn in every:
        operands = {var.aval.dtype for var in eqn.invars[:2]}
        if operands == {jnp.dtype("float32")}:
            assert eqn.params["precision"] is not None, eqn
