"""How warpgroups of a cluster learn each other's counts, where the interpreter knows no cluster."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pallas_kernels.index_topk import gpu_exchange
from pallas_kernels.index_topk.gpu_exchange import HALF, LINES, SLOTS, TRIALS, Crew, Exchange
from tests.pallas_kernels.fake_cluster import Memory, mosaic_gpu, pallas

TURNS = 5


def as_python(monkeypatch: pytest.MonkeyPatch, meet: Callable[[], object]) -> None:
    """The exchange runs as plain Python."""
    for name, fake in {
        "pl": pallas(),
        "plgpu": mosaic_gpu("part"),
        "jnp": np,
        "_meet_cluster": meet,
    }.items():
        monkeypatch.setattr(gpu_exchange, name, fake)


@pytest.mark.parametrize(("nodes", "parts", "groups"), [(1, 2, 2), (2, 4, 2), (2, 2, 4)])
def test_all_who_share_a_node_learn_the_sums_of_all_blocks(
    monkeypatch: pytest.MonkeyPatch, nodes: int, parts: int, groups: int
) -> None:
    """A warpgroup is a thread; memory starts as anything, and one thread reads late."""
    rng = np.random.default_rng([nodes, parts, groups])
    counts = rng.integers(0, 1 << HALF, (TURNS, parts, groups, TRIALS, LINES))
    crew = Crew(nodes, parts, groups, is_interpreted=False)
    memory = rng.integers(0, 1 << 20, (parts, *crew.slots)).astype(np.int32)
    lines = rng.integers(0, 1 << 20, (parts, groups, TRIALS // 2, LINES)).astype(np.int32)
    everyone = threading.Barrier(parts * groups)

    def meet() -> None:
        if everyone.wait(20) == 0:
            time.sleep(0.005)

    as_python(monkeypatch, meet)

    def work(part: int, group: int) -> list[np.ndarray]:
        own = Memory(lines, part), Memory(memory, part)
        exchange = Exchange(crew, *own, None, part, group)
        words = counts[:, part, group].astype(np.uint32)
        pairs = (words[:, ::2] | words[:, 1::2] << np.uint32(HALF)).view(np.int32)
        return [exchange.totals([*pairs[turn]], turn) for turn in range(TURNS)]

    crowd = [*itertools.product(range(parts), range(groups))]
    with ThreadPoolExecutor(len(crowd)) as pool:
        found = [*pool.map(work, *zip(*crowd, strict=True))]
    for (_, group), sums in zip(crowd, found, strict=True):
        want = counts[:, :, group % nodes :: nodes].sum(axis=(1, 2, 4))
        np.testing.assert_array_equal(sums, want)


def test_a_flag_of_one_node_is_known_to_all_of_its_block(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(nodes=2, parts=2, groups=2, is_interpreted=False)
    for flags in itertools.product([False, True], repeat=2):
        memory, everyone = np.full((2, *crew.slots), 7, np.int32), threading.Barrier(4)
        as_python(monkeypatch, functools.partial(everyone.wait, 20))

        def work(
            part: int, group: int, memory: np.ndarray = memory, flags: tuple[bool, ...] = flags
        ) -> bool:
            exchange = Exchange(crew, None, Memory(memory, part), None, part, group)
            return bool(exchange.any_node(flags[group], SLOTS + 1))

        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(work, [0, 0, 1, 1], [0, 1, 0, 1])] == [any(flags)] * 4
