"""Which kernels are compiled at which sizes of DeepSeek-V4-Flash, as jobs. JAX is not imported."""

from __future__ import annotations

from jaxspec.config import layer_kind
from jaxspec.plan.program import Job

CONTEXTS = {"8k": 8192, "64k": 65536, "1M": 1048576}
BATCHES = (1, 8, 64)
BUDGET = 8  # nodes of a tree, its root included
CHUNK = 512  # tokens of a prefill chunk
RATIOS = (4, 128)
ENTRY_FORMS = {"tpu": ("bf16", "words", "bytes"), "gpu": ("bf16", "fp8")}
"""How committed entries are stored; `words` and `bytes` are bfloat16 and FP8 in a TPU's layout."""
OPS = ("tree_attention", "index_topk", "grouped_matmul", "hyper_mixing")
NO_KERNEL = {("grouped_matmul", "gpu"): "no kernel for GPUs; 'auto' takes the definition there"}
"""Op and kind of target that have none, and what is to say of it."""


def jobs(op: str, impl: str) -> list[Job]:
    """What to compile of one op: trees at every context and batch, then one token and a chunk."""
    if (op, impl) in NO_KERNEL:
        return []
    return {
        "tree_attention": _attention_jobs,
        "index_topk": _index_jobs,
        "grouped_matmul": _expert_jobs,
        "hyper_mixing": _mixing_jobs,
    }[op](impl)


def _blocks() -> list[tuple[str, int, int]]:
    """Context, batch and nodes of each block."""
    trees = [(context, batch, BUDGET) for context in CONTEXTS for batch in BATCHES]
    return [*trees, ("64k", 1, 1), ("64k", 1, CHUNK)]


def _attention_jobs(impl: str) -> list[Job]:
    sliding = [("64k", batch, BUDGET) for batch in BATCHES]  # whatever the context
    sizes = [(0, *block, "bf16") for block in [*sliding, ("64k", 1, CHUNK)]]
    for ratio in RATIOS:
        sizes += [(ratio, *block, form) for form in ENTRY_FORMS[impl] for block in _blocks()]
    return [
        Job(
            f"tree_attention {layer_kind(ratio)} {context} B={batch} N={nodes} {form}",
            "jaxspec.plan.programs:attention_program",
            {"ratio": ratio, **_sizes(context, batch, nodes), "form": form, "impl": impl},
            is_memory_bound=nodes <= BUDGET,
        )
        for ratio, context, batch, nodes, form in sizes
    ]


def _index_jobs(impl: str) -> list[Job]:
    return [
        Job(
            f"index_topk {context} B={batch} N={nodes} {form}",
            "jaxspec.plan.programs:index_program",
            {**_sizes(context, batch, nodes), "form": form, "impl": impl},
            is_memory_bound=nodes <= BUDGET,
        )
        for form in ("bf16", "fp8")
        for context, batch, nodes in _blocks()
    ]


def _sizes(context: str, batch: int, nodes: int) -> dict[str, int]:
    return {"context": CONTEXTS[context], "batch": batch, "nodes": nodes}


def _expert_jobs(impl: str) -> list[Job]:
    return [
        Job(
            f"grouped_matmul M={rows} {form}",
            "jaxspec.plan.programs:expert_program",
            {"rows": rows, "form": form, "impl": impl},
        )
        for form in ("bf16", "fp8", "fp4")
        for rows in (1, *(batch * BUDGET for batch in BATCHES))
    ]


def _mixing_jobs(impl: str) -> list[Job]:
    """The weights alone, then all that a sub-layer does with its streams."""
    return [
        Job(
            f"hyper_mixing {part} M={rows} {form}",
            f"jaxspec.plan.programs:{part}_program",
            {"rows": rows, "impl": impl},
        )
        for part, form in (("mixing", "float32"), ("streams", "bf16"))
        for rows in (1, *(batch * BUDGET for batch in BATCHES))
    ]
