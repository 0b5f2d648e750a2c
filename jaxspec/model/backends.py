"""Which implementations of the kernels can run here."""

from __future__ import annotations

from jaxspec.compiler import interpretation
from jaxspec.errors import UsageError
from pallas_kernels import grouped_matmul, hyper_mixing, index_topk, tree_attention
from pallas_kernels.dispatch import resolve, target_platform


def check_impl(impl: str, *, interpret: bool = False) -> None:
    """Refuses an implementation that cannot run, before anything is compiled.

    Raises:
        UsageError: with the reason in words.
    """
    with interpretation(interpret):
        for op in (tree_attention, index_topk, grouped_matmul, hyper_mixing):
            try:
                resolve(impl, op.__name__.rpartition(".")[2], op.op.BACKENDS)
            except ValueError as error:
                raise UsageError(str(error)) from None


def differentiable_impl() -> str:
    """The implementation for training: kernels of TPUs and GPUs have no gradients."""
    return "auto" if target_platform() == "cpu" else "ref"
