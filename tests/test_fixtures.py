"""The engine against the released model code, on checkpoints in the released layout.

The fixtures are looked for in `shared/fixtures` beside the checkout; without them these tests are
skipped. The quick ones run the first 160 tokens, past the window of 128; the slow ones run all.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxspec.api import mtp_score, score
from jaxspec.checkpoint import load_checkpoint
from jaxspec.errors import UsageError
from tests.references import (
    TOLERANCE,
    Reference,
    decode_chunks,
    decode_roots,
    largest,
    splits,
)

NAMES = ("mixed", "small", "csa", "hca", "pro", "mtp")
QUICK = ("small", "pro", "mtp")
"""Of all layer kinds, the released ratios, hash and bias routing, and the MTP block."""
TIED = {"mtp": (268, 300)}
"""Per row the first position whose top-k is undetermined, as two scores are exactly equal."""
PREFIX, WIDTH = 160, 144


def read(fixtures: Path, name: str) -> Reference:
    params, cfg = load_checkpoint(fixtures / name)
    arrays = load_file(fixtures / name / "reference.safetensors")
    run = "dequant" if cfg.mtp_ratios else "full"
    layers = range(cfg.num_layers)
    parts = {"entries": "comp", "keys": "idxcomp"}
    entries = {
        (layer, ours): arrays[f"{run}.layer{layer}.{theirs}"]
        for layer in layers
        for ours, theirs in parts.items()
        if f"{run}.layer{layer}.{theirs}" in arrays
    }
    streams = {i: arrays[f"{run}.layer{i}"] for i in layers if f"{run}.layer{i}" in arrays}
    return Reference(
        params=params,
        cfg=cfg,
        tokens=arrays["tokens"].astype(np.int32),
        logits=arrays[f"{run}.logits"],
        streams=streams,
        entries=entries,
        mtp_logits=arrays.get(f"{run}.mtp_logits"),
        end=np.array(TIED[name]) if name in TIED else None,
    )


@pytest.mark.parametrize("name", QUICK)
def test_the_start_in_one_block_and_in_chunks(fixtures, name):
    known = read(fixtures, name)
    known.check(decode_chunks(known, [WIDTH], WIDTH, quick=True))
    known.check(decode_chunks(known, [*splits(PREFIX, WIDTH)], WIDTH, quick=True))


def test_the_start_as_trees_of_one_node(fixtures):
    known = read(fixtures, "small")
    known.check(decode_roots(known, PREFIX, quick=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
class TestAllTokens:
    def test_in_one_block(self, fixtures, name):
        known = read(fixtures, name)
        total = known.tokens.shape[1]
        known.check(decode_chunks(known, [total], total))

    def test_scored(self, fixtures, name):
        known = read(fixtures, name)
        seen = np.arange(known.tokens.shape[1]) < known.until[:, None]
        logits = np.asarray(score(known.params, known.cfg, known.tokens))
        assert largest(logits, known.logits, seen) < TOLERANCE
        if known.mtp_logits is not None:
            logits = np.asarray(mtp_score(known.params, known.cfg, known.tokens))
            assert largest(logits, known.mtp_logits, seen[:, :-1]) < TOLERANCE

    @pytest.mark.parametrize("width", [7, 130])
    def test_in_chunks(self, fixtures, name, width):
        known = read(fixtures, name)
        known.check(decode_chunks(known, [*splits(known.tokens.shape[1], width)], width))

    def test_token_by_token(self, fixtures, name):
        known = read(fixtures, name)
        known.check(decode_chunks(known, [1] * known.tokens.shape[1], 1))

    def test_as_trees_of_one_node(self, fixtures, name):
        known = read(fixtures, name).main_only()
        known.check(decode_roots(known, known.tokens.shape[1]))


def test_the_formats_of_the_release_are_refused_in_words(fixtures):
    with pytest.raises(UsageError, match="FP8 and FP4 are not built yet") as error:
        load_checkpoint(fixtures / "released_tiny")
    assert "\n" not in str(error.value)
