"""Programs of the kernels at the sizes of DeepSeek-V4-Flash, made in the process that compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, ShapeDtypeStruct

from jaxspec.config import CSA_RATIO, ModelConfig, layer_kind, read_model_toml
from jaxspec.model.hyper import collect, spread, weigh
from jaxspec.model.params import HyperParams
from jaxspec.plan.kernels import BUDGET
from jaxspec.plan.program import Program
from jaxspec.plan.traffic import count
from jaxspec.resources import packaged_config
from pallas_kernels.grouped_matmul import grouped_matmul
from pallas_kernels.grouped_matmul.op import pack_fp4, pack_fp8
from pallas_kernels.hyper_mixing import hyper_mixing
from pallas_kernels.index_topk import index_topk
from pallas_kernels.index_topk.op import IndexKeys, pack_keys
from pallas_kernels.tree_attention import forms, tree_attention
from pallas_kernels.tree_attention.op import Committed, Fp8Bytes, Own

OPS: dict[str, Callable[..., Any]] = {
    "tree_attention": tree_attention,
    "index_topk": index_topk,
    "grouped_matmul": grouped_matmul,
    "hyper_mixing": hyper_mixing,
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


def _entries(batch: int, capacity: int, form: str) -> Any:
    """Compressed entries: `bf16`, `fp8`, or a TPU's `words` (bfloat16) and `bytes` (FP8)."""
    cfg = flash()
    dim, rotary = cfg.head_dim, cfg.qk_rope_head_dim
    plain = _bf16(batch, capacity, dim)
    if form == "bf16":
        return plain
    if form == "words":
        return jax.eval_shape(forms.to_words, plain)
    fp8 = jax.eval_shape(partial(forms.quantise, rotary=rotary), plain)
    if form == "fp8":
        return fp8
    return Fp8Bytes(jax.eval_shape(lambda x: forms.to_bytes(x).rows, fp8), rotary)


def attention_program(
    *, ratio: int, context: int, batch: int, nodes: int, form: str, impl: str
) -> Program:
    """Attention of one layer over a committed context; `nodes > BUDGET` is a chunk of a chain.

    `form` is that of the committed entries.
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
        entries = _entries(batch, capacity, form)
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


def _keys(batch: int, size: int, form: str) -> Any:
    """The indexer's keys in `bf16` or `fp8`."""
    keys = _bf16(batch, size, flash().index_head_dim)
    return keys if form == "bf16" else jax.eval_shape(pack_keys, keys)


def index_program(*, context: int, batch: int, nodes: int, form: str, impl: str) -> Program:
    """The indexer's selection of one CSA layer; `form` is that of all keys."""
    cfg = flash()
    heads, dim = cfg.index_n_heads, cfg.index_head_dim
    own = _own_entries(nodes, CSA_RATIO)
    entries = IndexKeys(
        _keys(batch, context // CSA_RATIO, form),
        _int32(batch),
        _keys(batch, own, form),
        _bits(batch, nodes, own),
    )

    def run(kernel: Any, *operands: Any) -> Any:
        return kernel(*operands, topk=cfg.index_topk)

    q, weight = _bf16(batch, nodes, heads, dim), _float32(batch, nodes, heads)
    sizes = {"batch": batch, "nodes": nodes, "entries": context // CSA_RATIO}
    return bind("index_topk", impl, sizes, run, q, weight, entries)


def _weights(rows: int, columns: int, form: str) -> Any:
    """Stacked weights of all experts in `bf16`, `fp8` or `fp4`."""
    plain = _bf16(flash().n_routed_experts, rows, columns)
    pack: dict[str, Callable[..., Any]] = {"fp8": pack_fp8, "fp4": pack_fp4}
    return plain if form == "bf16" else jax.eval_shape(pack[form], plain)


def expert_program(*, rows: int, form: str, impl: str) -> Program:
    """The routed experts of one layer; `form` is that of the weights."""
    cfg = flash()
    width, inner, choices = cfg.hidden_size, cfg.moe_intermediate_size, cfg.num_experts_per_tok

    def run(kernel: Any, *operands: Any) -> Any:
        return kernel(*operands, limit=cfg.swiglu_limit)

    up, down = _weights(inner, width, form), _weights(width, inner, form)
    x, routing = _bf16(rows, width), (_int32(rows, choices), _float32(rows, choices))
    program = bind("grouped_matmul", impl, {"rows": rows}, run, x, up, up, down, *routing)
    # The kernel takes its operands in groups, unlike the op.
    arguments = x, (up, up, down), (*routing, _array(jnp.bool_, rows))
    counted = partial(count, "grouped_matmul", impl, {"rows": rows}, *arguments)
    return program._replace(traffic=partial(counted, limit=cfg.swiglu_limit))


def mixing_program(*, rows: int, impl: str) -> Program:
    """The mixing weights of one sub-layer."""
    cfg = flash()
    width = cfg.hc_mult * (2 + cfg.hc_mult)

    def run(kernel: Any, *operands: Any) -> Any:
        return kernel(
            *operands, streams=cfg.hc_mult, iterations=cfg.hc_sinkhorn_iters, eps=cfg.hc_eps
        )

    operands = _float32(rows, width), _float32(3), _float32(width)
    return bind("hyper_mixing", impl, {"rows": rows}, run, *operands)


def streams_program(*, rows: int, impl: str) -> Program:
    """A sub-layer without its function: the streams are weighed, collected and spread."""
    cfg = flash()
    size, count = cfg.hidden_size, cfg.hc_mult
    features = count * (2 + count)
    shapes = _float32(count * size, features), _float32(features), _float32(3)

    def run(streams: Array, update: Array, *leaves: Array) -> Any:
        mixing = weigh(HyperParams(*leaves), cfg, streams, impl=impl)
        return collect(streams, mixing.pre), spread(streams, update, mixing)

    return Program(run, (_bf16(1, rows, count, size), _bf16(1, rows, size), *shapes))
