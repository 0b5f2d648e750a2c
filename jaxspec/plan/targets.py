"""Hardware to compile for, described to the compilers without having it."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any, Literal

from jaxspec.errors import UsageError

MIB = 2**20
UTILIZATION = "final_hlo-static-per-bundle-utilization"
"""The dump of libtpu that counts bundles and their slots."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of device.

    `vmem` is what a kernel gets unless it asks for more, `vmem_limit` the most that it can get;
    they were read from the compiler's own messages. `topology` is a name that libtpu knows.
    """

    name: str
    kind: Literal["tpu", "gpu"]
    device_kind: str  # as JAX names it
    memory: int  # bytes of the device
    bandwidth: float  # bytes/s of its memory
    topology: str = ""
    vmem: int = 0
    vmem_limit: int = 0
    gpu: GpuFacts | None = None


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """What XLA asks about a GPU, from NVIDIA's data sheets."""

    capability: tuple[int, int]
    cores: int
    l2: int  # bytes
    clock_ghz: float
    shared_memory: int = 232448  # bytes a block may ask for
    shared_memory_core: int = 233472

    def textproto(self, device_kind: str, memory: int, bandwidth: float) -> str:
        """XLA's GpuTargetConfig in protobuf's text format."""
        major, minor = self.capability
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.cores}  fpus_per_core: 128
              threads_per_warp: 32  threads_per_block_limit: 1024  threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
              registers_per_block_limit: 65536  registers_per_core_limit: 65536
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {self.shared_memory}
              shared_memory_per_core: {self.shared_memory_core}
              l2_cache_size: {self.l2}  clock_rate_ghz: {self.clock_ghz}
              device_memory_size: {memory}  memory_bandwidth: {round(bandwidth)}
            }}
            platform_name: "CUDA"
            device_description_str: "{device_kind}"
            runtime_version {{ major: 13 minor: 0 patch: 0 }}
            dnn_version_info {{ major: 9 minor: 10 }}
        """


def _tpu(
    name: str, device_kind: str, topology: str, hbm: tuple[float, float], vmem: tuple[int, int]
) -> Target:
    """`hbm` in GiB and GB/s, `vmem` in MiB: default and limit."""
    return Target(
        name,
        "tpu",
        device_kind,
        memory=round(hbm[0] * 2**30),
        bandwidth=hbm[1] * 1e9,
        topology=topology,
        vmem=vmem[0] * MIB,
        vmem_limit=vmem[1] * MIB,
    )


_H100 = GpuFacts((9, 0), cores=132, l2=50 * MIB, clock_ghz=1.98)
_H200 = dataclasses.replace(_H100, l2=60 * MIB)

TARGETS = {
    target.name: target
    for target in (
        _tpu("v5e", "TPU v5 lite", "v5e:2x2", (15.75, 819), (16, 128)),
        _tpu("v5p", "TPU v5", "v5p:2x2x1", (95, 2765), (16, 64)),
        _tpu("v6e", "TPU v6 lite", "v6e:2x2", (31.25, 1640), (32, 128)),
        _tpu("7x", "TPU7x", "tpu7x:2x2x1", (96, 3690), (32, 64)),
        Target("h100", "gpu", "NVIDIA H100 80GB HBM3", 80 * 2**30, 3.35e12, gpu=_H100),
        Target("h200", "gpu", "NVIDIA H200", 141 * 10**9, 4.8e12, gpu=_H200),
    )
}
"""By name. A device of 7x is one of the two cores of a chip, with half of its memory."""


def devices(target: Target) -> list[Any]:
    """The target's devices, to compile for; arrays cannot be put on them."""
    from jax.experimental import topologies

    if target.gpu is None:
        found = topologies.get_topology_desc(platform="tpu", topology_name=target.topology)
    else:
        config = target.gpu.textproto(target.device_kind, target.memory, target.bandwidth)
        found = topologies.get_topology_desc(
            platform="cuda", topology_name=target.name, topology="1x1x1", target_config=config
        )
    return list(found.devices)


def missing(target: Target) -> str | None:
    """What must be installed to compile for the target, or None."""
    wanted = {"tpu": ("libtpu",), "gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin")}[target.kind]
    if any(importlib.util.find_spec(name) is not None for name in wanted):
        return None
    what = {"tpu": "libtpu", "gpu": "jax's CUDA plugin"}[target.kind]
    return f"{what} is not installed; the extra `aot` brings it: pip install 'jaxspec[aot]'"


def require(name: str) -> Target:
    """The target of this name.

    Raises:
        UsageError: there is none, or its compiler is not installed.
    """
    if name not in TARGETS:
        raise UsageError(f"unknown target {name!r}; choose one of {', '.join(TARGETS)}")
    if (lack := missing(TARGETS[name])) is not None:
        raise UsageError(f"target {name}: {lack}")
    return TARGETS[name]


def environment(target: Target, dump: Path) -> dict[str, str]:
    """Variables of a process that compiles for the target.

    A TPU's compiler leaves its dumps in `dump`, a GPU's prints them.

    The CUDA plugin registers without a GPU only if JAX itself stays on the CPU; libtpu would ask
    for the machine's description on the network, and one process would lock others out.
    """
    if target.kind == "gpu":
        return {
            "JAX_PLATFORMS": "cpu",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "MOSAIC_GPU_DUMP_HOST_LLVM": "1",  # not all dumps: the passes' takes 100 MB a kernel
        }
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true "
        f"--xla_jf_dump_llo_pass_label_regex={UTILIZATION}",  # of some 70 dumps a kernel
    }
