"""Attention of one block over ring, compressed entries and the block's own rows."""

from pallas_kernels.tree_attention.op import tree_attention

__all__ = ["tree_attention"]
