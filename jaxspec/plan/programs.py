"""Programs of the kernels at the sizes of DeepSeek-V4-Flash, made in the process that compiles."""

from __future__ import annotations

from functools import partial
from typing import Any

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


def flash() -> ModelConfig:
    """Facts of V4-Flash."""
    return read_model_toml(packaged_config("model/flash.toml"))


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
    static: dict[str, Any] = {"ratio": ratio, "topk": 0}
    if ratio:
        capacity, ends = context // ratio, _own_entries(nodes, ratio)
        committed = committed._replace(entries=_entries(batch, capacity, entry))
        if layer_kind(ratio) == "csa":
            static["topk"] = cfg.index_topk
            committed = committed._replace(selected=_bits(batch, nodes, capacity))
        entry_bits = _bits(batch, nodes, ends)
        own = own._replace(entries=_bf16(batch, ends, dim), entry_bits=entry_bits)
    arrays = {name: x for name, x in committed._asdict().items() if name not in static}

    def run(q: Array, sink: Array, arrays: dict[str, Any], own: Own, position: Array) -> Array:
        there = Committed(**arrays, **static)
        return tree_attention(q, sink, there, own, position=position, impl=impl)

    q, sink, position = _bf16(batch, nodes, heads, dim), _float32(heads), _int32(batch, nodes)
    sizes = {"batch": batch, "nodes": nodes, "entries": context // ratio if ratio else 0}
    there = committed._replace(**static)
    moved = partial(count, "tree_attention", impl, sizes, q, sink, there, own, position=position)
    return Program(run, (q, sink, arrays, own, position), moved)


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

    def run(q: Array, weight: Array, entries: IndexKeys) -> tuple[Array, Array]:
        return index_topk(q, weight, entries, topk=cfg.index_topk, impl=impl)

    q, weight = _bf16(batch, nodes, heads, dim), _float32(batch, nodes, heads)
    sizes = {"batch": batch, "nodes": nodes, "entries": context // CSA_RATIO}
    moved = partial(count, "index_topk", impl, sizes, q, weight, entries, topk=cfg.index_topk)
    return Program(run, (q, weight, entries), moved)


def expert_program(*, rows: int, impl: str) -> Program:
    """The routed experts of one layer."""
    cfg = flash()
    experts, width, inner = cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size
    choices = cfg.num_experts_per_tok

    def run(x: Array, w1: Array, w3: Array, w2: Array, routing: tuple[Array, Array]) -> Array:
        return grouped_matmul(x, w1, w3, w2, *routing, limit=cfg.swiglu_limit, impl=impl)

    up, down = _bf16(experts, inner, width), _bf16(experts, width, inner)
    x, routing = _bf16(rows, width), (_int32(rows, choices), _float32(rows, choices))
    kernel_arguments = x, (up, up, down), (*routing, _array(jnp.bool_, rows))
    sizes = {"rows": rows}
    moved = partial(count, "grouped_matmul", impl, sizes, *kernel_arguments, limit=cfg.swiglu_limit)
    return Program(run, (x, up, up, down, routing), moved)
