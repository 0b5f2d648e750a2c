"""Muon for the matrices inside the blocks, Adam for the rest, router biases by expert load."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from optax.contrib import MuonDimensionNumbers, muon

from jaxspec.config import ModelConfig
from jaxspec.model.params import Leaf, ModelParams, abstract
from jaxspec.train.recipe import Recipe

_ADAM = ("head.weight", "gate.weight", "_fn")


def split_trainable(params: ModelParams) -> tuple[ModelParams, ModelParams]:
    """The floating-point leaves and the integer ones, each with None where the other has one."""
    floats = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, params)
    rest = jax.tree.map(lambda x: None if jnp.issubdtype(x.dtype, jnp.floating) else x, params)
    return floats, rest


def join(floats: ModelParams, rest: ModelParams) -> ModelParams:
    """Inverse of `split_trainable`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, floats, rest, is_leaf=lambda x: x is None
    )


def learning_rate(recipe: Recipe, peak: float) -> optax.Schedule:
    """Warm-up, plateau, linear decay."""
    fall = max(int(recipe.steps * recipe.decay), 1)
    flat = max(recipe.steps - recipe.warmup - fall, 0)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, recipe.warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, peak * recipe.floor, fall),
        ],
        [recipe.warmup, recipe.warmup + flat],
    )


def make_optimizer(cfg: ModelConfig, recipe: Recipe) -> optax.GradientTransformation:
    """The optimizer for the floating-point leaves of `cfg`'s parameters."""
    table = abstract(cfg)
    floats = jax.tree.map(lambda leaf: None if leaf.dtype == jnp.int32 else leaf, table)
    return optax.chain(
        optax.clip_by_global_norm(recipe.clip),
        muon(
            learning_rate(recipe, recipe.muon_rate),
            adam_learning_rate=learning_rate(recipe, recipe.adam_rate),
            adam_b2=0.95,
            weight_decay=recipe.weight_decay,
            muon_weight_dimension_numbers=jax.tree.map(_dimensions, floats),
        ),
    )


def _dimensions(leaf: Leaf) -> MuonDimensionNumbers | None:
    """Which axes Muon orthogonalises: the last two; leading ones are independent matrices."""
    matrix = leaf.layout in ("transpose", "groups", "experts") and not leaf.name.endswith(_ADAM)
    if not matrix:
        return None
    first, last = len(leaf.shape) - 2, len(leaf.shape) - 1
    if leaf.layout == "experts":  # [out, in]
        first, last = last, first
    return MuonDimensionNumbers(reduction_axis=first, output_axis=last)


def balance(params: ModelParams, load: tuple[Array, ...], rate: float) -> ModelParams:
    """Moves each `gate.bias` a step towards even load (auxiliary-loss-free, arXiv 2408.15664)."""

    def move(layer: Any, count: Array) -> Any:
        if layer.moe.bias is None:
            return layer
        bias = layer.moe.bias + rate * jnp.sign(count.mean() - count)
        return layer.replace(moe=layer.moe.replace(bias=bias))

    loads = iter(load)
    layers = tuple(move(layer, next(loads)) for layer in params.layers)
    mtp = tuple(block.replace(layer=move(block.layer, next(loads))) for block in params.mtp)
    return params.replace(layers=layers, mtp=mtp)
