import dataclasses
import heapq
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.draft.grow import Candidates, Frontier, TreeShape, expand, frontier, select
from jaxspec.sample import MASKED
from jaxspec.tree import NO_PARENT
from tests.random_trees import ancestry, depths

EVERY = 1 << 20
"""A budget that no candidate is beyond."""


def grow(table, root, *, levels, width, top_k, sharpness=1.0, budget=EVERY):
    """Candidates of a drafter whose scores depend on the last token: `table [V, V]`."""
    candidates = Candidates.empty(root.shape[0], levels=levels, width=width, top_k=top_k)
    front = Frontier.root(root, width=width)
    fronts = []
    for level in range(levels):
        fronts.append(front)
        scores = table[front.token[:, :1] if level == 0 else front.token]
        candidates = expand(candidates, front, scores, sharpness=sharpness)
        front = frontier(candidates, budget)
    return candidates, fronts


grown = jax.jit(grow, static_argnames=("levels", "width", "top_k", "budget"))
selected = jax.jit(select, static_argnums=2)


def random_candidates(rng, *, levels, width, top_k, batch=1, grain=None, dead=0.0):
    """Candidates with random edges; a grain makes many equal scores and edges of zero."""
    block = width * top_k
    shape = (batch, levels * block)
    parent = np.full(shape, NO_PARENT, np.int32)
    score = np.full(shape, MASKED, np.float32)
    live = np.zeros(shape, bool)
    for b, i in np.ndindex(shape):
        level, slot = divmod(i, block)
        if level == 0:
            above, alive = np.float32(0), slot < top_k
        else:
            if slot % top_k == 0:
                choice = rng.integers((level - 1) * block, level * block)
            parent[b, i] = choice
            above, alive = score[b, choice], live[b, choice]
        if alive and rng.random() >= dead:
            edge = rng.exponential() if grain is None else grain * rng.integers(0, 3)
            score[b, i], live[b, i] = above - np.float32(edge), True
    empty = Candidates.empty(batch, levels=levels, width=width, top_k=top_k)
    token = rng.integers(0, 1000, shape)
    return dataclasses.replace(
        empty,
        token=jnp.asarray(token, jnp.int32),
        parent=jnp.asarray(parent),
        score=jnp.asarray(score),
        live=jnp.asarray(live),
        level=jnp.int32(levels),
    )


def best_first(parent, score, live, count):
    """Candidates in the order in which a heap gives them: by score, depth, index."""
    depth = depths(parent) + 1
    heap = [(-score[i], depth[i], i) for i in np.flatnonzero((parent == NO_PARENT) & live)]
    heapq.heapify(heap)
    order = []
    while heap and len(order) < count:
        i = heapq.heappop(heap)[2]
        order.append(int(i))
        for c in np.flatnonzero((parent == i) & live):
            heapq.heappush(heap, (-score[c], depth[c], c))
    return order


# ------------------------------------------------------------------------------------------ select


@pytest.mark.parametrize("grain", [None, 0.5])
@pytest.mark.parametrize(("levels", "width", "top_k"), [(1, 1, 4), (3, 2, 2), (5, 1, 1), (3, 4, 4)])
def test_select_is_best_first(levels, width, top_k, grain):
    rng = np.random.default_rng(levels * width)
    batch = 20
    for dead in (0.0, 0.4):
        candidates = random_candidates(
            rng, levels=levels, width=width, top_k=top_k, batch=batch, grain=grain, dead=dead
        )
        token, parent, score, live = (
            np.asarray(getattr(candidates, name)) for name in ("token", "parent", "score", "live")
        )
        for budget in (1, 2, 5, 16):
            root = rng.integers(0, 1000, batch).astype(np.int32)
            tree = jax.device_get(selected(candidates, root, budget))
            assert tree.token.shape == (batch, budget)
            assert (tree.parent[:, 1:] < np.arange(1, budget)).all()
            for b in range(batch):
                order = best_first(parent[b], score[b], live[b], budget - 1)
                size = 1 + len(order)
                node = {NO_PARENT: 0, **{c: i + 1 for i, c in enumerate(order)}}
                np.testing.assert_array_equal(tree.live[b], np.arange(budget) < size)
                assert tree.token[b, :size].tolist() == [root[b], *token[b, order]]
                assert tree.parent[b, 0] == NO_PARENT
                assert tree.parent[b, 1:size].tolist() == [node[parent[b, c]] for c in order]
                assert tree.score[b, :size].tolist() == [0.0, *score[b, order]]
            assert (tree.parent[:, 1:] >= 0).all()


