"""Programs of the kernels at the sizes of DeepSeek-V4-Flash, made in the process that compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from jaxspec.config import CSA_RATIO, ModelConfig, layer_kind, read_model_toml
from jaxspec.plan.kernels import BUDGET
from jaxspec.plan.program import Program
from jaxspec.plan.traffic import count
from jaxspec.resources import packaged_config
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk.op import IndexKeys, PackedKeys
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.op import Committed, Fp8Entries, Own
from pallas_kernels.tree_attention.sources import FP8_GROUP

OPS: dict[str, Callable[..., Any]] = {
    "tree_attention": tree_attention,
    "index_topk": index_topk,
    "grouped_matmul": grouped_matmul,
}
"""The ops by name."""


def flash() -> ModelConfig:
    """Facts of V4-Flash."""
    return read_model_toml(packaged_config("model/flash.toml"))


def bind(op_name: str, impl: str, sizes: dict[str, int], function: Any, *operands: Any) -> Program:
    """The program of a call; whole numbers among the leaves of `operands` are static.

    `function` makes the same call of an op and of a kernel's count of bytes.
    """
    leaves, tree = jax.tree.flatten(operands)
    arrays = tuple(leaf for leaf in leaves if not isinstance(leaf, int))

    def call(*arrays: Array) -> Any:
        rest = iter(arrays)
        every = [leaf if isinstance(leaf, int) else next(rest) for leaf in leaves]
        return function(partial(OPS[op_name], impl=impl), *jax.tree.unflatten(tree, every))

    def traffic() -> Any:
        return function(partial(count, op_name, impl, sizes), *operands)

    return Program(call, arrays, traffic)


def _array(dtype: Any, *shape: int) -> Any:
    return ShapeDtypeStruct(shape, dtype)  # stands for an array wherever one is asked for


_bf16 = partial(_array, jnp.bfloat16)
_int32 = partial(_array, jnp.int32)
_float32 = partial(_array, jnp.float32)


def _bits(batch: int, nodes: int, size: int) -> Any:
    return _array(jnp.uint32, batch, nodes, -(-size // 32))


def _own_entries(nodes: int, ratio: int) -> int:
    """A tree has an entry for each node, a chunk one for each window that it may end."""
    return nodes if nodes <= BUDGET else -(-nodes // ratio) + 1


def _entries(batch: int, capacity: int, entry: str) -> Any:
    """Compressed entries in bfloat16, or as the release rounds them."""
    cfg = flash()
    if entry == "bf16":
        return _bf16(batch, capacity, cfg.head_dim)
    rounded = cfg.head_dim - cfg.qk_rope_head_dim
    groups = -(-rounded // FP8_GROUP)
    return Fp8Entries(
        _array(jnp.float8_e4m3fn, batch, capacity, rounded),
        _array(jnp.uint8, batch, capacity, groups),
        _bf16(batch, capacity, cfg.qk_rope_head_dim),
    )


def attention_program(
    *, ratio: int, context: int, batch: int, nodes: int, entry: str, impl: str
) -> Program:
    """Attention of one layer over a committed context; `nodes > BUDGET` is a chunk of a chain.

    `entry` is `bf16` or `fp8`.
    """
    cfg = flash()
    heads, dim, window = cfg.num_attention_heads, cfg.head_dim, cfg.sliding_window
    bits = _bits(batch, nodes, nodes) if nodes <= BUDGET else None
    committed = Committed(_bf16(batch, window, dim), _int32(batch))
    own = Own(_bf16(batch, nodes, dim), _int32(batch, nodes), bits)
    capacity = context // ratio if ratio else 0
    if ratio:
        ends = _own_entries(nodes, ratio)
        own = own._replace(entries=_bf16(batch, ends, dim), entry_bits=_bits(batch, nodes, ends))
        entries = _entries(batch, capacity, entry)
        committed = committed._replace(entries=entries, ratio=ratio)
        if layer_kind(ratio) == "csa":
            chosen = _bits(batch, nodes, capacity)
            committed = committed._replace(selected=chosen, topk=cfg.index_topk)

    def run(kernel: Any, *operands: Any) -> Any:
        return kernel(*operands[:-1], position=operands[-1])

    q, sink = _bf16(batch, nodes, heads, dim), _float32(heads)
    operands = q, sink, committed, own, _int32(batch, nodes)
    sizes = {"batch": batch, "nodes": nodes, "entries": capacity}
    return bind("tree_attention", impl, sizes, run, *operands)


def _keys(batch: int, size: int, key: str) -> Any:
    """The indexer's keys in bfloat16, or as the release rounds them."""
    dim = flash().index_head_dim
    if key == "bf16":
        return _bf16(batch, size, dim)
    return PackedKeys(
        _array(jnp.float8_e4m3fn, batch, size, dim),
        _array(jnp.float8_e8m0fnu, batch, size),
    )


def index_program(*, context: int, batch: int, nodes: int, key: str, impl: str) -> Program:
    """The indexer's selection of one CSA layer; `key` is `bf16` or `fp8`."""
    cfg = flash()
    heads, dim = cfg.index_n_heads, cfg.index_head_dim
    own = _own_entries(nodes, CSA_RATIO)
    entries = IndexKeys(
        _keys(batch, context // CSA_RATIO, key),
        _int32(batch),
        _keys(batch, own, key),
        _bits(batch, nodes, own),
    )

    def run(kernel: Any, *operands: Any) -> Any:
        return kernel(*operands, topk=cfg.index_topk)

    q, weight = _bf16(batch, nodes, heads, dim), _float32(batch, nodes, heads)
    sizes = {"batch": batch, "nodes": nodes, "entries": context // CSA_RATIO}
    return bind("index_topk", impl, sizes, run, q, weight, entries)


def expert_program(*, rows: int, impl: str) -> Program:
    """The routed experts of one layer."""
    cfg = flash()
    experts, width, inner = cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size
    choices = cfg.num_experts_per_tok

    def run(kernel: Any, *operands: Any) -> Any:
        return kernel(*operands, limit=cfg.swiglu_limit)

    x, up, down = _bf16(rows, width), _bf16(experts, inner, width), _bf16(experts, width, inner)
    operands = x, up, up, down, _int32(rows, choices), _float32(rows, choices)
    program = bind("grouped_matmul", impl, {"rows": rows}, run, *operands)
    routing = (*operands[4:], _array(jnp.bool_, rows))
    arguments = "grouped_matmul", impl, {"rows": rows}, x, (up, up, down), routing
    return program._replace(traffic=partial(count, *arguments, limit=cfg.swiglu_limit))
