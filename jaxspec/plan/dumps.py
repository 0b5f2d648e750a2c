"""Reads what compilers say about kernels: HLO text, libtpu's LLO dumps, ptxas.

The formats are not documented; the tests hold them to real compiles on each supported version.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from jaxspec.plan.program import Kernel
from jaxspec.plan.targets import UTILIZATION

VMEM = "1"  # number of the memory space in HLO
_QUIET = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "custom-call"}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([^\s=]+) = (\(.*?\)|\S+) ([\w-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)[a-z0-9]*\[([\d,]*)\]")


def _spaces(line: str, key: str) -> dict[str, int]:
    """Memory spaces of one `scoped_memory_configs` list to their bytes."""
    listed = re.search(rf'"{key}":\[(.*?)\]', line)
    pairs = re.findall(r'"memory_space":"(\d+)".*?"size":"(\d+)"', listed[1] if listed else "")
    return {space: int(size) for space, size in pairs}


def tpu_kernels(hlo: str, dump: Path, default: int) -> tuple[Kernel, ...]:
    """Kernels of a program for a TPU from its optimised HLO and libtpu's dumps of it.

    `default` is the VMEM that a kernel gets without asking; some compilers write it out.
    """
    kernels = []
    for line in hlo.splitlines():
        found = _INSTRUCTION.match(line)
        if found is None or 'custom_call_target="tpu_custom_call"' not in line:
            continue
        name = found[1]
        bundles, slots = _utilization(dump, name)
        limit = _spaces(line, "scoped_memory_configs").get(VMEM)
        kernels.append(
            Kernel(
                name=name.rpartition(".")[0] or name,
                vmem=_spaces(line, "used_scoped_memory_configs").get(VMEM, 0),
                vmem_limit=None if limit == default else limit,
                spilled=slots.get("VSTORE:SPILL", (None, 0))[0],
                bundles=bundles,
                slots=slots,
            )
        )
    return tuple(kernels)


def _utilization(dump: Path, name: str) -> tuple[int | None, dict[str, tuple[int, int]]]:
    pattern = re.compile(rf"\d+-{re.escape(name)}-\d+-{UTILIZATION}[.]txt")
    for path in dump.iterdir():
        if pattern.fullmatch(path.name):
            return read_utilization(path.read_text())
    return None, {}


def read_utilization(text: str) -> tuple[int, dict[str, tuple[int, int]]]:
    """Bundles, and by class the slots that are filled and those that there are."""
    lines = text.splitlines()
    names = [name.strip() for name in lines[1].split(",")]
    capacity = [int(number) for number in lines[2].split()]
    rows = [[int(number) for number in line.split()] for line in lines[4:] if line.strip()]
    filled = [sum(column) for column in zip(*rows, strict=True)] or [0] * len(names)
    there = [number * len(rows) for number in capacity]
    return len(rows), dict(zip(names, zip(filled, there, strict=True), strict=True))


def gpu_kernels(hlo: str, said: str, known: dict[str, Kernel]) -> tuple[Kernel, ...]:
    """Mosaic GPU's kernels of a program.

    Args:
        hlo: the optimised program.
        said: what was printed while it was compiled.
        known: kernels by the hash that HLO gives them; new ones are added. A process compiles a
            kernel once, and prints nothing of it later.
    """
    hashes = re.findall(r'custom_call_target="mosaic_gpu.*?kernel_hash = ("(?:[^"\\]|\\.)*")', hlo)
    fresh = [key for key in dict.fromkeys(hashes) if key not in known]
    printed = printed_kernels(said)
    if len(fresh) == len(printed):
        known.update(zip(fresh, printed, strict=True))
    return tuple(known.get(key, Kernel("not told apart")) for key in hashes)


def printed_kernels(said: str) -> list[Kernel]:
    """Kernels in the order of their compilation, from ptxas' lines and the host's code.

    The host's launch names the shared memory after three sizes each of grid, cluster and block.
    """
    blocks = re.split(r"(?=ptxas info    : Compiling entry function)", said)[1:]
    launches = re.findall(
        r"call void @mosaic_gpu_(?:launch_kernel|build_kernel_spec)"
        r"\(ptr %[\w.]+, (?:i32 \d+, ){9}i32 (\d+),",
        said,
    )
    known = len(launches) == len(blocks)
    sizes = [int(size) for size in launches] if known else [None] * len(blocks)
    return [read_ptxas(block, size) for block, size in zip(blocks, sizes, strict=True)]


def read_ptxas(text: str, smem: int | None) -> Kernel:
    """A kernel from what `ptxas -v` says of it, and its dynamic shared memory."""
    name = re.search(r"Compiling entry function '(\w+)'", text)
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", text)
    return Kernel(
        name=name[1].removesuffix("_mosaic_gpu_kernel") if name else "?",
        smem=smem,
        registers=int(registers[1]) if registers else None,
        spilled=sum(int(each) for each in spills) if spills else None,
    )


def around_kernels(hlo: str) -> dict[str, int]:
    """XLA's own operations of the entry computation: opcode to bytes of their results.

    What XLA moves into a TPU's VMEM ahead of a kernel is told apart from what it writes to memory.
    """
    total: dict[str, int] = {}
    for line in _entry(hlo.splitlines()):
        found = _INSTRUCTION.match(line)
        if found is None or found[3] in _QUIET or found[3].endswith(("-start", "-update")):
            continue
        name = found[3] + (" to VMEM" if f"S({VMEM})" in found[2] else "")
        total[name] = total.get(name, 0) + array_bytes(found[2])
    return total


def _entry(lines: Iterable[str]) -> Iterable[str]:
    inside = False
    for line in lines:
        if line.startswith("ENTRY "):
            inside = True
        elif inside and line.startswith("}"):
            return
        elif inside:
            yield line


def array_bytes(shape: str) -> int:
    """Bytes of an HLO shape such as `bf16[8,128]{1,0}`, or of a tuple of them."""
    total = 0
    for kind, bits, dims in _ARRAY.findall(shape):
        size = 1
        for dim in dims.split(","):
            size *= int(dim or 1)
        total += -(-size * (8 if kind == "pred" else int(bits or 0)) // 8)
    return total


def reason(stderr: str) -> str:
    """The line of a dead process' last words that says why it died."""
    lines = [" ".join(line.split()) for line in stderr.splitlines() if line.strip()]
    for line in lines:
        if re.search(r"Check fail|LLVM ERROR|F\d{4} |Fatal|^\w*Error:", line):
            return line
    return lines[-1] if lines else "it said nothing"
