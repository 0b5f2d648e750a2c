"""The parameters of DeepSeek-V4 as one immutable tree, and the table that describes every leaf.

`abstract(cfg)` is the only place that knows a tensor's released name, shape, dtype and logical
axes. Loading, saving, initialising and sharding all read it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxspec.config import CSA_RATIO, ModelConfig

Layout = Literal["same", "transpose", "groups", "experts"]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter tensor: what it is called on disk and what it is in memory.

    `layout` tells how the released tensor becomes ours: `same`; `transpose`, `[out, in]` to
    `[in, out]`; `groups`, `[G * out, in]` to `[G, in, out]`; `experts`, one `[out, in]` tensor per
    expert (`{}` in the name) to `[X, out, in]`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    layout: Layout = "same"


class HyperParams(struct.PyTreeNode):
    """One hyper-connection: maps the flattened streams to its mixing weights (spec, mHC)."""

    fn: Any  # [S * E, S * (2 + S)], or [S * E, S] for a head
    base: Any  # [S * (2 + S)]
    scale: Any  # [3], or [1] for a head


class CompressorParams(struct.PyTreeNode):
    """Folds R tokens into an entry; P halves of width d (P = 2 for CSA, 1 for HCA)."""

    wkv: Any  # [E, P * d]
    wgate: Any  # [E, P * d]
    ape: Any  # [R, P * d] float32: added to the gate by token position mod R
    norm: Any  # [d]


class IndexerParams(struct.PyTreeNode):
    """The lightning indexer of a CSA layer."""

    wq: Any  # [Rq, Hi * ci]
    weight: Any  # [E, Hi]
    compressor: CompressorParams


class AttentionParams(struct.PyTreeNode):
    """Projections of one attention layer; `compressor` and `indexer` where its kind has them."""

    sink: Any  # [H] float32
    wq_a: Any  # [E, Rq]
    q_norm: Any  # [Rq]
    wq_b: Any  # [Rq, H * K]
    wkv: Any  # [E, K]
    kv_norm: Any  # [K]
    wo_a: Any  # [G, H * K / G, Ro]
    wo_b: Any  # [G * Ro, E]
    compressor: Any  # CompressorParams, or None on sliding layers
    indexer: Any  # IndexerParams on CSA layers, or None


class ExpertParams(struct.PyTreeNode):
    """A gated MLP; or X of them, stacked as they are released."""

    w1: Any  # [E, I] gate; or [X, I, E]
    w3: Any  # [E, I] up; or [X, I, E]
    w2: Any  # [I, E] down; or [X, E, I]


class MoeParams(struct.PyTreeNode):
    """Router, routed and shared experts; exactly one of `bias` and `table` is there."""

    gate: Any  # [E, X]
    bias: Any  # [X] float32: steers the choice of experts, not their weight
    table: Any  # [V, k] int32: the hash layers' experts by token id
    experts: ExpertParams
    shared: ExpertParams


class LayerParams(struct.PyTreeNode):
    """One block: attention and experts, each behind a hyper-connection."""

    attn_norm: Any  # [E]
    ffn_norm: Any  # [E]
    hc_attn: HyperParams
    hc_ffn: HyperParams
    attn: AttentionParams
    moe: MoeParams


class MtpParams(struct.PyTreeNode):
    """A multi-token-prediction block; embedding and output head are the main model's."""

    layer: LayerParams
    e_proj: Any  # [E, E]
    h_proj: Any  # [E, E]
    enorm: Any  # [E]
    hnorm: Any  # [E]
    norm: Any  # [E]
    hc_head: HyperParams


class ModelParams(struct.PyTreeNode):
    """The whole model."""

    embed: Any  # [V, E]
    head: Any  # [E, V]
    norm: Any  # [E]
    hc_head: HyperParams
    layers: tuple[LayerParams, ...]
    mtp: tuple[MtpParams, ...]


