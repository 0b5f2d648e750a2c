"""The mixture of experts: hash- or bias-routed experts and a shared one (report 2.1)."""

from __future__ import annotations

import numpy as np

from .basic import Array, Tensors, sigmoid
from .config import Config
from .topk import Selection, select


def route(weights: Tensors, config: Config, x: Array, token: int) -> tuple[Selection, Array]:
    """Experts of one token and their weights.

    The learned scores weigh the experts in every layer. What differs is the choice: hash layers
    look the token up in a table, the others take the best scores after adding a balancing bias.

    Returns:
      The selection of `num_experts_per_tok` experts, and their weights.
    """
    scores = np.sqrt(np.logaddexp(0.0, weights["gate.weight"] @ x))
    if "gate.tid2eid" in weights:
        chosen = Selection(weights["gate.tid2eid"][token], np.inf)
    else:
        chosen = select(scores + weights["gate.bias"], config.num_experts_per_tok)
    picked = scores[chosen.ids]
    return chosen, picked / picked.sum() * config.routed_scaling_factor


def expert(weights: Tensors, name: str, x: Array, weight: float, limit: float) -> Array:
    """Clamped SwiGLU; the routing weight scales the activation, before the last matrix."""
    gate = np.minimum(weights[f"{name}.w1.weight"] @ x, limit)
    up = np.clip(weights[f"{name}.w3.weight"] @ x, -limit, limit)
    return weights[f"{name}.w2.weight"] @ (weight * gate * sigmoid(gate) * up)


def moe(weights: Tensors, config: Config, x: Array, token: int) -> tuple[Array, Selection]:
    """Output [E] of the experts (tensors under `ffn.`) for x [E], and the experts chosen."""
    chosen, routing = route(weights, config, x, token)
    y = expert(weights, "shared_experts", x, 1.0, config.swiglu_limit)
    for index, weight in zip(chosen.ids, routing, strict=True):
        y = y + expert(weights, f"experts.{index}", x, weight, config.swiglu_limit)
    return y, chosen
