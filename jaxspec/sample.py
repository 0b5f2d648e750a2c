"""The target's own token at a node: `argmax(log p + g)`.

`p` is the model's distribution after temperature, top-k and top-p; `g` is Gumbel noise, a pure
function of the request's seed and of the absolute position of **the token that is chosen** (the
node that the logits belong to stands one position earlier). The noise does not depend on the
prefix, so one draw serves all nodes of a depth, and each node's choice is still an exact sample of
`p` (the Gumbel-max rule); it depends on nothing else, so a request's tokens are the same in any
tree, batch slot or step. The drafter adds the same noise to its own log-probabilities.

Source: the Gumbel-max trick; its coupled use for speculative decoding is Daliri et al.,
arXiv 2408.07978.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array, lax

from jaxspec.errors import UsageError
from jaxspec.limits import INT32_MAX

MASKED = float(np.finfo(np.float32).min)
"""Score of a token that cannot be chosen: finite, since zero times infinity is not a number."""


class Sampling(struct.PyTreeNode):
    """How each sequence chooses its tokens (leaves `[B]`)."""

    temperature: Array  # [B] float32 > 0; not read where greedy
    greedy: Array  # [B] bool: the most probable token; nothing else is read
    top_k: Array  # [B] int32: the k most probable tokens; 0 keeps all
    top_p: Array  # [B] float32 in (0, 1]: the nucleus; 1 keeps all

    @staticmethod
    def create(
        batch: int,
        *,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
    ) -> Sampling:
        """Settings of `batch` sequences, each given once for all or as one value a sequence.

        A temperature of 0 means greedy.

        Raises:
            UsageError: a value out of its range, or not `batch` of them.
        """
        heat = _spread("temperature", temperature, batch, np.float32)
        count = _spread("top_k", top_k, batch, np.int64)
        mass = _spread("top_p", top_p, batch, np.float32)
        _require(bool(np.all(np.isfinite(heat) & (heat >= 0))), "temperature", "0 or more", heat)
        fits = bool(np.all((count >= 0) & (count <= INT32_MAX)))
        _require(fits, "top_k", f"0 (off) or up to {INT32_MAX}", count)
        _require(bool(np.all((mass > 0) & (mass <= 1))), "top_p", "above 0 and at most 1", mass)
        greedy = heat == 0
        return Sampling(
            temperature=jnp.asarray(np.where(greedy, np.float32(1), heat)),
            greedy=jnp.asarray(greedy),
            top_k=jnp.asarray(count, jnp.int32),
            top_p=jnp.asarray(mass),
        )


class Noise(struct.PyTreeNode):
    """Gumbel noise of P consecutive positions: row p of sequence b is that of `first[b] + p`."""

    value: Array  # [B, P, V] float32; zero if no sequence samples
    first: Array  # [B] int32


def gumbel_noise(seed: Array, position: Array, vocab: int) -> Array:
    """Noise for choosing the tokens at `position`.

    Args:
        seed: `[B]` uint32, the request's seed.
        position: `[B, N]` int32, absolute.
        vocab: V.

    Returns:
        `[B, N, V]` float32, a pure function of (seed, position).
    """

    def draw(seed: Array, position: Array) -> Array:
        # The generator is named: a stream must not change with a global setting of jax.
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        # `jax.random.gumbel` uses 23 bits of a word, so that nothing is ever above 16, which
        # starves the tail of a large vocabulary, or two words at twice the cost. A small uniform
        # makes large noise here, and small floats are fine enough for all 32 bits of one word.
        uniform = (jax.random.bits(key, (vocab,)).astype(jnp.float32) + 0.5) * 2.0**-32
        return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24)))

    rows = jax.vmap(jax.vmap(draw, (None, 0)))
    return rows(jnp.asarray(seed, jnp.uint32), jnp.asarray(position, jnp.int32))


def draw_noise(sampling: Sampling, seed: Array, first: Array, levels: int, vocab: int) -> Noise:
    """Noise of the positions `first [B]`, ..., `first + levels - 1`, each drawn once.

    For a step whose root stands at position `length`, `first` is `length + 1` and `levels` is the
    largest depth of the tree plus one: its choices, and the drafter's children, need no other.
    """
    first = jnp.asarray(first, jnp.int32)
    position = first[:, None] + jnp.arange(levels, dtype=jnp.int32)
    value = lax.cond(
        jnp.all(sampling.greedy),
        lambda: jnp.zeros((*position.shape, vocab), jnp.float32),
        lambda: gumbel_noise(seed, position, vocab),
    )
    return Noise(value=value, first=first)


def perturb(
    logits: Array,
    sampling: Sampling,
    seed: Array,
    position: Array,
    *,
    noise: Noise | None = None,
) -> Array:
    """Scores whose argmax is the choice (ties: the lowest id).

    They are log-probabilities after temperature, top-k and top-p, plus noise where the sequence is
    not greedy, up to one constant a node (before the noise, the most probable token has 0). Greedy
    sequences have the plain log-probabilities up to that constant, in exactly the logits' order.

    Args:
        logits: `[B, N, V]`.
        sampling: of the B sequences.
        seed: `[B]` uint32.
        position: `[B, N]` int32, absolute position of the token being chosen: the node's own plus
            one.
        noise: of `draw_noise`, covering every position of a valid node; without it each node
            draws its own.

    Returns:
        `[B, N, V]` float32; a token that cannot be chosen has about `MASKED`.
    """
    with jax.named_scope("perturb"):
        scores = _log_prob(logits)
        return lax.cond(
            jnp.all(sampling.greedy),
            lambda: scores,
            lambda: _perturbed(scores, sampling, seed, position, noise),
        )


def choose(
    logits: Array,
    sampling: Sampling,
    seed: Array,
    position: Array,
    *,
    noise: Noise | None = None,
) -> Array:
    """The target's own token at each node: `[B, N]` int32, the argmax of `perturb`.

    If all sequences are greedy, no noise is drawn and nothing but the argmax is computed.
    """
    with jax.named_scope("choose"):
        return lax.cond(
            jnp.all(sampling.greedy),
            lambda: jnp.argmax(logits, -1).astype(jnp.int32),
            lambda: jnp.argmax(
                _perturbed(_log_prob(logits), sampling, seed, position, noise), -1
            ).astype(jnp.int32),
        )


BOUNDARY = 1e-4
"""A nucleus that is wider or narrower by this share of probability may be the same in float32."""


def margin(
    logits: Array,
    sampling: Sampling,
    seed: Array,
    position: Array,
    *,
    noise: Noise | None = None,
) -> Array:
    """What each choice rests on: the gap between its score and the next best, `[B, N]` float32.

    0 where a top-p that differs by `BOUNDARY` would have chosen another token. A choice with a
    small margin may fall either way where the logits are rounded otherwise.
    """

    def choose_at(scale: float) -> Array:
        moved = sampling.replace(top_p=jnp.where(sampling.top_p < 1, sampling.top_p * scale, 1))
        return choose(logits, moved, seed, position, noise=noise)

    with jax.named_scope("margin"):
        best, _ = lax.top_k(perturb(logits, sampling, seed, position, noise=noise), 2)
        same = lax.cond(
            jnp.any((sampling.top_p < 1) & ~sampling.greedy),
            lambda: choose_at(1 - BOUNDARY) == choose_at(1 + BOUNDARY),
            lambda: jnp.ones(position.shape, bool),
        )
        return jnp.where(same, best[..., 0] - best[..., 1], 0)


def _log_prob(logits: Array) -> Array:
    """Log-probabilities up to a constant; the shift by the maximum keeps their order exactly."""
    logits = logits.astype(jnp.float32)
    return jnp.maximum(logits - logits.max(-1, keepdims=True), MASKED)


def _perturbed(
    scores: Array, sampling: Sampling, seed: Array, position: Array, noise: Noise | None
) -> Array:
    """`perturb` for a batch in which some sequence samples."""
    # The maximum is 0, so a small temperature overflows downwards only.
    cooled = jnp.maximum(scores / sampling.temperature[:, None, None], MASKED)
    count = jnp.where(sampling.top_k > 0, sampling.top_k.astype(jnp.float32), jnp.inf)
    mass = jnp.where(sampling.top_p < 1, sampling.top_p, jnp.inf)
    cooled = _narrow(cooled, jnp.where(sampling.greedy, jnp.inf, count), jnp.ones_like)
    cooled = _narrow(cooled, jnp.where(sampling.greedy, jnp.inf, mass), jax.nn.softmax)
    if noise is None:
        gumbel = gumbel_noise(seed, position, scores.shape[-1])
    else:
        # A node outside the noise's positions is padding; any row serves it.
        row = jnp.clip(position - noise.first[:, None], 0, noise.value.shape[1] - 1)
        gumbel = jax.vmap(lambda value, row: value[row])(noise.value, row)
    return jnp.where(sampling.greedy[:, None, None], scores, cooled + gumbel)


def _narrow(scores: Array, need: Array, weigh: Callable[[Array], Array]) -> Array:
    """Masks all but the most probable tokens whose weights reach `need [B]`, if any is finite.

    Top-k weighs each token 1. Top-p weighs it by its probability among those that top-k left: the
    nucleus is the smallest set of most probable tokens that reaches top_p. Among equals the lowest
    ids are kept.
    """
    return lax.cond(
        jnp.any(need < jnp.inf),
        lambda: jnp.where(_heaviest(scores, weigh(scores), need[:, None, None]), scores, MASKED),
        lambda: scores,
    )


def _heaviest(scores: Array, weight: Array, need: Array) -> Array:
    """The shortest run of tokens, by falling score and rising id, whose weights reach `need`.

    Bisects the bit pattern of the score instead of sorting: 31 sums over V, which are cheaper than
    a sort on every backend, and are sums still when V is sharded.

    Args:
        scores: `[..., V]` float32, at most 0; equal scores have equal weights.
        weight: `[..., V]` float32, at least 0.
        need: `[..., 1]` float32; infinity keeps everything, and at least one token is kept.
    """
    need = jnp.maximum(need, jnp.finfo(jnp.float32).tiny)
    # The bits of a float that is not negative order as it does; 0 is the most probable token.
    distance = lax.bitcast_convert_type(jnp.abs(scores), jnp.int32)

    def within(limit: Array) -> Array:
        return jnp.sum(jnp.where(distance < limit, weight, 0), -1, keepdims=True)

    def refine(step: int, limit: Array) -> Array:
        trial = limit | (jnp.int32(1) << (30 - step))
        return jnp.where(within(trial) < need, trial, limit)

    # The largest limit whose tokens do not reach `need`: the boundary lies at this distance.
    limit = lax.fori_loop(0, 31, refine, jnp.zeros_like(distance[..., :1]))
    tie = distance == limit
    earlier = jnp.cumsum(tie, -1, dtype=jnp.int32) - tie
    share = jnp.max(jnp.where(tie, weight, 0), -1, keepdims=True)
    return (distance < limit) | (tie & (within(limit) + earlier * share < need))


def _spread(
    name: str, value: float | Sequence[float], batch: int, dtype: type[np.generic]
) -> np.ndarray:
    """One value a sequence, from one or from `batch` of them."""
    given = np.asarray(value)
    if given.ndim > 1 or (given.ndim == 1 and len(given) != batch):
        raise UsageError(f"{name} needs one value or {batch}, one a sequence, not {value!r}")
    if np.issubdtype(dtype, np.integer) and not np.issubdtype(given.dtype, np.integer):
        raise UsageError(f"{name} has to be a whole number, not {value!r}")
    return np.broadcast_to(given, (batch,)).astype(dtype)


def _require(fits: bool, name: str, wanted: str, given: np.ndarray) -> None:
    if not fits:
        raise UsageError(f"{name} has to be {wanted}, not {given.tolist()}")