def test_no_ancestor_closed_subset_is_worth_more():
    """All subsets: the expected number of accepted nodes is the sum of the paths' probabilities."""
    rng = np.random.default_rng(0)
    for trial in range(12):
        candidates = random_candidates(
            rng, levels=3, width=2, top_k=2, dead=0.1, grain=None if trial % 2 else 0.5
        )
        parent = np.asarray(candidates.parent[0])
        worth = np.where(candidates.live[0], np.exp(np.asarray(candidates.score[0], float)), 0)
        for budget in (2, 4, 7):
            best = max(
                worth[list(subset)].sum()
                for size in range(budget)
                for subset in itertools.combinations(range(12), size)
                if all(parent[i] in {NO_PARENT, *subset} for i in subset)
            )
            tree = selected(candidates, jnp.zeros(1, jnp.int32), budget)
            ours = np.where(tree.live[0], np.exp(np.asarray(tree.score[0], float)), 0)[1:].sum()
            np.testing.assert_allclose(ours, best, rtol=1e-6)


def test_smaller_budget_is_a_prefix():
    rng = np.random.default_rng(2)
    candidates = random_candidates(rng, levels=4, width=3, top_k=3, batch=8, grain=0.25)
    root = jnp.arange(8, dtype=jnp.int32)
    whole = selected(candidates, root, 24)
    for budget in (1, 2, 7, 23):
        start = jax.tree.map(lambda leaf, size=budget: leaf[:, :size], whole)
        jax.tree.map(np.testing.assert_array_equal, selected(candidates, root, budget), start)


def test_sequence_that_does_not_draft_has_no_live_node():
    candidates = random_candidates(np.random.default_rng(3), levels=2, width=2, top_k=2, batch=3)
    live = jnp.array([True, False, True])
    tree = selected(candidates, jnp.zeros(3, jnp.int32), 6, live=live)
    np.testing.assert_array_equal(tree.live.any(1), live)


# ------------------------------------------------------------------------------------------ expand


def reference(table, root, *, levels, width, top_k, sharpness=1.0):
    """Candidates as `{path of tokens: score}` level by level, in float64."""
    front, found = [((), 0.0, root)], []
    for _ in range(levels):
        children = []
        for path, above, token in front:
            scaled = sharpness * table[token].astype(np.float64)
            log_prob = scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()
            for child in np.argsort(-table[token], kind="stable")[:top_k]:
                if table[token, child] > MASKED / 2:
                    children.append(((*path, int(child)), above + log_prob[child], int(child)))
        found.append({path: score for path, score, _ in children})
        front = sorted(children, key=lambda child: -child[1])[:width]
    return found


def paths(candidates, b):
    """The same of our candidates."""
    token, parent = np.asarray(candidates.token[b]), np.asarray(candidates.parent[b])
    depth = np.asarray(candidates.depth)
    found = [{} for _ in range(depth.max())]
    for i in np.flatnonzero(candidates.live[b]):
        line = ancestry(parent, i)[::-1]
        assert len(line) == depth[i]
        found[depth[i] - 1][tuple(token[line].tolist())] = float(candidates.score[b, i])
    return found


