import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.tree import (
    NO_PARENT,
    TokenBlock,
    ancestor_mask,
    lineage,
    pack_bits,
    unpack_bits,
)
from tests.random_trees import ancestry, depths, random_parents, random_trees

mask_of = jax.jit(ancestor_mask)
lineage_of = jax.jit(lineage, static_argnums=1)
block_of = jax.jit(TokenBlock.tree)

# Around the borders of a packed word, and of powers of two (pointer doubling).
sizes = st.sampled_from([1, 2, 3, 8, 9, 32, 33, 65])
seeds = st.integers(0, 2**32 - 1)


def loop_mask(parent):
    mask = np.zeros((len(parent), len(parent)), bool)
    for i in range(len(parent)):
        mask[i, ancestry(parent, i)] = True
    return mask


@settings(max_examples=60, deadline=None)
@given(sizes, seeds)
def test_ancestor_mask_is_the_walk_up(nodes, seed):
    parent = random_parents(np.random.default_rng(seed), nodes)
    np.testing.assert_array_equal(mask_of(parent), loop_mask(parent))


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 7, 8, 9, 33, 64, 65, 130])
def test_deepest_chain_reaches_its_root(nodes):
    parent = np.arange(-1, nodes - 1, dtype=np.int32)
    np.testing.assert_array_equal(mask_of(parent), np.tri(nodes, dtype=bool))


def test_node_without_parent_has_itself_alone():
    parent = np.array([NO_PARENT, 0, NO_PARENT, 2, 1], np.int32)
    np.testing.assert_array_equal(mask_of(parent), loop_mask(parent))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([1, 3, 9, 33]), seeds, st.sampled_from([1, 5, 40]))
def test_lineage_lists_the_nearest_ancestors(nodes, seed, reach):
    parent = random_parents(np.random.default_rng(seed), nodes)
    index, known = jax.device_get(lineage_of(mask_of(parent), reach))
    for node in range(nodes):
        path = ancestry(parent, node)[:reach]
        np.testing.assert_array_equal(index[node], path + [0] * (reach - len(path)))
        np.testing.assert_array_equal(known[node], np.arange(reach) < len(path))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(1,), (31,), (32,), (33,), (3, 64), (2, 3, 65)]),
    seeds,
)
def test_packing_is_little_endian_and_reversible(shape, seed):
    mask = np.random.default_rng(seed).random(shape) < 0.5
    words = pack_bits(jnp.asarray(mask))
    assert words.dtype == jnp.uint32
    assert words.shape == (*shape[:-1], -(-shape[-1] // 32))
    np.testing.assert_array_equal(unpack_bits(words, shape[-1]), mask)
    for row, packed in zip(
        mask.reshape(-1, shape[-1]), np.asarray(words).reshape(-1, words.shape[-1]), strict=True
    ):
        whole = sum(int(word) << 32 * i for i, word in enumerate(packed))
        assert whole == sum(1 << i for i, bit in enumerate(row) if bit)  # padding bits are zero


@settings(max_examples=30, deadline=None)
@given(sizes, seeds)
def test_tree_block(nodes, seed):
    rng = np.random.default_rng(seed)
    tree = random_trees(rng, 3, nodes, vocab=50, dead=0.3)
    length = rng.integers(0, 1000, 3)
    block = block_of(tree, length)
    mask = jax.device_get(unpack_bits(block.ancestors, nodes))
    position = jax.device_get(block.position)
    for b, parent in enumerate(jax.device_get(tree.parent)):
        np.testing.assert_array_equal(position[b], length[b] + depths(parent))
        np.testing.assert_array_equal(mask[b], loop_mask(parent))
    np.testing.assert_array_equal(block.valid, tree.live)
    np.testing.assert_array_equal(block.token, tree.token)
    assert block.kind == "tree"


def test_chain_block_counts_its_leading_tokens():
    token = jnp.arange(12).reshape(3, 4)
    block = TokenBlock.chain(token, jnp.array([0, 5, 9]), jnp.array([4, 0, 2]))
    np.testing.assert_array_equal(block.position, [[0, 1, 2, 3], [5, 6, 7, 8], [9, 10, 11, 12]])
    np.testing.assert_array_equal(block.valid.sum(1), [4, 0, 2])
    assert block.valid[2, :2].all()
    assert TokenBlock.chain(token, jnp.array([0, 5, 9])).valid.all()
    assert block.kind == "chain"


def test_trees_of_one_size_share_a_compilation():
    traces = []

    @jax.jit
    def block(tree, length):
        traces.append(1)
        return TokenBlock.tree(tree, length)

    rng = np.random.default_rng(0)
    for _ in range(4):
        block(random_trees(rng, 2, 9, vocab=5, dead=0.2), jnp.asarray(rng.integers(0, 9, 2)))
    assert len(traces) == 1
