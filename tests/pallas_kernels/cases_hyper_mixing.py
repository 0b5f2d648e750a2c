"""The shapes on which every kernel of `hyper_mixing` is held against its definition."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.hyper_mixing import ref

TOLERANCE = 2.0**-20
"""Greatest error as a fraction of the largest weight, 1 or 2: of float32's 24 bits a sum or a
quotient in another order takes some; alternating divisions forget them, and do not add them up."""


class Case(NamedTuple):
    """Sizes of one call; V4 has 4 streams, 20 iterations and an eps of 1e-6."""

    name: str
    outer: tuple[int, ...]  # axes of the features but the last
    streams: int = 4
    iterations: int = 20
    eps: float = 1e-6
    spread: float = 2.0  # standard deviation of the features

    @property
    def width(self) -> int:
        """Features of a row."""
        return self.streams * (2 + self.streams)


# The first ones are the quick suite. A kernel takes 128 rows a lane each, and 1,024 a step.
CASES = (
    Case("tree", (2, 8)),
    Case("coarse-eps-far-apart-above-a-step", (1025,), 2, iterations=2, eps=1e-2, spread=30.0),
    Case("two-iterations-coarse-eps", (1, 6), iterations=2, eps=1e-2),
    Case("one-iteration-coarse-eps", (1, 5), iterations=1, eps=1e-2),
    Case("one-row", (1, 1)),
    Case("two-streams", (3, 7), streams=2),
    Case("three-streams", (1, 16), streams=3, iterations=7),
    Case("wide-tree", (1, 64)),
    Case("batch", (64, 8)),
    Case("one-block", (128,)),
    Case("above-a-block", (129,)),
    Case("chunk", (2, 512)),
    Case("above-a-step", (1025,)),
    Case("steps", (3, 700)),
    Case("far-apart", (2, 8), spread=30.0),
    Case("equal", (1, 8), spread=0.0),
)
QUICK = CASES[:2]


class Operands(NamedTuple):
    """Arrays of a call."""

    features: Any
    scale: Any
    base: Any


def make(case: Case, seed: int = 0) -> Operands:
    """Random operands; the three scales are far from each other."""
    rng = np.random.default_rng([seed, *case.outer, case.streams])
    features = rng.standard_normal((*case.outer, case.width)) * case.spread
    base = rng.standard_normal(case.width) * case.spread
    scale = np.array([0.5, -1.5, 1.0])
    return Operands(*(jnp.asarray(x, jnp.float32) for x in (features, scale, base)))


def static(case: Case) -> dict[str, Any]:
    """Static arguments of a call."""
    return {"streams": case.streams, "iterations": case.iterations, "eps": case.eps}


def check(case: Case, operands: Operands, got: Any) -> None:
    """Holds a result, and the definition's, against plain loops in float64."""
    wanted = _row_by_row(case, operands)
    for found in (ref.hyper_mixing(*operands, **static(case)), got):
        for x, want in zip(found, wanted, strict=True):
            assert x.dtype == jnp.float32
            assert x.shape == want.shape
            np.testing.assert_allclose(np.asarray(x), want, rtol=0, atol=2 * TOLERANCE)


def _row_by_row(case: Case, operands: Operands) -> list[np.ndarray]:
    s, eps = case.streams, case.eps
    u, scale, base = (np.asarray(x, np.float64) for x in operands)
    rows = []
    for row in u.reshape(-1, case.width):
        pre = 1 / (1 + np.exp(-(row[:s] * scale[0] + base[:s]))) + eps
        post = 2 / (1 + np.exp(-(row[s : 2 * s] * scale[1] + base[s : 2 * s])))
        logits = (row[2 * s :] * scale[2] + base[2 * s :]).reshape(s, s)
        mix = np.exp(logits - logits.max(1, keepdims=True))
        mix = mix / mix.sum(1, keepdims=True) + eps
        for step in range(2 * case.iterations - 1):
            mix = mix / (mix.sum(step % 2, keepdims=True) + eps)
        rows.append((pre, post, mix))
    return [np.stack(part).reshape(*case.outer, *part[0].shape) for part in zip(*rows, strict=True)]


def run(kernel: Any, case: Case) -> Any:
    """A function of the arrays alone."""
    return lambda *arrays: kernel(*arrays, **static(case))


def avals(case: Case) -> Operands:
    """Shapes and dtypes of a call."""
    shape = jax.ShapeDtypeStruct
    sizes = ((*case.outer, case.width), (3,), (case.width,))
    return Operands(*(shape(size, jnp.float32) for size in sizes))
