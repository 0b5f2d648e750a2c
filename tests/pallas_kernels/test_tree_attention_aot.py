"""The TPU kernel of tree attention compiled for TPUs that are not here, at V4's true sizes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
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

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; install jaxspec[aot] to compile for TPUs",
)


def too_large(line: dict) -> bool:
    """Whether 64 caches of 1M tokens are more than the memory of the target, as it says."""
    error = line.get("error", "")
    return "1M-b64" in line["case"] and "exceeds available HBM" in error


def compile_all(target: str, names: list[str]) -> None:
    """Compiles the cases in another process; each must, and none may copy a large cache."""
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
    assert [line["case"] for line in lines] == names, result.stderr[-2000:]
    lines = [line for line in lines if not too_large(line)]
    assert [line for line in lines if "error" in line] == []
    for line in lines:
        if not line["case"].endswith("fp8"):  # these are copied into rows of bytes, as documented
            assert line["temporaries"] < CACHE, line


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
    cases = {str(case): None for case in [*RELEASED, *TPU_RELEASED]}
    compile_all(target, [name for name in cases if name.endswith(form)])


@pytest.mark.aot
@pytest.mark.slow
@pytest.mark.timeout(7200)
@needs_libtpu
@pytest.mark.parametrize("target", TOPOLOGIES)
def test_every_conformance_shape_compiles(target: str) -> None:
    compile_all(target, list({str(case): None for case in [*CASES, *TPU_CASES]}))
