"""The engine against our own golden files, which the float64 oracle wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.checkpoint import load_checkpoint
from tests.oracle import save_checkpoint
from tests.oracle.golden import FOLDER, read_golden
from tests.references import Reference, decode_chunks, decode_roots, splits

PATHS = sorted(FOLDER.glob("*.npz"))
WIDTH = 48
each_file = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def read(path: Path, folder: Path) -> Reference:
    golden = read_golden(path)
    save_checkpoint(folder, golden.config, golden.tensors)
    params, cfg = load_checkpoint(folder)
    return Reference(
        params=params,
        cfg=cfg,
        tokens=golden.tokens[None].astype("int32"),
        logits=golden.logits[None],
        streams={i: golden.streams[None, :, i + 1] for i in range(cfg.num_layers)},
        positions=golden.positions,
        mtp_logits=None if golden.mtp_logits is None else golden.mtp_logits[None],
    )


def test_there_are_golden_files():
    assert PATHS
    assert sum(path.stat().st_size for path in PATHS) <= 2 * 2**20


@each_file
def test_in_chunks(path, tmp_path):
    known = read(path, tmp_path)
    total = known.tokens.shape[1]
    known.check(decode_chunks(known, [*splits(total, WIDTH)], WIDTH, quick=True))


def test_as_trees_of_one_node(tmp_path):
    """Three kinds of layers; of the other files the slow tests of the fixtures have the like."""
    known = read(FOLDER / "mixed.npz", tmp_path)
    known.check(decode_roots(known, known.tokens.shape[1], quick=True))


@pytest.mark.slow
@each_file
def test_in_one_block_and_token_by_token(path, tmp_path):
    known = read(path, tmp_path)
    total = known.tokens.shape[1]
    for size in (total, 1):
        known.check(decode_chunks(known, [size] * (total // size), size))
