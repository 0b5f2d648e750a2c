"""Lightning-indexer scores and the exact selection of each node."""

from pallas_kernels.index_topk.op import index_topk

__all__ = ["index_topk"]