class _Table:
    """Writes the leaves of one model: `dtype` where the release stores bf16 or narrower."""

    def __init__(self, cfg: ModelConfig, dtype: Any) -> None:
        self.cfg, self.dtype = cfg, dtype

    def linear(self, name: str, rows: int, cols: int, axes: tuple[str | None, str | None]) -> Leaf:
        return Leaf(f"{name}.weight", (rows, cols), self.dtype, axes, "transpose")

    def vector(self, name: str, size: int, dtype: Any = None) -> Leaf:
        return Leaf(name, (size,), dtype or self.dtype, (None,))

    def hyper(self, name: str, outputs: int, scales: int) -> HyperParams:
        width = self.cfg.hc_mult * self.cfg.hidden_size
        fn = Leaf(f"{name}_fn", (width, outputs), jnp.float32, ("width", None), "transpose")
        base = self.vector(f"{name}_base", outputs, jnp.float32)
        return HyperParams(fn, base, self.vector(f"{name}_scale", scales, jnp.float32))

    def head(self, name: str) -> HyperParams:
        return self.hyper(name, self.cfg.hc_mult, 1)

    def compressor(self, name: str, ratio: int, dim: int) -> CompressorParams:
        width = (2 if ratio == CSA_RATIO else 1) * dim
        hidden = self.cfg.hidden_size
        return CompressorParams(
            wkv=self.linear(f"{name}.wkv", hidden, width, ("width", None)),
            wgate=self.linear(f"{name}.wgate", hidden, width, ("width", None)),
            ape=Leaf(f"{name}.ape", (ratio, width), jnp.float32, (None, None)),
            norm=self.vector(f"{name}.norm.weight", dim),
        )

    def attention(self, name: str, ratio: int) -> AttentionParams:
        c = self.cfg
        heads, groups = c.num_attention_heads * c.head_dim, c.o_groups
        indexer = None
        if ratio == CSA_RATIO:
            index = c.index_n_heads * c.index_head_dim
            indexer = IndexerParams(
                wq=self.linear(f"{name}.indexer.wq_b", c.q_lora_rank, index, (None, "heads")),
                weight=self.linear(
                    f"{name}.indexer.weights_proj", c.hidden_size, c.index_n_heads, ("width", None)
                ),
                compressor=self.compressor(f"{name}.indexer.compressor", ratio, c.index_head_dim),
            )
        return AttentionParams(
            sink=Leaf(f"{name}.attn_sink", (c.num_attention_heads,), jnp.float32, ("heads",)),
            wq_a=self.linear(f"{name}.wq_a", c.hidden_size, c.q_lora_rank, ("width", None)),
            q_norm=self.vector(f"{name}.q_norm.weight", c.q_lora_rank),
            wq_b=self.linear(f"{name}.wq_b", c.q_lora_rank, heads, (None, "heads")),
            wkv=self.linear(f"{name}.wkv", c.hidden_size, c.head_dim, ("width", None)),
            kv_norm=self.vector(f"{name}.kv_norm.weight", c.head_dim),
            wo_a=Leaf(
                f"{name}.wo_a.weight",
                (groups, heads // groups, c.o_lora_rank),
                self.dtype,
                ("heads", None, None),
                "groups",
            ),
            wo_b=self.linear(
                f"{name}.wo_b", groups * c.o_lora_rank, c.hidden_size, ("heads", "width")
            ),
            compressor=self.compressor(f"{name}.compressor", ratio, c.head_dim) if ratio else None,
            indexer=indexer,
        )

    def experts(self, name: str, size: int, stack: int | None) -> ExpertParams:
        def leaf(part: str, rows: int, cols: int, axes: tuple[str | None, str | None]) -> Leaf:
            if stack is None:
                return self.linear(f"{name}.{part}", rows, cols, axes)
            return Leaf(
                f"{name}.{{}}.{part}.weight",
                (stack, cols, rows),
                self.dtype,
                ("expert", *axes[::-1]),
                "experts",
            )

        hidden = self.cfg.hidden_size
        return ExpertParams(
            w1=leaf("w1", hidden, size, ("width", "inner")),
            w3=leaf("w3", hidden, size, ("width", "inner")),
            w2=leaf("w2", size, hidden, ("inner", "width")),
        )

    def moe(self, name: str, hashed: bool) -> MoeParams:
        c = self.cfg
        shared = c.n_shared_experts * c.moe_intermediate_size
        table = Leaf(
            f"{name}.gate.tid2eid", (c.vocab_size, c.num_experts_per_tok), jnp.int32, (None, None)
        )
        return MoeParams(
            gate=self.linear(f"{name}.gate", c.hidden_size, c.n_routed_experts, ("width", None)),
            bias=None
            if hashed
            else self.vector(f"{name}.gate.bias", c.n_routed_experts, jnp.float32),
            table=table if hashed else None,
            experts=self.experts(f"{name}.experts", c.moe_intermediate_size, c.n_routed_experts),
            shared=self.experts(f"{name}.shared_experts", shared, None),
        )

    def layer(self, name: str, ratio: int, hashed: bool) -> LayerParams:
        streams, hidden = self.cfg.hc_mult, self.cfg.hidden_size
        return LayerParams(
            attn_norm=self.vector(f"{name}.attn_norm.weight", hidden),
            ffn_norm=self.vector(f"{name}.ffn_norm.weight", hidden),
            hc_attn=self.hyper(f"{name}.hc_attn", streams * (2 + streams), 3),
            hc_ffn=self.hyper(f"{name}.hc_ffn", streams * (2 + streams), 3),
            attn=self.attention(f"{name}.attn", ratio),
            moe=self.moe(f"{name}.ffn", hashed),
        )

    def mtp(self, name: str, ratio: int) -> MtpParams:
        hidden = self.cfg.hidden_size
        return MtpParams(
            layer=self.layer(name, ratio, hashed=False),
            e_proj=self.linear(f"{name}.e_proj", hidden, hidden, ("width", None)),
            h_proj=self.linear(f"{name}.h_proj", hidden, hidden, ("width", None)),
            enorm=self.vector(f"{name}.enorm.weight", hidden),
            hnorm=self.vector(f"{name}.hnorm.weight", hidden),
            norm=self.vector(f"{name}.norm.weight", hidden),
            hc_head=self.head(f"{name}.hc_head"),
        )


def abstract(cfg: ModelConfig, dtype: Any = jnp.bfloat16) -> ModelParams:
    """The model's parameter tree with a `Leaf` in place of every array.

    Args:
        cfg: the model.
        dtype: of the tensors that the release keeps in bf16 or narrower; the hyper-connections,
            `ape`, sinks and router biases are float32 always.
    """
    table = _Table(cfg, dtype)
    return ModelParams(
        embed=Leaf("embed.weight", (cfg.vocab_size, cfg.hidden_size), dtype, ("vocab", "width")),
        head=table.linear("head", cfg.hidden_size, cfg.vocab_size, ("width", "vocab")),
        norm=table.vector("norm.weight", cfg.hidden_size),
        hc_head=table.head("hc_head"),
        layers=tuple(
            table.layer(f"layers.{i}", ratio, i < cfg.num_hash_layers)
            for i, ratio in enumerate(cfg.compress_ratios)
        ),
        mtp=tuple(table.mtp(f"mtp.{i}", ratio) for i, ratio in enumerate(cfg.mtp_ratios)),
    )


def count_parameters(cfg: ModelConfig) -> int:
    """Elements of all tensors, the hash tables' token ids left out."""
    leaves = [leaf for leaf in jax.tree.leaves(abstract(cfg)) if leaf.dtype != jnp.int32]
    return sum(math.prod(leaf.shape) for leaf in leaves)


def init(cfg: ModelConfig, key: Array, dtype: Any = jnp.float32) -> ModelParams:
    """Random parameters for training: unit-variance layers, streams that stay apart at first."""
    leaves, tree = jax.tree.flatten(abstract(cfg, dtype))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree, [_init_leaf(cfg, *pair) for pair in zip(leaves, keys, strict=True)]
    )


