"""The CPU form of tree attention against its definition."""

from __future__ import annotations

import jax
import pytest

from pallas_kernels.tree_attention import cpu
from tests.pallas_kernels.cases_tree_attention import SHAPES, bound, compare, draw, expected

CHAINS = {
    case.name: case._replace(dtype="float32")
    for case in SHAPES
    if case.kind == "chain" and case.nodes > case.window
}


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_longer_than_the_window_agrees_with_the_definition(name: str) -> None:
    """Sequences that hold no entry stand beside others that do."""
    arguments = draw(CHAINS[name], seed=1)
    call, arrays = bound(cpu.tree_attention, arguments)
    compare(CHAINS[name], jax.jit(call)(*arrays), expected(arguments))
