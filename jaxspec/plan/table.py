"""Prints outcomes, and judges them by the limits of their target."""

from __future__ import annotations

from jaxspec.plan.program import Kernel, Outcome
from jaxspec.plan.targets import Target

MOST_TRAFFIC = 1.15  # bytes moved to the fewest possible, where they make the time
SMALL = 4096  # bytes of results of XLA's operations below which they are not listed


def broken(outcome: Outcome, target: Target) -> list[str]:
    """The limits that an outcome breaks, in words; what is larger than the device breaks none."""
    if not outcome.fits:
        return []
    if not outcome.compiles:
        return ["does not compile"]
    found = []
    if not outcome.kernels:
        found.append("there is no Pallas kernel in it")
    needed = outcome.argument_bytes + outcome.output_bytes + outcome.temp_bytes
    if needed > target.memory:
        found.append(f"needs {size(needed)} of the device's {size(target.memory)}")
    for kernel in outcome.kernels:
        if target.kind == "gpu" and kernel.spilled:
            found.append(f"{kernel.name} spills {size(kernel.spilled)}")
        if target.gpu is not None and (kernel.smem or 0) > target.gpu.shared_memory:
            found.append(f"{kernel.name} wants {size(kernel.smem or 0)} of shared memory")
    moved = outcome.traffic
    if outcome.job.is_memory_bound and moved and moved.ratio > MOST_TRAFFIC:
        found.append(f"moves {moved.ratio:.2f} times the fewest bytes, limit {MOST_TRAFFIC}")
    return found


def describe(outcome: Outcome, target: Target) -> str:
    """A line for the program and one for each of its kernels."""
    if not outcome.fits:
        return f"{outcome.job.name}: not for this device: {outcome.words}"
    if not outcome.compiles:
        return f"{outcome.job.name}: compiles no: {outcome.words}"
    parts = [f"compiles yes in {outcome.seconds:.1f} s"]
    if outcome.traffic is not None:
        moved = outcome.traffic.read + outcome.traffic.written
        parts.append(f"moves {size(moved)}, {outcome.traffic.ratio:.3f} times the fewest")
    parts.append(f"XLA temp {size(outcome.temp_bytes)}")
    large = {name: total for name, total in outcome.around.items() if total >= SMALL}
    if large:
        ops = sorted(large, key=large.__getitem__, reverse=True)
        parts.append("XLA writes " + ", ".join(f"{name} {size(large[name])}" for name in ops))
    lines = [f"{outcome.job.name}: " + "; ".join(parts)]
    lines += [f"    {_kernel(kernel, target)}" for kernel in outcome.kernels]
    lines += [f"    LIMIT: {words}" for words in broken(outcome, target)]
    return "\n".join(lines)


def _kernel(kernel: Kernel, target: Target) -> str:
    if target.gpu is not None:
        return (
            f"{kernel.name}: {kernel.registers} registers, {kernel.spilled} bytes spilled, "
            f"SMEM {size(kernel.smem or 0)} of {size(target.gpu.shared_memory)}"
        )
    limit = "stated" if kernel.vmem_limit else "default"
    most = kernel.vmem_limit or target.vmem
    text = f"{kernel.name}: VMEM {size(kernel.vmem or 0)} of {size(most)} ({limit})"
    if kernel.bundles:
        use = ", ".join(
            f"{name} {filled} ({100 * filled / there:.0f}%)"
            for name, (filled, there) in kernel.slots.items()
            if there
        )
        text += f"; {kernel.bundles} bundles: {use}"
    return text


def size(count: int) -> str:
    """Bytes for people."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"
