"""Golden files: a tiny checkpoint, tokens, and the oracle's outputs, in one `.npz`.

With them the suite has a fixed reference of its own: a change of the oracle or of NumPy shows as
a difference to a file in the repository.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .basic import Array
from .model import Oracle
from .mtp import Mtp

FOLDER = Path(__file__).parents[1] / "golden"
_WEIGHT = "weight/"


@dataclass(frozen=True)
class Golden:
    """One file's content; outputs are float32."""

    config: dict[str, Any]
    """The content of `config.json`."""
    tensors: dict[str, Array]
    """By released name: float32, `tid2eid` int64."""
    tokens: Array
    """[T]"""
    logits: Array
    """[T, V]"""
    positions: Array
    """[P] positions whose streams are kept, rising."""
    streams: Array
    """[P, L + 1, S, E] the embedding's copies, then the streams after every layer."""
    mtp_logits: Array | None
    """[T - 1, V], row t for token t + 2; None without an MTP block."""
    topk_margin: float
    """Smallest gap at a top-k boundary of any indexer or router; inf if nothing was left out."""


def compute_golden(
    config: Mapping[str, Any], tensors: Mapping[str, Array], tokens: Array, positions: Array
) -> Golden:
    """Run the oracle over `tokens` and keep the streams at `positions`."""
    oracle = Oracle(config, tensors)
    _, outs = oracle.run(tokens)
    streams = np.stack([out.streams for out in outs])
    mtp = Mtp(oracle).run(streams[:, -1], tokens) if oracle.has_mtp else []
    return Golden(
        config=dict(config),
        tensors=dict(tensors),
        tokens=tokens,
        logits=np.stack([out.logits for out in outs]).astype(np.float32),
        positions=positions,
        streams=streams[positions].astype(np.float32),
        mtp_logits=np.stack([out.logits for out in mtp]).astype(np.float32) if mtp else None,
        topk_margin=min([out.margin for out in outs] + [out.margin for out in mtp]),
    )


def write_golden(path: Path, golden: Golden) -> None:
    arrays = {
        "config": np.array(json.dumps(golden.config)),
        "tokens": golden.tokens,
        "logits": golden.logits,
        "positions": golden.positions,
        "streams": golden.streams,
        "topk_margin": np.array(golden.topk_margin),
    }
    if golden.mtp_logits is not None:
        arrays["mtp_logits"] = golden.mtp_logits
    weights = {_WEIGHT + name: tensor for name, tensor in golden.tensors.items()}
    np.savez_compressed(path, allow_pickle=False, **arrays, **weights)


def read_golden(path: Path) -> Golden:
    with np.load(path) as file:
        arrays = dict(file)
    tensors = {
        name.removeprefix(_WEIGHT): array
        for name, array in arrays.items()
        if name.startswith(_WEIGHT)
    }
    return Golden(
        config=json.loads(str(arrays["config"])),
        tensors=tensors,
        tokens=arrays["tokens"],
        logits=arrays["logits"],
        positions=arrays["positions"],
        streams=arrays["streams"],
        mtp_logits=arrays.get("mtp_logits"),
        topk_margin=float(arrays["topk_margin"]),
    )