def _init_leaf(cfg: ModelConfig, leaf: Leaf, key: Array) -> Array:
    name, shape = leaf.name, leaf.shape
    if name.endswith("tid2eid"):
        ranks = jax.random.uniform(key, (shape[0], cfg.n_routed_experts))
        return jnp.argsort(ranks, axis=1)[:, : shape[1]].astype(leaf.dtype)
    if name.endswith("norm.weight"):
        return jnp.ones(shape, leaf.dtype)
    if name.endswith(("attn_sink", "gate.bias", ".ape")):
        return jnp.zeros(shape, leaf.dtype)
    if name.endswith("_scale"):
        return jnp.full(shape, 0.1, leaf.dtype)
    if name.endswith("_base"):
        streams = cfg.hc_mult
        base = 0.5 * jax.random.normal(key, shape, leaf.dtype)
        if shape[0] == streams:
            return base
        # The mixing matrix starts near the identity, or the four streams would be one.
        return base.at[2 * streams :].set(3.0 * jnp.eye(streams, dtype=leaf.dtype).reshape(-1))
    is_out_in = name == "embed.weight" or leaf.layout == "experts"
    fan_in = shape[-1] if is_out_in else shape[-2]
    return (jax.random.normal(key, shape) * fan_in**-0.5).astype(leaf.dtype)
