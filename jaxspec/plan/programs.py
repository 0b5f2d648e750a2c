"""Programs of the kernels at the sizes of DeepSeek-V4-Flash, made in the process that compiles."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from jaxspec.config import CSA_RATIO, ModelConfig, layer_kind, read_model_toml
from jaxspec.plan.kernels import BUDGET
from jaxspec.plan.program import Program
from jaxspec.resources import packaged_config
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk.op import IndexKeys
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.op import Committed, Own


def flash() -> ModelConfig:
    """Facts of V4-Flash."""
    return read_model_toml(packaged_config("model/flash.toml"))


def _bf16(*shape: int) -> Any:
    return ShapeDtypeStruct(shape, jnp.bfloat16)


def _int32(*shape: int) -> Any:
    return ShapeDtypeStruct(shape, jnp.int32)


def _bits(batch: int, nodes: int, size: int) -> Any:
    return ShapeDtypeStruct((batch, nodes, -(-size // 32)), jnp.uint32)


def _own_entries(nodes: int, ratio: int) -> int:
    """A tree has an entry for each node, a chunk one for each window that it may end."""
    return nodes if nodes <= BUDGET else -(-nodes // ratio) + 1


def attention_program(*, ratio: int, context: int, batch: int, nodes: int, impl: str) -> Program:
    """Attention of one layer over a committed context; `nodes > BUDGET` is a chunk of a chain."""
    cfg = flash()
    heads, dim, window = cfg.num_attention_heads, cfg.head_dim, cfg.sliding_window
    is_tree = nodes <= BUDGET
    committed = Committed(_bf16(batch, window, dim), _int32(batch), ratio=ratio)
    own = Own(
        _bf16(batch, nodes, dim),
        _int32(batch, nodes),
        _bits(batch, nodes, nodes) if is_tree else None,
    )
    if ratio:
        capacity, entries = context // ratio, _own_entries(nodes, ratio)
        chosen = _bits(batch, nodes, capacity) if layer_kind(ratio) == "csa" else None
        committed = committed._replace(entries=_bf16(batch, capacity, dim), selected=chosen)
        own = own._replace(
            entries=_bf16(batch, entries, dim), entry_bits=_bits(batch, nodes, entries)
        )

    def run(q: Array, sink: Array, arrays: dict[str, Any], own: Own, position: Array) -> Array:
        there = Committed(**arrays, ratio=ratio)  # static, no operand
        return tree_attention(q, sink, there, own, position=position, impl=impl)

    sink = ShapeDtypeStruct((heads,), jnp.float32)
    q = _bf16(batch, nodes, heads, dim)
    arrays = committed._asdict()
    del arrays["ratio"]
    avals = (q, sink, arrays, own, _int32(batch, nodes))
    return Program(run, avals)


def index_program(*, context: int, batch: int, nodes: int, impl: str) -> Program:
    """The indexer's selection of one CSA layer."""
    cfg = flash()
    heads, dim = cfg.index_n_heads, cfg.index_head_dim
    own = _own_entries(nodes, CSA_RATIO)
    entries = IndexKeys(
        _bf16(batch, context // CSA_RATIO, dim),
        _int32(batch),
        _bf16(batch, own, dim),
        _bits(batch, nodes, own),
    )

    def run(q: Array, weight: Array, entries: IndexKeys) -> tuple[Array, Array]:
        return index_topk(q, weight, entries, topk=cfg.index_topk, impl=impl)

    weight = ShapeDtypeStruct((batch, nodes, heads), jnp.float32)
    return Program(run, (_bf16(batch, nodes, heads, dim), weight, entries))


def expert_program(*, rows: int, impl: str) -> Program:
    """The routed experts of one layer."""
    cfg = flash()
    experts, width, inner = cfg.n_routed_experts, cfg.hidden_size, cfg.moe_intermediate_size
    choices = cfg.num_experts_per_tok

    def run(x: Array, w1: Array, w3: Array, w2: Array, routing: tuple[Array, Array]) -> Array:
        return grouped_matmul(x, w1, w3, w2, *routing, limit=cfg.swiglu_limit, impl=impl)

    up, down = _bf16(experts, inner, width), _bf16(experts, width, inner)
    routing = _int32(rows, choices), ShapeDtypeStruct((rows, choices), jnp.float32)
    return Program(run, (_bf16(rows, width), up, up, down, routing))
