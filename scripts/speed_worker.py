"""One engine that decodes when it is told to: the other end of `scripts.compare_speed`.

    python scripts/speed_worker.py jaxspec|transformers MODEL --threads N

It writes one JSON object a line: first its versions, then an answer to each line that it reads.
A question holds `prompts` (token ids, all of one length) and `steps`; the answer the seconds of
prefill (from token ids to each prompt's first token, the cache made anew), the seconds
of the greedy steps after it, and the token ids. The first question of a shape compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

Timed = tuple[float, float, list[list[int]]]
Repeat = Callable[[list[list[int]], int], Timed]
"""Prompts and a number of steps (0: prefill alone) to seconds of prefill, of steps, and tokens."""


def open_jaxspec(args: argparse.Namespace) -> tuple[dict[str, str], Repeat]:
    """Plain decoding by jitted `prefill` and `generate`; the steps loop on the device."""
    import dataclasses

    import jax
    import jax.numpy as jnp
    import numpy as np

    import jaxspec
    from jaxspec import Sampling, init_state, load_checkpoint
    from jaxspec.compiler import jit
    from jaxspec.draft.plain import PLAIN
    from jaxspec.step import generate, prefill

    params, cfg = load_checkpoint(args.model, dtype="float32")
    if args.eos is not None:
        cfg = dataclasses.replace(cfg, eos_token_id=args.eos)
    begin = jit(
        prefill, static_argnames=("cfg", "drafter", "chunk", "impl"), donate_argnames="state"
    )
    loop = jit(generate, static_argnames=("cfg", "drafter", "impl"), donate_argnames="state")

    def repeat(prompts: list[list[int]], steps: int) -> Timed:
        rows, length = len(prompts), len(prompts[0])
        token, valid = np.asarray(prompts, np.int32), np.full(rows, length, np.int32)
        asked = Sampling.create(rows), np.zeros(rows, np.uint32), np.full(rows, steps + 1, np.int32)
        jax.block_until_ready(asked)
        started = time.perf_counter()
        state = init_state(
            cfg,
            *asked,
            max_len=length + steps,
            max_new=steps + 1,
            drafter=PLAIN,
        )
        state = begin(
            params, cfg, state, jnp.asarray(token), jnp.asarray(valid), drafter=PLAIN, chunk=length
        )
        jax.block_until_ready(state)
        prefilled = time.perf_counter()
        if steps:
            state = loop(params, cfg, state, steps=steps, drafter=PLAIN)
        tokens = np.asarray(state.output.token)
        jax.block_until_ready(state)
        finished = time.perf_counter()
        if not (np.asarray(state.count) == steps + 1).all():
            raise RuntimeError(f"a sequence met the end token before {steps} steps")
        return prefilled - started, finished - prefilled, tokens.tolist()

    return {"jaxspec": jaxspec.__version__, "jax": jax.__version__}, repeat


def open_transformers(args: argparse.Namespace) -> tuple[dict[str, str], Repeat]:
    """Greedy decoding by the model's own forward and cache, the argmax on the host's tensors."""
    import torch
    import transformers
    from transformers import DeepseekV4ForCausalLM, DynamicCache

    torch.set_num_threads(args.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = DeepseekV4ForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, experts_implementation=args.experts
    ).eval()

    @torch.inference_mode()
    def repeat(prompts: list[list[int]], steps: int) -> Timed:
        token = torch.tensor(prompts)
        started = time.perf_counter()
        cache = DynamicCache(config=model.config)
        out = model(token, cache=cache, use_cache=True, logits_to_keep=1)
        emitted = [out.logits[:, -1].argmax(-1)]
        prefilled = time.perf_counter()
        for _ in range(steps):
            out = model(emitted[-1][:, None], cache=cache, use_cache=True)
            emitted.append(out.logits[:, -1].argmax(-1))
        finished = time.perf_counter()
        return prefilled - started, finished - prefilled, torch.stack(emitted, 1).tolist()

    versions = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "attention": str(model.config._attn_implementation),
        "experts": args.experts,
    }
    return versions, repeat


ENGINES = {"jaxspec": open_jaxspec, "transformers": open_transformers}


def limit_threads(count: int) -> None:
    """Before an engine is imported: XLA sizes its pool by the CPUs that the process may use."""
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(count)
    os.environ["JAX_PLATFORMS"] = "cpu"
    cpus = sorted(os.sched_getaffinity(0))
    if count > len(cpus):
        raise ValueError(f"{count} threads, but this process may use {len(cpus)} CPUs")
    os.sched_setaffinity(0, cpus[:count])


def main() -> None:
    """Answers questions until the input ends. A failure is an answer too, and the last one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--eos", type=int)
    parser.add_argument("--experts", default="grouped_mm")
    args = parser.parse_args()
    pipe, sys.stdout = sys.stdout, sys.stderr  # what a library prints must not be an answer

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=pipe, flush=True)

    try:
        limit_threads(args.threads)
        versions, repeat = ENGINES[args.engine](args)
        answer({"versions": versions | {f"{args.engine}'s Python": platform.python_version()}})
        for line in sys.stdin:
            question = json.loads(line)
            prefill_s, decode_s, tokens = repeat(question["prompts"], question["steps"])
            answer({"prefill_s": prefill_s, "decode_s": decode_s, "tokens": tokens})
    except KeyboardInterrupt:
        pass
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
