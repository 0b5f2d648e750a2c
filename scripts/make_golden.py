"""Write `tests/golden/*.npz`. Run from the repository's root: `python -m scripts.make_golden`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.command import Parser, conclude
from tests.oracle.golden import FOLDER, compute_golden, write_golden
from tests.oracle.random import random_checkpoint

MIN_MARGIN = 1e-4
"""Smallest accepted gap at a top-k boundary, so that float32 cannot choose another set."""


class Case(NamedTuple):
    overrides: dict[str, Any]
    seed: int
    length: int
    stride: int
    """Streams are kept at every `stride`-th position and the last."""


CASES = {
    # All layer kinds; the window wraps and both compressors complete many entries.
    "mixed": Case(
        {"compress_ratios": [0, 4, 8, 4], "num_hash_layers": 2, "sliding_window": 16},
        seed=2,
        length=96,
        stride=5,
    ),
    # The released ratios and window, long enough for two HCA entries and one wrap.
    "released_ratios": Case(
        {
            "compress_ratios": [128, 4, 0, 4],
            "sliding_window": 128,
            "index_topk": 12,
            "hidden_size": 24,
            "hc_mult": 3,
            "num_attention_heads": 2,
            "n_routed_experts": 6,
            "moe_intermediate_size": 16,
        },
        seed=5,
        length=270,
        stride=27,
    ),
    # The MTP block; no hash layer, three experts of eight.
    "mtp": Case(
        {
            "compress_ratios": [4, 8, 0],
            "num_nextn_predict_layers": 1,
            "num_hash_layers": 0,
            "num_attention_heads": 6,
            "o_groups": 3,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
        },
        seed=9,
        length=64,
        stride=5,
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status."""

    def body() -> int:
        Parser(prog="python -m scripts.make_golden", description=__doc__).parse_args(argv)
        write_all()
        return 0

    return conclude("make_golden", body)


def write_all() -> None:
    """Writes the files of all cases over those that are there."""
    FOLDER.mkdir(exist_ok=True)
    for name, case in CASES.items():
        config, tensors = random_checkpoint(case.overrides, case.seed)
        rng = np.random.default_rng(case.seed)
        tokens = rng.integers(config["vocab_size"], size=case.length)
        positions = np.union1d(np.arange(0, case.length, case.stride), case.length - 1)
        golden = compute_golden(config, tensors, tokens, positions)
        if golden.topk_margin < MIN_MARGIN:
            raise SystemExit(
                f"{name}: a top-k is decided by {golden.topk_margin:.1e}, expected at least "
                f"{MIN_MARGIN:.0e}; choose another seed"
            )
        path = FOLDER / f"{name}.npz"
        write_golden(path, golden)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB, margin {golden.topk_margin:.1e}")


if __name__ == "__main__":
    sys.exit(main())