@pytest.mark.parametrize("sharpened", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("levels", "width", "top_k"), [(1, 1, 3), (4, 1, 1), (3, 2, 2), (3, 4, 3)])
def test_growth_is_a_beam_of_path_scores(levels, width, top_k, dtype, sharpened):
    rng = np.random.default_rng(levels + width)
    table = jnp.asarray(rng.normal(size=(9, 9)) * 2, dtype)
    table = table.at[:, 4].set(MASKED)  # a token that cannot be chosen is no candidate
    table = table.at[5, :].set(MASKED).at[5, 2].set(0.0)
    sharpness = float(rng.uniform(0.5, 2.5)) if sharpened else 1.0
    size = {"levels": levels, "width": width, "top_k": top_k}
    root = jnp.array([0, 5, 8], jnp.int32)
    candidates, _ = grown(table, root, **size, sharpness=sharpness)
    for b in range(3):
        want = reference(np.asarray(table, np.float32), int(root[b]), **size, sharpness=sharpness)
        for ours, theirs in zip(paths(candidates, b), want, strict=True):
            assert ours.keys() == theirs.keys()
            for path, score in theirs.items():
                np.testing.assert_allclose(ours[path], score, rtol=1e-5, atol=1e-5)
    assert np.isfinite(candidates.score).all()


def test_frontier_knows_where_its_parents_stood():
    rng = np.random.default_rng(4)
    table = jnp.asarray(rng.normal(size=(30, 30)), jnp.float32)
    root = jnp.array([3, 7], jnp.int32)
    candidates, fronts = grown(table, root, levels=4, width=3, top_k=2)
    for before, front in itertools.pairwise(fronts):
        for b, w in np.ndindex(2, 3):
            if not front.live[b, w]:
                continue
            index = int(front.index[b, w])
            slot = int(front.parent_slot[b, w])
            assert candidates.parent[b, index] == before.index[b, slot]
            assert candidates.token[b, index] == front.token[b, w]
            assert candidates.score[b, index] == front.score[b, w]
        assert (np.diff(np.where(front.live, front.score, MASKED), axis=1) <= 0).all()
    assert fronts[1].live.sum(1).tolist() == [2, 2]  # the root has two children only


@pytest.mark.parametrize(
    ("levels", "width", "top_k", "budget"),
    [(5, 2, 2, 6), (4, 4, 4, 16), (6, 1, 3, 7), (4, 3, 3, 2)],
)
def test_what_cannot_enter_a_tree_does_not_grow_and_is_not_missed(levels, width, top_k, budget):
    """Scores of flat, steep, tied and certain drafts; the order of candidates is a heap's."""
    rng = np.random.default_rng(budget)
    root = jnp.arange(24, dtype=jnp.int32)
    shape = {"levels": levels, "width": width, "top_k": top_k}
    dropped = 0
    for spread, grain in ((0.1, None), (3.0, None), (2.0, 1.0), (1e30, None)):
        table = rng.normal(size=(24, 24)) * spread
        table = jnp.asarray(
            table if grain is None else np.round(table / grain) * grain, jnp.float32
        )
        every, _ = grown(table, root, **shape)
        candidates, fronts = grown(table, root, **shape, budget=budget)
        want = selected(every, root, budget)
        jax.tree.map(np.testing.assert_array_equal, selected(candidates, root, budget), want)
        parent, score, live = (
            np.asarray(x) for x in (candidates.parent, candidates.score, candidates.live)
        )
        for level, front in enumerate(fronts[1:], 1):
            known = np.arange(parent.shape[1]) < level * width * top_k
            for b in range(len(root)):
                first = best_first(parent[b], score[b], live[b] & known, budget - 1)
                grows = set(np.asarray(front.index[b])[np.asarray(front.live[b])].tolist())
                mine = np.flatnonzero(live[b] & known & (np.asarray(candidates.depth) == level))
                best = sorted(mine, key=lambda i, b=b: (-score[b, i], i))[:width]
                assert grows == set(best) & set(first)
                dropped += len(best) - len(grows)
    assert dropped > 0


