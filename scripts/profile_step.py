"""Say where the time of a decoding step goes: `python -m scripts.profile_step MODEL` from the root.

Decodes random prompts plainly under JAX's profiler and prints the milliseconds of a step by stage
(the named scopes of the code), beside the least that the machine needs to read what a step must
read: all weights but the experts, the experts in use, and the committed cache. The bandwidth of
that floor is measured in the same process, by a sum over an array as large as the weights.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.command import Parser, conclude
from jaxspec.errors import UsageError
from jaxspec.resources import EMBEDDED_MODEL, model_dir
from scripts.figures import markdown

# Innermost scope first: an op belongs to the first that its name holds.
STAGES = {
    "hyper": "mHC: weights, Sinkhorn, mixing",
    "compress": "compressors",
    "index": "indexer",
    "attention.output": "attention: output projection",
    "attention": "attention: projections, rotation, scores, selection",
    "moe.route": "experts: routing",
    "moe": "experts: routed and shared",
    "cache.extend": "cache: extend",
    "head": "head",
    "": "the rest: norms, sampling, bookkeeping",
}
CONTAINERS = ("while", "call", "conditional", "fusion.clone")


class Floor(NamedTuple):
    """What a step has to read at the least, in bytes."""

    dense: int
    experts: int
    cache: int

    @property
    def total(self) -> int:
        return sum(self)


def build_parser() -> Parser:
    """The command line."""
    parser = Parser(prog="python -m scripts.profile_step", description=__doc__)
    parser.add_argument("model", nargs="?", default=EMBEDDED_MODEL, metavar="nano|DIR")
    parser.add_argument("--batch-size", type=int, default=1, metavar="N")
    parser.add_argument("--context", type=int, default=256, metavar="N", help="tokens before")
    parser.add_argument("--steps", type=int, default=64, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    return parser


def stage_of(op_name: str) -> str:
    """The stage that an op's metadata names."""
    return next(label for scope, label in STAGES.items() if scope in op_name)


def op_stages(hlo: str) -> dict[str, str]:
    """Stage of every instruction of a compiled program, but for those that hold others."""
    named = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = .*?\s([\w\-]+)\(.*op_name="([^"]*)"')
    stages = {}
    for line in hlo.splitlines():
        if (found := named.match(line)) and found[2] not in CONTAINERS:
            stages[found[1]] = stage_of(found[3])
    return stages


def stage_seconds(trace: Path, stages: dict[str, str]) -> Counter[str]:
    """Seconds of each stage in a profile."""
    from jax.profiler import ProfileData

    (file,) = trace.rglob("*.xplane.pb")
    seconds: Counter[str] = Counter()
    for plane in ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                if event.name in stages:
                    seconds[stages[event.name]] += event.duration_ns / 1e9
    return seconds


def least_bytes(params: Any, cfg: Any, state: Any) -> Floor:
    """Reads the experts in use from one forward of the next tokens."""
    import jax
    import jax.numpy as jnp

    from jaxspec import TokenBlock, forward

    block = TokenBlock.chain(state.root[:, None], state.cache.length)
    out = forward(params, cfg, state.cache, block, features="trace")
    experts, routed = 0, 0
    for layer, p in zip(out.features, params.layers, strict=True):
        weights = (p.moe.experts.w1, p.moe.experts.w3, p.moe.experts.w2)
        routed += sum(w.nbytes for w in weights)
        experts += len(jnp.unique(layer.expert)) * sum(w.nbytes // len(w) for w in weights)
    read = [params.layers, params.head, params.norm, params.hc_head]
    dense = sum(leaf.nbytes for leaf in jax.tree.leaves(read)) - routed
    cache = sum(
        leaf.nbytes
        for layer in state.cache.layers
        for leaf in jax.tree.leaves((layer.ring, layer.entries, layer.keys))
    )
    return Floor(dense, experts, cache)


def read_bandwidth(size: int) -> float:
    """Bytes a second of a sum over `size` bytes, the best of five."""
    import jax
    import jax.numpy as jnp

    array, total = jnp.ones(size // 4, jnp.float32), jax.jit(jnp.sum)
    total(array).block_until_ready()
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        total(array).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return array.nbytes / min(seconds)


def profile(args: argparse.Namespace) -> int:
    """Decodes under the profiler and prints the table."""
    directory = model_dir(args.model)
    if min(args.batch_size, args.context, args.steps) < 1:
        raise UsageError("batch-size, context and steps must be at least 1")
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxspec import Sampling, init_state, load_checkpoint
    from jaxspec.compiler import jit
    from jaxspec.draft.plain import PLAIN
    from jaxspec.step import generate, prefill

    params, cfg = load_checkpoint(directory, dtype="float32")
    rows, room = args.batch_size, 3 * args.steps + 1
    prompts = np.random.default_rng(args.seed).integers(2, cfg.vocab_size, (rows, args.context))
    asked = Sampling.create(rows), np.zeros(rows, np.uint32), np.full(rows, room + 1, np.int32)
    state = init_state(cfg, *asked, max_len=args.context + room, max_new=room + 1, drafter=PLAIN)
    valid = jnp.full(rows, args.context, jnp.int32)
    state = prefill(params, cfg, state, jnp.asarray(prompts, jnp.int32), valid, drafter=PLAIN)
    static = {"steps": args.steps, "drafter": PLAIN}
    loop = jit(generate, static_argnames=("cfg", "drafter", "steps"), donate_argnames="state")
    program = loop.lower(params, cfg, state, **static).compile()
    stages = op_stages(program.as_text())
    state = jax.block_until_ready(loop(params, cfg, state, **static))
    started = time.perf_counter()
    state = jax.block_until_ready(loop(params, cfg, state, **static))
    wall = (time.perf_counter() - started) / args.steps
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state = jax.block_until_ready(loop(params, cfg, state, **static))
        seconds = stage_seconds(Path(folder), stages)
    if bool(state.done.any()):
        raise UsageError("a sequence met the end token; another --seed draws other prompts")
    floor = least_bytes(params, cfg, state)
    print_table(args, seconds, wall, floor)
    return 0


def print_table(args: argparse.Namespace, seconds: Counter[str], wall: float, floor: Floor) -> None:
    """Milliseconds a step by stage, and the floor."""
    busy = sum(seconds.values()) / args.steps
    lines = [
        [
            label,
            f"{seconds[label] / args.steps * 1e3:.3f}",
            f"{seconds[label] / args.steps / busy:.0%}",
        ]
        for label in STAGES.values()
        if seconds[label]
    ]
    print(markdown(["stage", "ms/step", "share"], lines))
    bandwidth = read_bandwidth(max(floor.total, 1 << 26))
    print(
        f"\nStages together {busy * 1e3:.3f} ms under the profiler; a step takes "
        f"{wall * 1e3:.3f} ms without it (batch {args.batch_size}, context {args.context}).\n"
        f"Floor {floor.total / bandwidth * 1e3:.3f} ms: {floor.dense / 1e6:.1f} MB of weights, "
        f"{floor.experts / 1e6:.1f} MB of experts in use, {floor.cache / 1e6:.1f} MB of cache at "
        f"{bandwidth / 1e9:.1f} GB/s."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit status."""
    return conclude("scripts.profile_step", lambda: profile(build_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
