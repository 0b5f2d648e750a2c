"""Decoding as pure functions of one state: prefill, insert, and the speculative step in its loop.

    row = prefill(params, cfg, init_state(cfg, ...), prompt, valid, drafter=drafter)
    state = insert(state, row, slot)
    state = generate(params, cfg, state, steps=8, drafter=drafter)

A step proposes a tree, verifies it in one forward, keeps the longest path that the target agrees
with and lets the drafter look at it. Plain and linear decoding are the same step with other
drafters. Nothing in here leaves the device, and the state is donated to every function.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxspec.cache import Cache, LayerRows, extend, init_cache
from jaxspec.config import ModelConfig
from jaxspec.draft import Drafter
from jaxspec.model.forward import forward
from jaxspec.model.params import ModelParams
from jaxspec.sample import Noise, Sampling, choose, draw_noise, margin, perturb
from jaxspec.tree import DraftTree, TokenBlock
from jaxspec.verify import VerifyResult, next_tokens, walk


@struct.dataclass
class Emitted:
    """Tokens with what is known of each: in a buffer M, of one step P (leaves `[B, ...]`).

    A token's rank tells where it came from: r if it was the drafter's r-th best child of its
    parent, 0 if the target chose it undrafted. So a step's tokens are those of rank 1 or more up to
    and with the next one of rank 0, which only an end or a limit can cut off.
    """

    token: Array  # int32
    rank: Array  # int8
    offered: Array  # int8: children that the draft had at this place
    margin: Array | None  # float32, if recorded: of `sample.margin`


@struct.dataclass
class DecodeState:
    """B sequences while they are decoded, all leaves `[B, ...]`.

    A sequence that is done, or has not begun, costs no experts and commits nothing.
    """

    # Evolving.
    cache: Cache
    draft: Any  # the drafter's own
    root: Array  # [B] int32: the last emitted token; not in the cache yet
    done: Array  # [B] bool
    # What was asked for.
    sampling: Sampling
    seed: Array  # [B] uint32
    limit: Array  # [B] int32: tokens to emit at most
    # Output.
    output: Emitted  # M places
    count: Array  # [B] int32: tokens emitted


@struct.dataclass
class Verified:
    """What the target made of a tree."""

    block: TokenBlock
    features: Any
    rows: tuple[LayerRows, ...]
    result: VerifyResult  # cut at the end token and the limit
    emitted: Emitted  # P places, of which `result.count` count


@partial(jax.jit, static_argnames=("cfg", "max_len", "max_new", "drafter", "dtype", "margins"))
def init_state(
    cfg: ModelConfig,
    sampling: Sampling,
    seed: Array,
    limit: Array,
    *,
    max_len: int,
    max_new: int,
    drafter: Drafter,
    dtype: Any = jnp.float32,
    margins: bool = False,
) -> DecodeState:
    """The state of B sequences that have not begun.

    Args:
        cfg: of the model.
        sampling: of B sequences.
        seed: `[B]` uint32.
        limit: `[B]` int32 tokens to emit at most, `max_new` if it is above that.
        max_len: capacity of the cache. A sequence commits its prompt and all but the last of its
            emitted tokens; that this fits is for the caller to see to.
        max_new: places M of the output.
        drafter: whose state it holds.
        dtype: of the cache.
        margins: whether to record the margin of every choice.
    """
    batch = seed.shape[0]
    zero = jnp.zeros((batch, max_new), jnp.int8)
    return DecodeState(
        cache=init_cache(cfg, batch, max_len, dtype),
        draft=drafter.init(batch, max_len, dtype),
        root=jnp.zeros(batch, jnp.int32),
        done=jnp.ones(batch, bool),
        sampling=sampling,
        seed=jnp.asarray(seed, jnp.uint32),
        limit=jnp.minimum(jnp.asarray(limit, jnp.int32), max_new),
        output=Emitted(
            token=zero.astype(jnp.int32),
            rank=zero,
            offered=zero,
            margin=zero.astype(jnp.float32) if margins else None,
        ),
        count=jnp.zeros(batch, jnp.int32),
    )


@partial(jax.jit, static_argnames=("cfg", "drafter", "chunk", "impl"), donate_argnames=("state",))
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
    chunk = min(chunk, token.shape[1])
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
        result = VerifyResult(path=None, count=count, bonus=following)
        state = state.replace(
            draft=drafter.observe(params, state.draft, block, out.features, result),
            cache=extend(state.cache, out.rows, None, count),
            done=state.done & ~is_last,
        )
        return _emit(cfg, state, chosen, is_last.astype(jnp.int32))

    return lax.fori_loop(0, -(-valid.max() // chunk), run_chunk, state)


@partial(jax.jit, static_argnames=("cfg", "drafter", "impl"), donate_argnames=("state",))
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


@partial(jax.jit, static_argnames=("cfg", "drafter", "impl"), donate_argnames=("state",))
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


@partial(jax.jit, donate_argnames=("state",))
def insert(state: DecodeState, row: DecodeState, slot: int | Array) -> DecodeState:
    """Puts the one sequence of `row` into `slot`, whatever was there before."""

    def put(whole: Array, one: Array) -> Array:
        return lax.dynamic_update_index_in_dim(whole, one[0], slot, axis=0)

    return jax.tree.map(put, state, row)


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
    rank, offered = _place_among_siblings(tree, result)
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
    return _emit(cfg, state.replace(cache=cache), verified.emitted, result.count)


def cut(result: VerifyResult, token: Array, *, eos: int, room: Array) -> VerifyResult:
    """Ends a step's tokens `[B, P]` after the first end token, and after `room [B]` of them.

    The last token that is kept becomes the bonus: it is emitted and has no row yet, whether it was
    drafted or not.
    """
    place = jnp.arange(token.shape[1])
    is_end = (token == eos) & (place < result.count[:, None])
    until_end = jnp.where(is_end.any(1), jnp.argmax(is_end, axis=1) + 1, token.shape[1])
    count = jnp.minimum(jnp.minimum(result.count, until_end), room).astype(jnp.int32)
    last = jnp.maximum(count - 1, 0)[:, None]
    return result.replace(count=count, bonus=jnp.take_along_axis(token, last, axis=1)[:, 0])


def _choose_first(logits: Array, state: DecodeState, position: Array) -> Emitted:
    """The token after a prompt: `logits [B, 1, V]`, its `position [B]`."""
    asked = (logits, state.sampling, state.seed, position[:, None])
    token = choose(*asked)
    none = jnp.zeros(token.shape, jnp.int8)
    gap = None if state.output.margin is None else margin(*asked)
    return Emitted(token, rank=none, offered=none, margin=gap)


def _place_among_siblings(tree: DraftTree, result: VerifyResult) -> tuple[Array, Array]:
    """Rank of each token that a step emits, and how many were drafted in its place, `[B, P]`."""
    index = jnp.arange(tree.token.shape[1])
    node, other = tree.parent[:, :, None], tree.parent[:, None]
    siblings = (node == other) & tree.live[:, None] & (index[:, None] >= index)
    rank = siblings.sum(-1, dtype=jnp.int8)
    children = ((index[:, None] == other) & tree.live[:, None]).sum(-1, dtype=jnp.int8)
    place = jnp.arange(result.path.shape[1])
    below = jnp.take_along_axis(rank, jnp.roll(result.path, -1, axis=1), axis=1)
    is_drafted = place < result.count[:, None] - 1
    offered = jnp.take_along_axis(children, result.path, axis=1)
    return jnp.where(is_drafted, below, 0), offered


def _emit(cfg: ModelConfig, state: DecodeState, new: Emitted, count: Array) -> DecodeState:
    """Appends the first `count [B]` of the new tokens to the output."""
    size = state.output.token.shape[1]
    step = jnp.arange(new.token.shape[1])
    place = jnp.where(step < count[:, None], state.count[:, None] + step, size)

    def write(buffer: Array, value: Array) -> Array:
        put = jax.vmap(lambda row, place, value: row.at[place].set(value, mode="drop"))
        return put(buffer, place, value)

    last = jnp.maximum(count - 1, 0)[:, None]
    newest = jnp.take_along_axis(new.token, last, axis=1)[:, 0]
    total = state.count + count
    is_end = (newest == cfg.eos_token_id) | (total >= state.limit)
    return state.replace(
        root=jnp.where(count > 0, newest, state.root),
        done=state.done | (count > 0) & is_end,
        output=jax.tree.map(write, state.output, new),
        count=total,
    )
