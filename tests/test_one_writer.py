"""The law of one writer, read off the sources and off the program that `forward` becomes."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxspec.cache import Cache, extend, init_cache
from jaxspec.model.forward import ForwardOut, forward
from jaxspec.tree import DraftTree, TokenBlock
from tests.random_trees import random_parents, trees_of

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for package in ("jaxspec", "pallas_kernels") for path in (ROOT / package).rglob("*.py")
)
UNDOING = {"rollback", "rewind", "snapshot", "restore"}
BUFFERS = {"ring", "entries", "keys", "open", "key_open"}
"""The fields of a layer's cache."""


def nodes_of(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_nothing_is_undone(path):
    """Verification writes nothing, so there is nothing to take back."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    names = {node.name for node in nodes_of(path) if isinstance(node, functions)}
    assert not [name for name in names if UNDOING & {*name.split("_")}]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_only_the_cache_module_writes_into_a_cache(path):
    nodes = list(nodes_of(path))
    views = set(map(id, views_of(nodes))) if any(map(is_pallas_import, nodes)) else set()
    writes = [node for node in nodes if is_write(node) and id(node) not in views]
    if path.name == "cache.py":
        assert writes
    else:
        assert not [ast.unparse(node) for node in writes]


def is_write(node: ast.AST) -> bool:
    """`x.ring.at[...]`, `dynamic_update_slice(x.ring, ...)`, `LayerCache(...)`, `Cache(...)`, or
    `layer.replace(ring=...)`."""
    if isinstance(node, ast.Attribute) and node.attr == "at":
        return is_buffer(node.value)
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func).split(".")[-1]
    if name in ("LayerCache", "Cache"):
        return True
    if name == "replace":
        return bool({keyword.arg for keyword in node.keywords} & {"ring", "entries", "keys"})
    return "update" in name and any(map(is_buffer, node.args))


def views_of(nodes: list[ast.AST]) -> list[ast.AST]:
    """The `x.at` of every `x.at[...]` on which no method but `transpose` is called.

    In a Pallas kernel that is a part of a reference, and an array is written by `x.at[...].set(y)`
    alone, there as elsewhere.
    """
    parts = [node for node in nodes if isinstance(node, ast.Subscript) and is_at(node.value)]
    called = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Attribute) and node.attr != "transpose"
    }
    return [part.value for part in parts if id(part) not in called]


def is_at(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "at"


def is_pallas_import(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and (
        (node.module or "").startswith("jax.experimental.pallas")
        or (node.module == "jax.experimental" and "pallas" in {name.name for name in node.names})
    )


def is_buffer(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in BUFFERS


def test_a_write_is_recognised():
    writes = (
        "layer.ring.at[slot].set(row)",
        "lax.dynamic_update_slice(cache.layers[0].entries, row, (0, 0))",
        "layer.replace(keys=keys)",
        "LayerCache(ring, None, None, None, None, 0)",
    )
    for write in writes:
        assert any(map(is_write, ast.walk(ast.parse(write)))), write
    assert not any(map(is_write, ast.walk(ast.parse("rows.replace(open=x).kv.at[0].set(1)"))))


def test_a_view_in_a_kernel_is_told_from_a_write():
    for text, views in {
        "copy(ref.keys.at[b, rows], place)": 1,
        "wgmma(acc, x.keys.at[i].transpose((1, 0)))": 1,
        "layer.keys.at[slot].set(row)": 0,
        "layer.ring.at[slot].add(row)": 0,
    }.items():
        assert len(views_of(list(ast.walk(ast.parse(text))))) == views, text


@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_forward_returns_no_cache_and_updates_no_buffer(tiny, kind):
    """No scatter or slice update in its program has the shape of a buffer of the cache."""
    rng = np.random.default_rng(0)
    tree = trees_of(rng, [random_parents(rng, 7)] * 3, nodes=7, vocab=64)
    cache = init_cache(tiny.cfg, batch=3, max_len=52)

    def run(cache: Cache, tree: DraftTree) -> ForwardOut:
        chain = TokenBlock.chain(tree.token, cache.length)
        block = chain if kind == "chain" else TokenBlock.tree(tree, cache.length)
        return forward(tiny.params, tiny.cfg, cache, block)

    program, out = jax.make_jaxpr(run, return_shape=True)(cache, tree)
    assert {field.name for field in dataclasses.fields(out)} == {"logits", "features", "rows"}
    assert out.features is None
    buffers = {x.shape for x in jax.tree.leaves(cache.layers)}
    assert not buffers & {*updated_shapes(program.jaxpr)}
    program = jax.make_jaxpr(extend)(cache, out.rows, None, cache.length)
    assert buffers & {*updated_shapes(program.jaxpr)}


def updated_shapes(program: Any) -> Iterator[tuple[int, ...]]:
    """Shapes of all buffers that a program updates, in its inner programs too."""
    for equation in program.eqns:
        if "scatter" in equation.primitive.name or "update" in equation.primitive.name:
            yield equation.invars[0].aval.shape
        for value in jax.tree.leaves(equation.params):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from updated_shapes(inner)


MOVES = {
    "broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice", "gather",
    "reshape", "scatter", "select_n", "slice", "squeeze", "transpose",
}  # fmt: skip
"""What copies numbers from place to place."""


def test_extend_moves_numbers_and_computes_none(tiny):
    """Only places and masks are computed: no float is, and no weight is asked for."""
    rng = np.random.default_rng(0)
    tree = trees_of(rng, [random_parents(rng, 7)] * 3, nodes=7, vocab=64)
    cache = init_cache(tiny.cfg, batch=3, max_len=52)

    def run(cache: Cache, tree: DraftTree) -> ForwardOut:
        return forward(tiny.params, tiny.cfg, cache, TokenBlock.tree(tree, cache.length))

    program, out = jax.make_jaxpr(run, return_shape=True)(cache, tree)
    assert "dot_general" in {*makers_of_floats(program.jaxpr)}
    path = np.zeros((3, 5), np.int32)
    program = jax.make_jaxpr(extend)(cache, out.rows, path, cache.length)
    assert "scatter" in {*makers_of_floats(program.jaxpr)} <= MOVES


def makers_of_floats(program: Any) -> Iterator[str]:
    """Operations with a floating-point result, those of inner programs in the place of a call."""
    for equation in program.eqns:
        inner = [getattr(value, "jaxpr", value) for value in jax.tree.leaves(equation.params)]
        inner = [value for value in inner if hasattr(value, "eqns")]
        for value in inner:
            yield from makers_of_floats(value)
        kinds = {output.aval.dtype.kind for output in equation.outvars}
        if not inner and "f" in kinds:
            yield equation.primitive.name
