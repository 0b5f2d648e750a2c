"""The state of sequences while they are decoded: made, filled slot by slot, and added to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array, lax

from jaxspec.cache import Cache
from jaxspec.config import ModelConfig
from jaxspec.draft import Drafter
from jaxspec.model.entries import cache_for
from jaxspec.sample import Sampling


class Emitted(struct.PyTreeNode):
    """Tokens with what is known of each: in a buffer M, of one step P (leaves `[B, ...]`).

    A token's rank tells where it came from: r if it was the drafter's r-th best child of its
    parent, 0 if the target chose it undrafted. So a step's tokens are those of rank 1 or more up to
    and with the next one of rank 0, which only an end or a limit can cut off.
    """

    token: Array  # int32
    rank: Array  # int8
    offered: Array  # int8: children that the draft had at this place
    margin: Array | None  # float32, if recorded: of `sample.margin`


class DecodeState(struct.PyTreeNode):
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


@jax.jit(static_argnames=("cfg", "max_len", "max_new", "drafter", "dtype", "margins", "impl"))
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
    impl: str = "auto",
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
        impl: of the kernels that will read the cache.
    """
    batch = seed.shape[0]
    # What is donated later must not be the caller's own arrays.
    sampling, seed = jax.tree.map(jnp.copy, (sampling, jnp.asarray(seed, jnp.uint32)))
    zero = jnp.zeros((batch, max_new), jnp.int8)
    return DecodeState(
        cache=cache_for(impl, cfg, batch, max_len, dtype),
        draft=drafter.init(batch, max_len, dtype),
        root=jnp.zeros(batch, jnp.int32),
        done=jnp.ones(batch, bool),
        sampling=sampling,
        seed=seed,
        limit=jnp.minimum(jnp.asarray(limit, jnp.int32), max_new),
        output=Emitted(
            token=zero.astype(jnp.int32),
            rank=zero,
            offered=zero,
            margin=zero.astype(jnp.float32) if margins else None,
        ),
        count=jnp.zeros(batch, jnp.int32),
    )


@jax.jit(donate_argnames=("state",))
def insert(state: DecodeState, row: DecodeState, slot: int | Array) -> DecodeState:
    """Puts the one sequence of `row` into `slot`, whatever was there before."""

    def put(whole: Array, one: Array) -> Array:
        return lax.dynamic_update_index_in_dim(whole, one[0], slot, axis=0)

    return jax.tree.map(put, state, row)


def emit(cfg: ModelConfig, state: DecodeState, new: Emitted, count: Array) -> DecodeState:
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