@pytest.mark.parametrize("budget", range(2, 65))
def test_a_tree_may_be_as_deep_as_the_chain_of_its_budget(budget):
    tree, chain = TreeShape.tree(budget), TreeShape.chain(budget)
    assert (tree.budget, chain.budget, chain.levels) == (budget, budget, budget - 1)
    assert tree.levels == chain.levels
    assert (chain.width, chain.top_k) == (1, 1)
    # Candidates for every node, if the draft is sure of none.
    assert tree.top_k + (tree.levels - 1) * tree.width * tree.top_k >= budget - 1


def test_chain_is_width_one():
    rng = np.random.default_rng(5)
    table = jnp.asarray(rng.normal(size=(20, 20)), jnp.float32)
    root = jnp.arange(20, dtype=jnp.int32)
    candidates, _ = grown(table, root, levels=6, width=1, top_k=1)
    tree = selected(candidates, root, 7)
    assert tree.live.all()
    np.testing.assert_array_equal(tree.parent, np.broadcast_to(np.arange(-1, 6), (20, 7)))
    best = np.asarray(table.argmax(1))
    for d in range(6):
        np.testing.assert_array_equal(tree.token[:, d + 1], best[np.asarray(tree.token[:, d])])


@pytest.mark.parametrize("spread", [0.0, 1e-6, 1.0, 200.0, 1e30])
def test_scores_never_rise_along_a_path(spread):
    """Also where a child is certain, so that its edge rounds to zero: closure must hold."""
    rng = np.random.default_rng(6)
    table = jnp.asarray(rng.normal(size=(40, 40)) * spread, jnp.float32)
    root = jnp.arange(40, dtype=jnp.int32)
    candidates, _ = grown(table, root, levels=5, width=4, top_k=3)
    score, parent, live = (
        np.asarray(x) for x in (candidates.score, candidates.parent, candidates.live)
    )
    above = np.where(parent == NO_PARENT, 0, np.take_along_axis(score, np.maximum(parent, 0), 1))
    assert np.isfinite(score).all()
    assert (score <= above)[live].all()
    tree = selected(candidates, root, 16)
    below = np.take_along_axis(np.asarray(tree.live), np.maximum(tree.parent, 0), 1)
    assert (below | ~tree.live).all()


def test_growth_fits_a_scan_and_mixes_no_rows():
    rng = np.random.default_rng(7)
    table = jnp.asarray(rng.normal(size=(25, 25)), jnp.float32)
    root = jnp.arange(6, dtype=jnp.int32)

    @jax.jit
    def scanned(root):
        def step(carry, _):
            candidates, front = carry
            candidates = expand(candidates, front, table[front.token])
            return (candidates, frontier(candidates, EVERY)), None

        empty = Candidates.empty(root.shape[0], levels=4, width=3, top_k=2)
        start = (empty, Frontier.root(root, width=3))
        return jax.lax.scan(step, start, length=4)[0][0]

    together, _ = grown(table, root, levels=4, width=3, top_k=2)
    alone, _ = grown(table, root[2:3], levels=4, width=3, top_k=2)
    for ours, rows in ((scanned(root), slice(None)), (alone, slice(2, 3))):
        live = np.asarray(together.live[rows])
        np.testing.assert_array_equal(ours.live, live)
        for name in ("token", "parent", "score"):
            want, have = getattr(together, name)[rows], getattr(ours, name)
            np.testing.assert_array_equal(np.asarray(have)[live], np.asarray(want)[live])


def test_level_beyond_the_capacity_is_dropped():
    table = jnp.asarray(np.random.default_rng(8).normal(size=(9, 9)), jnp.float32)
    candidates, fronts = grown(table, jnp.zeros(1, jnp.int32), levels=2, width=2, top_k=2)
    more = jax.jit(expand)(candidates, fronts[-1], table[fronts[-1].token])
    for name in ("token", "parent", "score", "live"):
        np.testing.assert_array_equal(getattr(more, name), getattr(candidates, name))
