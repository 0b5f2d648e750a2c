"""The training loop: resumable, observable, and never without its best weights on disk."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxspec.compiler import compiler_options
from jaxspec.config import ModelConfig
from jaxspec.errors import UsageError
from jaxspec.model.params import ModelParams, init
from jaxspec.resources import model_dir
from jaxspec.text import Tokenizer
from jaxspec.train.data import Batches, dev_batches, read_sets
from jaxspec.train.folder import RunFolder, open_folder
from jaxspec.train.loss import Blank, Loss, measure
from jaxspec.train.optimizer import balance, join, make_optimizer, split_trainable
from jaxspec.train.recipe import Recipe

DEV_DOCUMENTS = 32
"""Documents of each dev set that an evaluation reads."""


class TrainState(NamedTuple):
    """Everything that a resumed run needs."""

    params: ModelParams
    optimizer: Any
    best: jax.Array  # [] float32: lowest mean dev loss so far


def train_step(
    state: TrainState,
    blank: Blank,
    tokens: jax.Array,
    step: jax.Array,
    *,
    cfg: ModelConfig,
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
) -> tuple[TrainState, Loss]:
    """One update on `tokens [batch, T]`.

    Gradients are summed over slices of `micro` sequences: what a few sequences need stays in the
    processor's cache.
    """
    key = jax.random.fold_in(jax.random.key(recipe.seed), step)
    floats, rest = split_trainable(state.params)

    def total(floats: ModelParams, tokens: jax.Array, key: jax.Array) -> tuple[jax.Array, Loss]:
        loss = measure(join(floats, rest), cfg, blank, tokens, key=key, recipe=recipe)
        drafts = recipe.draft_weight * loss.draft.mean()
        return loss.lm + drafts + recipe.index_weight * loss.indexer, loss

    def accumulate(grads: ModelParams, part: tuple[jax.Array, jax.Array]) -> tuple[Any, Loss]:
        more, loss = jax.grad(total, has_aux=True)(floats, *part)
        return jax.tree.map(jnp.add, grads, more), loss

    parts = recipe.batch // recipe.micro
    slices = tokens.reshape(parts, recipe.micro, -1), jax.random.split(key, parts)
    grads, losses = jax.lax.scan(accumulate, jax.tree.map(jnp.zeros_like, floats), slices)
    loss = jax.tree.map(lambda x: x.mean(0), losses)
    grads = jax.tree.map(lambda x: x / parts, grads)
    updates, moments = optimizer.update(grads, state.optimizer, floats)
    params = join(optax.apply_updates(floats, updates), rest)
    params = balance(params, loss.load, recipe.bias_rate)
    return TrainState(params, moments, state.best), loss


def evaluate_step(
    params: ModelParams, blank: Blank, tokens: jax.Array, *, cfg: ModelConfig, recipe: Recipe
) -> Loss:
    """The loss of one dev slice `[micro, T]`, with anchors drawn from a fixed key."""
    return measure(params, cfg, blank, tokens, key=jax.random.key(0), recipe=recipe)


class Run:
    """One training run in a folder (`folder.py`)."""

    def __init__(self, cfg: ModelConfig, recipe: Recipe, data: Path, out: Path) -> None:
        self.cfg, self.recipe, self.out = cfg, recipe, out
        directory = model_dir(recipe.tokenizer)
        tokenizer = Tokenizer.load(directory)
        self.tokenizer_file = directory / "tokenizer.json"
        self.batches = Batches(
            read_sets(data, "train", tokenizer),
            dict(recipe.repeat),
            sequence=recipe.sequence,
            batch=recipe.batch,
            seed=recipe.seed,
        )
        self.dev = read_sets(data, "dev", tokenizer)
        counts = {name: min(len(docs), DEV_DOCUMENTS) for name, docs in self.dev.items()}
        if few := [name for name, count in counts.items() if count < recipe.micro]:
            raise UsageError(
                f"an evaluation has fewer dev documents of {', '.join(few)} (it reads "
                f"{DEV_DOCUMENTS} at most) than micro, {recipe.micro}; add some or lower micro"
            )
        self.blank = Blank.create(cfg, recipe.micro)
        self.optimizer = make_optimizer(cfg, recipe)
        options = compiler_options()
        step = partial(train_step, cfg=cfg, recipe=recipe, optimizer=self.optimizer)
        self.train_step = jax.jit(step, donate_argnums=0, compiler_options=options)
        evaluate = partial(evaluate_step, cfg=cfg, recipe=recipe)
        self.evaluate_step = jax.jit(evaluate, compiler_options=options)

    def start(self, folder: RunFolder, weights: ModelParams | None) -> tuple[int, TrainState]:
        """The newest saved state, or a new one (from `weights`, if given)."""
        params = weights or init(self.cfg, jax.random.key(self.recipe.seed))
        moments = self.optimizer.init(split_trainable(params)[0])
        return folder.read_state(TrainState(params, moments, jnp.float32(jnp.inf)))

    def train(self, weights: ModelParams | None, console: Console) -> None:
        """Runs to the recipe's last step, resuming from the newest saved state.

        Raises:
            UsageError: another process is training there, or the newest state is damaged.
            OSError: the folder cannot be written; what was there before is whole.
        """
        with open_folder(self.out) as folder:
            self._train(folder, weights, console)

    def _train(self, folder: RunFolder, weights: ModelParams | None, console: Console) -> None:
        first, state = self.start(folder, weights)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
            task = progress.add_task("training", total=self.recipe.steps, completed=first)
            clock = time.monotonic()
            for step in range(first, self.recipe.steps):
                tokens = jnp.asarray(self.batches[step])
                state, loss = self.train_step(state, self.blank, tokens, jnp.int32(step))
                taken, clock = time.monotonic() - clock, time.monotonic()
                record = {"step": step + 1, **_figures(loss)}
                folder.log({**record, "tokens_per_s": round(tokens.size / taken)})
                progress.update(task, advance=1, description=f"loss {record['lm']:.3f}")
                done = step + 1 == self.recipe.steps
                if (step + 1) % self.recipe.evaluate_every == 0 or done:
                    state = self.evaluate(folder, step + 1, state)
                    console.print(f"step {step + 1}: {self.summary}")
                    clock = time.monotonic()

    def evaluate(self, folder: RunFolder, step: int, state: TrainState) -> TrainState:
        """Dev figures a set; the best weights so far become `model/`; the state is saved."""
        sets = {name: self._evaluate_set(state.params, docs) for name, docs in self.dev.items()}
        mean = float(np.mean([figures["lm"] for figures in sets.values()]))
        folder.log({"step": step, "dev": sets})
        if mean < float(state.best):
            state = state._replace(best=jnp.float32(mean))
            folder.save_model(state.params, self.cfg, self.tokenizer_file)
        folder.save_state(step, state)
        self.summary = ", ".join(f"{name} {figures['lm']:.3f}" for name, figures in sets.items())
        return state

    def _evaluate_set(self, params: ModelParams, documents: list[np.ndarray]) -> dict[str, Any]:
        size = self.recipe.micro
        losses = [
            self.evaluate_step(params, self.blank, jnp.asarray(rows))
            for rows in dev_batches(documents[:DEV_DOCUMENTS], self.recipe.sequence, size)
        ]
        return _figures(jax.tree.map(lambda *x: jnp.stack(x).mean(0), *losses))


def _figures(loss: Loss) -> dict[str, Any]:
    def rounded(x: jax.Array) -> Any:
        return np.round(np.asarray(x, np.float64), 4).tolist()

    load = [float(np.asarray(count).max() / np.asarray(count).mean()) for count in loss.load]
    return {
        "lm": rounded(loss.lm),
        "draft": rounded(loss.draft),
        "agree": rounded(loss.agree),
        "index": rounded(loss.indexer),
        "load": round(max(load), 2),
    }
