"""Top-k and top-p against sorting, and at their edges."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxspec.sample import BOUNDARY, MASKED, Noise, Sampling, choose, margin, perturb
from tests.sampling_law import law

chosen = jax.jit(choose)
perturbed = jax.jit(perturb)


def quiet(logits, sampling):
    """Arguments for logits `[B, N, V]` with noise that is zero, so that the law itself is left."""
    batch, nodes, vocab = logits.shape
    return {
        "logits": jnp.asarray(logits, jnp.float32),
        "sampling": sampling,
        "seed": jnp.zeros(batch, jnp.uint32),
        "position": jnp.zeros((batch, nodes), jnp.int32),
        "noise": Noise(jnp.zeros((batch, 1, vocab)), jnp.zeros(batch, jnp.int32)),
    }


def probabilities(logits, sampling):
    """What `perturb` leaves of each row, as probabilities."""
    scores = np.asarray(perturbed(**quiet(logits, sampling)), np.float64)
    assert np.isfinite(scores).all()
    weight = np.where(scores > MASKED / 2, np.exp(scores), 0)
    return weight / weight.sum(-1, keepdims=True)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(
        st.tuples(
            st.floats(0.05, 3.0),
            st.integers(0, 15),
            st.one_of(st.floats(1e-6, 1.0), st.just(1.0)),
        ),
        min_size=4,
        max_size=4,
    ),
    st.sampled_from([1.0, 4.0, 0.0]),
)
def test_narrowing_equals_sorting(seed, settings_of_rows, spread):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(4, 2, 13)) * spread
    if spread == 4.0:
        logits = np.round(logits)  # ties at the boundaries
    logits = logits.astype(np.float32)
    heat, top_k, top_p = (np.array(x) for x in zip(*settings_of_rows, strict=True))
    sampling = Sampling.create(4, temperature=heat, top_k=top_k, top_p=top_p)
    ours = probabilities(logits, sampling)
    for b in range(4):
        for n in range(2):
            want = law(
                logits[b, n],
                temperature=float(np.float32(heat[b])),
                top_k=int(top_k[b]),
                top_p=float(np.float32(top_p[b])),
            )
            assume(want is not None)
            np.testing.assert_array_equal(ours[b, n] > 0, want > 0)
            np.testing.assert_allclose(ours[b, n], want, rtol=3e-4, atol=1e-7)


def kept(logits, **narrowing):
    """Ids that one row's distribution leaves."""
    sampling = Sampling.create(1, temperature=1.0, **narrowing)
    return np.flatnonzero(probabilities(np.array(logits)[None, None], sampling))


def test_edges_of_top_k_and_top_p():
    flat, falling = np.zeros(8), np.log([0.4, 0.3, 0.2, 0.1])
    assert kept(flat, top_k=3).tolist() == [0, 1, 2]  # equals: the lowest ids
    assert kept(flat, top_p=0.5).tolist() == [0, 1, 2, 3]  # reached exactly
    assert kept(flat, top_p=0.5000001).tolist() == [0, 1, 2, 3, 4]
    assert kept(flat, top_p=1e-30).tolist() == [0]  # always one
    assert kept(flat, top_k=100).tolist() == list(range(8))
    assert kept(falling, top_p=1.0).tolist() == [0, 1, 2, 3]
    assert kept(falling, top_p=0.75).tolist() == [0, 1, 2]
    assert kept(falling, top_k=1).tolist() == [0]
    # The nucleus is taken of what top-k leaves: 0.4 / 0.7 reaches a half, 0.4 does not.
    assert kept(falling, top_k=2, top_p=0.5).tolist() == [0]
    assert kept(falling, top_p=0.5).tolist() == [0, 1]
    assert kept([5.0, -0.0, 0.0, 5.0, 0.0], top_k=3).tolist() == [0, 1, 3]  # zeros are equal
    assert kept([-np.inf, 1.0, -np.inf, 0.0]).tolist() == [1, 3]


def test_scores_are_finite_for_extreme_logits():
    logits = np.array([[[-np.inf, 1e30, -1e30, 3.4e38, 0.0, -3.4e38]]])
    for temperature in (1e-30, 1e-6, 1.0, 1e6):
        row = quiet(logits, Sampling.create(1, temperature=temperature, top_p=0.9))
        assert jnp.isfinite(perturbed(**row)).all()
        assert chosen(**row)[0, 0] == 3


def test_a_margin_is_zero_where_a_nucleus_by_a_hair_wider_or_narrower_chooses_otherwise():
    """At 0.9 a third token is in or out: where it would be chosen, nothing holds the choice."""
    rows = 200
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.6, 0.3, 0.1])), (rows, 1, 3))
    asked = {"seed": jnp.arange(rows, dtype=jnp.uint32), "position": jnp.ones((rows, 1), int)}
    narrow, wide = (
        chosen(logits, Sampling.create(rows, temperature=1.0, top_p=0.9 * scale), **asked)
        for scale in (1 - BOUNDARY, 1 + BOUNDARY)
    )
    differs = np.asarray(narrow != wide)
    assert 0 < differs.sum() < rows // 4
    for scale in (1 - BOUNDARY / 2, 1 + BOUNDARY / 2):
        sampling = Sampling.create(rows, temperature=1.0, top_p=0.9 * scale)
        gap = np.asarray(jax.jit(margin)(logits, sampling, **asked))
        assert np.array_equal(gap == 0, differs)
