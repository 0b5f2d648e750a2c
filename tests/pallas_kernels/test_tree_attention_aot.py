"""The TPU kernel of tree attention compiled for TPUs that are not here, at V4's true sizes."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.pallas_kernels.cases_tree_attention import CASES, RELEASED, TPU_CASES, TPU_RELEASED

ROOT = Path(__file__).resolve().parents[2]
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
SAMPLE = [
    "flash-sliding-bfloat16",
    "flash-hca-8k-b1-bytes",
    "flash-csa-8k-b8-bfloat16",
    "flash-csa-1M-b1-words",
    "flash-csa-1M-decode-bfloat16",
]
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
CACHE = 1 << 27
"""Bytes: a call at 1M tokens that copied the entries would need more beside its arguments."""
COPY = 2.5
"""Bytes that the copy of FP8 entries into rows of bytes needs, as a fraction of the arguments at 1M
tokens; compilers for v5e and v6e take 2.6."""

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; install jaxspec[aot] to compile for TPUs",
)


def released(*, large: bool) -> list[str]:
    """Names of the released sizes: 64 caches of 1M tokens, or all others."""
    names = {str(case): None for case in [*RELEASED, *TPU_RELEASED]}
    return [name for name in names if ("1M-b64" in name) == large]


def room(line: dict) -> float:
    """Bytes of the target's memory, if the compiler said that a call needs more; else infinite."""
    said = re.search(r"exceeds available HBM \(([\d.]+)G\)", line.get("error", ""))
    return float(said[1]) * 2**30 if said else math.inf


def too_large(line: dict) -> bool:
    """Whether the arguments leave no room for a call, or, of FP8 entries, for their copy."""
    copy = COPY if line["case"].endswith("fp8") else 0
    return line["arguments"] * (1 + copy) + CACHE > room(line)


@functools.cache
def compiled(target: str, names: tuple[str, ...]) -> dict[str, dict]:
    """What became of each case, compiled in another process."""
    script = "tests.pallas_kernels.compile_tree_attention"
    result = subprocess.run(
        [sys.executable, "-m", script, TOPOLOGIES[target], *names],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert [line["case"] for line in lines] == [*names], result.stderr[-2000:]
    return {line["case"]: line for line in lines}


def hold(lines: Collection[dict]) -> None:
    """Each case must compile, and none may copy a large cache."""
    assert [line for line in lines if "error" in line] == []
    for line in lines:
        if not line["case"].endswith("fp8"):  # these are copied into rows of bytes, as documented
            assert line["temporaries"] < CACHE, line


def compile_all(target: str, names: list[str]) -> None:
    hold(compiled(target, tuple(names)).values())


@pytest.mark.aot
@needs_libtpu
@pytest.mark.parametrize("target", TOPOLOGIES)
def test_a_sample_compiles(target: str) -> None:
    compile_all(target, SAMPLE)


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.timeout(7200)
@needs_libtpu
@pytest.mark.parametrize("form", ["bfloat16", "fp8", "bytes", "words"])
@pytest.mark.parametrize("target", TOPOLOGIES)
def test_every_released_size_compiles(target: str, form: str) -> None:
    compile_all(target, [name for name in released(large=False) if name.endswith(form)])


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.timeout(7200)
@needs_libtpu
@pytest.mark.parametrize("name", released(large=True))
@pytest.mark.parametrize("target", TOPOLOGIES)
def test_64_caches_of_1m_tokens_compile_where_they_fit(target: str, name: str) -> None:
    line = compiled(target, tuple(released(large=True)))[name]
    if too_large(line):
        pytest.skip(
            f"{target} has {room(line) / 2**30:.2f} GiB of memory, too little for the "
            f"{line['arguments'] / 2**30:.2f} GiB of arguments of {name} and "
            + ("a copy of its FP8 entries" if name.endswith("fp8") else "what else a call needs")
        )
    hold([line])


def test_only_what_does_not_fit_is_too_large() -> None:
    said = "the total memory required for HLO temporaries (16.12G) exceeds available HBM (15.75G)."
    line = {"case": "flash-csa-1M-b64-words", "arguments": 16 << 30, "error": said}
    assert too_large(line)
    assert not too_large(line | {"arguments": 15 << 30})  # a copy was made
    assert too_large(line | {"case": "flash-csa-1M-b64-fp8", "arguments": 9 << 30})
    assert not too_large(line | {"case": "flash-csa-1M-b64-fp8", "arguments": 4 << 30})
    assert not too_large(line | {"error": "a register ran out"})
    assert not too_large({"case": line["case"], "arguments": 99 << 30, "temporaries": 0})
    with pytest.raises(AssertionError):
        hold([line])


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.timeout(7200)
@needs_libtpu
@pytest.mark.parametrize("target", TOPOLOGIES)
def test_every_conformance_shape_compiles(target: str) -> None:
    compile_all(target, list({str(case): None for case in [*CASES, *TPU_CASES]}))
