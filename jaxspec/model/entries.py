"""The form in which a cache holds its compressed entries."""

from __future__ import annotations

import functools
from typing import Any

from jaxspec.cache import Cache, init_cache
from jaxspec.config import ModelConfig
from pallas_kernels.tree_attention.forms import fitting


def cache_for(impl: str, cfg: ModelConfig, batch: int, max_len: int, dtype: Any) -> Cache:
    """`init_cache` with entries in the form that the kernels of `impl` read with the fewest bytes.

    All forms hold the same values, and `forward` gives rows in the form of its cache.
    """
    return init_cache(cfg, batch, max_len, dtype, form=functools.partial(fitting, impl=impl))
