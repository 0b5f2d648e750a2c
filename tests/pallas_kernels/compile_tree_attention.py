"""Compiles cases of tree attention for a TPU that is not here; libtpu may end the process.

Usage: `python -m tests.pallas_kernels.compile_tree_attention TOPOLOGY CASE...`; prints a line of
JSON for each case: its name, the bytes of its arguments, and those of its temporaries or what the
compiler said.
"""

from __future__ import annotations

import json
import math
import sys

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.tree_attention import tpu
from tests.pallas_kernels.cases_tree_attention import (
    CASES,
    RELEASED,
    TPU_CASES,
    TPU_RELEASED,
    Case,
    avals,
    bound,
)

EVERY = {str(case): case for case in [*CASES, *TPU_CASES, *RELEASED, *TPU_RELEASED]}


def temporaries(case: Case, mesh: Mesh) -> int:
    """Bytes that the compiled call needs beside its arguments and its result."""
    call, arrays = bound(tpu.tree_attention, avals(case))
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere) for x in arrays]
    with jax.set_mesh(mesh):  # tells Pallas what the program is for
        compiled = jax.jit(call).trace(*placed).lower().compile()
    return compiled.memory_analysis().temp_size_in_bytes


def argument_bytes(case: Case) -> int:
    """Bytes of the arrays that the call is given."""
    _, arrays = bound(tpu.tree_attention, avals(case))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)


def main(topology: str, names: list[str]) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = Mesh(np.array(devices[:1]), ("x",))
    for name in names:
        try:
            said = {"temporaries": temporaries(EVERY[name], mesh)}
        except Exception as error:  # whatever it is, the test reports it
            said = {"error": f"{type(error).__name__}: {error}"}
        size = argument_bytes(EVERY[name])
        print(json.dumps({"case": name, "arguments": size, **said}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
