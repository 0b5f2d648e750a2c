"""The law that choices have to follow, by sorting, and how far drawn tokens are from it."""

from __future__ import annotations

import numpy as np


def law(logits, *, temperature=1.0, top_k=0, top_p=1.0):
    """Probabilities of one row by sorting, in float64; None if rounding could move the nucleus."""
    cooled = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-cooled, kind="stable")
    prob = np.exp(cooled[order] - cooled[order[0]])
    if top_k:
        prob[top_k:] = 0
    prob /= prob.sum()
    if top_p < 1:
        reached = np.cumsum(prob)
        if np.abs(reached - top_p).min() < 1e-5:
            return None
        prob[np.argmax(reached >= top_p) + 1 :] = 0
    law = np.zeros_like(prob)
    law[order] = prob / prob.sum()
    return law


def distance(tokens, want):
    """Total variation between drawn tokens and a law, and what chance alone makes of it."""
    size = tokens.size
    share = np.bincount(tokens.ravel(), minlength=want.size) / size
    floor = np.sqrt(want * (1 - want) / (2 * np.pi * size)).sum()
    return np.abs(share - want).sum() / 2, floor
