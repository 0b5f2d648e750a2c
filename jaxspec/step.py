"""Decoding as pure functions of one state: prefill, insert, and the speculative step in its loop.

    row = prefill(params, cfg, init_state(cfg, ...), prompt, valid, drafter=drafter)
    state = insert(state, row, slot)
    state = generate(params, cfg, state, steps=8, drafter=drafter)

A step proposes a tree, verifies it in one forward, keeps the longest path that the target agrees
with and lets the drafter look at it. Plain and linear decoding are the same step with other
drafters. Nothing in here leaves the device, and the state is donated to every function.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxspec.cache import LayerRows, extend
from jaxspec.config import ModelConfig
from jaxspec.draft import Drafter
from jaxspec.draft.plain import PLAIN
from jaxspec.model.forward import forward
from jaxspec.model.params import ModelParams
from jaxspec.sample import Noise, choose, draw_noise, margin, perturb
from jaxspec.state import DecodeState, Emitted, emit
from jaxspec.tree import DraftTree, TokenBlock
from jaxspec.verify import VerifyResult, cut, next_tokens, ranks, walk


class Verified(struct.PyTreeNode):
    """What the target made of a tree."""

    block: TokenBlock
    features: Any
    rows: tuple[LayerRows, ...]
    result: VerifyResult  # cut at the end token and the limit
    emitted: Emitted  # P places, of which `result.count` count


def prefill(
    params: ModelParams,
    cfg: ModelConfig,
    state: DecodeState,
    token: Array,
    valid: Array,
    *,
    drafter: Drafter,
    chunk: int = 512,
    impl: str = "auto",
) -> DecodeState:
    """Commits the prompts of sequences that have not begun, and emits the first token of each.

    Args:
        params: of the model.
        cfg: of the model.
        state: of `init_state`.
        token: `[B, T]` prompts, padded at the end.
        valid: `[B]` their lengths; a sequence of length 0 stays as it is.
        drafter: of `init_state`.
        chunk: tokens of one forward. As many forwards are run as the longest prompt needs.
        impl: of the kernels.
    """
    drafter, chunk = observer(drafter), min(chunk, token.shape[1])
    return _prefill(params, cfg, state, token, valid, drafter=drafter, chunk=chunk, impl=impl)


def observer(drafter: Drafter) -> Drafter:
    """The drafter as a prefill needs it, which drafts nothing.

    Drafters that differ only in what they propose are one observer and share its compilation.
    """
    return drafter._replace(propose=PLAIN.propose, depth=PLAIN.depth)


@jax.jit(static_argnames=("cfg", "drafter", "chunk", "impl"), donate_argnames=("state",))
def _prefill(
    params: ModelParams,
    cfg: ModelConfig,
    state: DecodeState,
    token: Array,
    valid: Array,
    *,
    drafter: Drafter,
    chunk: int,
    impl: str,
) -> DecodeState:
    rows = jnp.broadcast_to(jnp.arange(chunk, dtype=jnp.int32), (token.shape[0], chunk))
    padded = jnp.pad(token, ((0, 0), (0, -token.shape[1] % chunk + 1)))

    def run_chunk(index: Array, state: DecodeState) -> DecodeState:
        start = index * chunk
        piece = lax.dynamic_slice_in_dim(padded, start, chunk + 1, axis=1)
        count = jnp.clip(valid - start, 0, chunk)
        is_last = (count > 0) & (start + chunk >= valid)
        block = TokenBlock.chain(piece[:, :-1], state.cache.length, count)
        out = forward(
            params, cfg, state.cache, block, logits="last", features=drafter.features, impl=impl
        )
        chosen = _choose_first(out.logits, state, block.length + count)
        # The drafter's last row needs the token after the chunk: the next chunk's first, or ours.
        following = jnp.where(is_last, chosen.token[:, 0], piece[:, -1])
        result = VerifyResult(path=rows, count=count, bonus=following)
        state = state.replace(
            draft=drafter.observe(params, state.draft, block, out.features, result),
            cache=extend(state.cache, out.rows, None, count),
            done=state.done & ~is_last,
        )
        return emit(cfg, state, chosen, is_last.astype(jnp.int32))

    return lax.fori_loop(0, -(-valid.max() // chunk), run_chunk, state)


@jax.jit(static_argnames=("cfg", "drafter", "impl"), donate_argnames=("state",))
def speculative_step(
    params: ModelParams,
    cfg: ModelConfig,
    state: DecodeState,
    *,
    drafter: Drafter,
    impl: str = "auto",
) -> DecodeState:
    """Emits one token or more of every sequence that is not done, with one forward of the target.

    The tokens are those of plain decoding, whatever the drafter proposes.
    """
    tree, noise = propose(params, cfg, state, drafter=drafter)
    verified = verify(params, cfg, state, tree, noise, drafter=drafter, impl=impl)
    draft = observe(params, state, verified, drafter=drafter)
    return commit(cfg, state, verified).replace(draft=draft)


@jax.jit(static_argnames=("cfg", "drafter", "impl"), donate_argnames=("state",))
def generate(
    params: ModelParams,
    cfg: ModelConfig,
    state: DecodeState,
    *,
    steps: int | Array,
    refill: bool | Array = False,
    drafter: Drafter,
    impl: str = "auto",
) -> DecodeState:
    """Steps on the device until all sequences are done, at most `steps` times.

    With `refill` it also returns as soon as one more of them is done, so that its slot can be
    given to another. Both are traced: changing them compiles nothing.
    """
    held = state.done

    def is_running(carry: tuple[Array, DecodeState]) -> Array:
        step, state = carry
        freed = jnp.any(state.done & ~held)
        return (step < steps) & ~jnp.all(state.done) & ~(refill & freed)

    def advance(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        step, state = carry
        return step + 1, speculative_step(params, cfg, state, drafter=drafter, impl=impl)

    return lax.while_loop(is_running, advance, (jnp.int32(0), state))[1]


def propose(
    params: ModelParams, cfg: ModelConfig, state: DecodeState, *, drafter: Drafter
) -> tuple[DraftTree, Noise]:
    """The draft, and the noise of the positions that it may reach, drawn once for the step."""
    length = state.cache.length
    noise = draw_noise(state.sampling, state.seed, length + 1, drafter.depth + 1, cfg.vocab_size)

    def score(logits: Array, position: Array) -> Array:
        return perturb(logits, state.sampling, state.seed, position, noise=noise)

    with jax.named_scope("propose"):
        tree = drafter.propose(
            params, state.draft, state.root, length, live=~state.done, score=score
        )
    return tree, noise


def verify(
    params: ModelParams,
    cfg: ModelConfig,
    state: DecodeState,
    tree: DraftTree,
    noise: Noise,
    *,
    drafter: Drafter,
    impl: str = "auto",
) -> Verified:
    """One forward over the tree, the target's choice at each node, and the path that agrees."""
    block = TokenBlock.tree(tree, state.cache.length)
    out = forward(params, cfg, state.cache, block, features=drafter.features, impl=impl)
    asked = (out.logits, state.sampling, state.seed, block.position + 1)
    result = walk(tree, choose(*asked, noise=noise), depth=drafter.depth)
    token = next_tokens(tree.token, result)
    rank, offered = ranks(tree, result)
    emitted = Emitted(token, rank, offered, margin=None)
    if state.output.margin is not None:
        gap = margin(*asked, noise=noise)
        emitted = emitted.replace(margin=jnp.take_along_axis(gap, result.path, axis=1))
    result = cut(result, token, eos=cfg.eos_token_id, room=state.limit - state.count)
    return Verified(block, out.features, out.rows, result, emitted)


def observe(
    params: ModelParams, state: DecodeState, verified: Verified, *, drafter: Drafter
) -> Any:
    """The drafter's state after what was verified."""
    with jax.named_scope("observe"):
        return drafter.observe(
            params, state.draft, verified.block, verified.features, verified.result
        )


def commit(cfg: ModelConfig, state: DecodeState, verified: Verified) -> DecodeState:
    """Appends the accepted rows, the only write of the cache, and emits their tokens."""
    result = verified.result
    cache = extend(state.cache, verified.rows, result.path, result.count)
    return emit(cfg, state.replace(cache=cache), verified.emitted, result.count)


def _choose_first(logits: Array, state: DecodeState, position: Array) -> Emitted:
    """The token after a prompt: `logits [B, 1, V]`, its `position [B]`."""
    asked = (logits, state.sampling, state.seed, position[:, None])
    token = choose(*asked)
    none = jnp.zeros(token.shape, jnp.int8)
    gap = None if state.output.margin is None else margin(*asked)
    return Emitted(token, rank=none, offered=none, margin=gap)
