import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec import sample
from jaxspec.errors import UsageError
from jaxspec.sample import Noise, Sampling, choose, draw_noise, gumbel_noise, perturb
from tests.sampling_law import distance, law

chosen = jax.jit(choose)
perturbed = jax.jit(perturb)
drawn = jax.jit(draw_noise, static_argnums=(3, 4))
noise_of = jax.jit(gumbel_noise, static_argnums=2)


def quiet(batch, vocab):
    """Noise that is zero: without the generator a test compiles in a third of the time."""
    return Noise(jnp.zeros((batch, 1, vocab)), jnp.zeros(batch, jnp.int32))


# ------------------------------------------------------------------------------------------ greedy


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["float32", "bfloat16"]))
def test_greedy_is_the_lowest_id_of_the_largest_logit(seed, dtype):
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.integers(-3, 4, (2, 3, 11)), dtype)  # many ties
    best = np.argmax(np.asarray(logits, np.float32), -1)
    row = (jnp.zeros(2, jnp.uint32), jnp.zeros((2, 3), jnp.int32))
    for sampling in (Sampling.create(2), Sampling.create(2, temperature=[0.0, 1.0])):
        np.testing.assert_array_equal(chosen(logits, sampling, *row)[0], best[0])
        np.testing.assert_array_equal(jnp.argmax(perturbed(logits, sampling, *row), -1)[0], best[0])


def test_greedy_order_survives_rounding():
    """Neighbouring floats must not become equal by normalising: the first would win wrongly."""
    for scale in (1e-3, 1.0, 37.0, 1e4):
        top = np.float32(scale)
        logits = jnp.asarray([[[np.nextafter(top, np.float32(0)), top, -top, 0.0]]])
        row = (Sampling.create(1), jnp.zeros(1, jnp.uint32), jnp.zeros((1, 1), jnp.int32))
        assert chosen(logits, *row, noise=quiet(1, 4))[0, 0] == 1
        assert np.argmax(perturbed(logits, *row, noise=quiet(1, 4))) == 1


def test_all_greedy_batch_draws_no_noise_and_narrows_nothing(monkeypatch):
    calls = []

    def counted(name):
        function = getattr(sample, name)

        def call(*args):
            jax.debug.callback(lambda: calls.append(name))
            return function(*args)

        return call

    for name in ("gumbel_noise", "_heaviest"):
        monkeypatch.setattr(sample, name, counted(name))
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 7)), jnp.float32)
    seed, position = jnp.arange(2, dtype=jnp.uint32), jnp.ones((2, 3), jnp.int32)

    @jax.jit
    def step(sampling):
        noise = draw_noise(sampling, seed, jnp.ones(2, jnp.int32), 2, 7)
        return choose(logits, sampling, seed, position), perturb(
            logits, sampling, seed, position, noise=noise
        )

    jax.block_until_ready(step(Sampling.create(2, top_k=3, top_p=0.5)))
    jax.effects_barrier()
    assert not calls
    jax.block_until_ready(step(Sampling.create(2, temperature=[0.0, 1.0])))
    jax.effects_barrier()
    assert set(calls) == {"gumbel_noise"}
    jax.block_until_ready(step(Sampling.create(2, temperature=[0.0, 1.0], top_p=[1.0, 0.5])))
    jax.effects_barrier()
    assert set(calls) == {"gumbel_noise", "_heaviest"}


# ------------------------------------------------------------------------------------------- noise


def test_noise_depends_on_seed_and_position_alone():
    seed = jnp.array([0, 7, 2**31, 2**32 - 1], jnp.uint32)
    position = jnp.array([[3, 4, 4], [0, 1, 2**20], [5, 3, 1], [4, 4, 9]], jnp.int32)
    noise = np.asarray(noise_of(seed, position, 33))
    assert noise.dtype == np.float32
    for b in range(4):
        for n in range(3):
            alone = noise_of(seed[b : b + 1], position[b : b + 1, n : n + 1], 33)
            np.testing.assert_array_equal(noise[b, n], alone[0, 0])
    rows = {noise[b, n].tobytes() for b in range(4) for n in range(3)}
    assert len(rows) == 10  # (7, 4) and (2**32 - 1, 4) stand twice


def test_noise_is_standard_gumbel():
    draws = np.sort(
        np.asarray(noise_of(jnp.array([5], jnp.uint32), jnp.array([[2]]), 1 << 22)[0, 0])
    )
    cdf = np.exp(-np.exp(-draws.astype(np.float64)))
    distance = np.abs(cdf - (np.arange(draws.size) + 0.5) / draws.size).max()
    assert distance * np.sqrt(draws.size) < 1.95  # Kolmogorov-Smirnov, 1 in 1000


def grid_distance(draws):
    """How far the upper tail is from the grid of 2**-23 that one float32 uniform can reach."""
    steps = np.exp(-draws[draws > 12].astype(np.float64)) * 2**23
    return np.abs(steps - np.round(steps)).mean()


def test_noise_resolves_the_tail():
    """A token of probability 1e-7 in a large vocabulary is drawn as often as it should be."""
    size = 1 << 22
    ours = np.asarray(noise_of(jnp.array([1], jnp.uint32), jnp.array([[0]]), size)[0, 0])
    assert grid_distance(ours) > 0.1
    coarse = np.asarray(jax.random.gumbel(jax.random.key(1), (size,), mode="low"))
    assert grid_distance(coarse) < 0.01


def test_shared_noise_is_the_nodes_own():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(3, 6, 40)), jnp.float32)
    sampling = Sampling.create(3, temperature=[0.5, 0.0, 1.2], top_p=[1.0, 1.0, 0.8])
    seed, first = jnp.array([1, 2, 3], jnp.uint32), jnp.array([10, 0, 77])
    position = first[:, None] + jnp.array([0, 1, 1, 2, 2, 3])
    noise = drawn(sampling, seed, first, 4, 40)
    row = (logits, sampling, seed, position)
    scores = np.asarray(perturbed(*row))
    np.testing.assert_array_equal(perturbed(*row, noise=noise), scores)
    np.testing.assert_array_equal(chosen(*row, noise=noise), scores.argmax(-1))
    assert not drawn(Sampling.create(3), seed, first, 4, 40).value.any()


# ------------------------------------------------------------------------------- law of the choice


@pytest.mark.parametrize(
    "narrowing",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 4},
        {"top_p": 0.8},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.6},
    ],
)
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_choice_follows_the_law(narrowing, along):
    size = 200_000
    logits = np.log(np.array([0.31, 0.05, 0.22, 0.17, 0.13, 0.09, 0.03], np.float32))
    shape = (size, 1) if along == "seeds" else (1, size)
    sampling = Sampling.create(shape[0], **{"temperature": 1.0, **narrowing})
    tokens = chosen(
        jnp.broadcast_to(logits, (*shape, 7)),
        sampling,
        jnp.arange(shape[0], dtype=jnp.uint32) + 11,
        jnp.broadcast_to(jnp.arange(shape[1]), shape),
    )
    tokens = np.asarray(tokens)
    near, floor = distance(tokens, law(logits, **narrowing))
    assert near < 2.5 * floor
    wrong = {**narrowing, "temperature": narrowing.get("temperature", 1.0) * 1.3}
    assert distance(tokens, law(logits, **wrong))[0] > 5 * floor


def test_neighbouring_positions_and_seeds_are_independent():
    size = 200_000
    logits = np.array([0.3, -0.2, 0.9], np.float32)
    tokens = np.asarray(
        chosen(
            jnp.broadcast_to(logits, (size, 2, 3)),
            Sampling.create(size, temperature=1.0),
            jnp.arange(size, dtype=jnp.uint32),
            jnp.broadcast_to(jnp.array([8, 9]), (size, 2)),
        )
    )
    both = np.outer(law(logits), law(logits)).ravel()
    near, floor = distance(tokens[:, 0] * 3 + tokens[:, 1], both)
    assert near < 2.5 * floor
    near, floor = distance(tokens[:-1, 0] * 3 + tokens[1:, 0], both)
    assert near < 2.5 * floor
    assert distance(tokens[:, 0] * 4, both)[0] > 5 * floor  # the same noise twice would show


# ----------------------------------------------------------------------------------- mixed batches


def test_rows_do_not_influence_each_other():
    rng = np.random.default_rng(5)
    batch, nodes, vocab = 6, 4, 50
    logits = jnp.asarray(rng.normal(size=(batch, nodes, vocab)) * 2, jnp.float32)
    settings_of = {
        "temperature": [0.0, 1.0, 0.3, 2.0, 0.0, 1.0],
        "top_k": [0, 0, 5, 9, 3, 1],
        "top_p": [1.0, 0.9, 1.0, 0.5, 0.2, 1.0],
    }
    sampling = Sampling.create(batch, **settings_of)
    seed = jnp.asarray(rng.integers(0, 2**32, batch), jnp.uint32)
    position = jnp.asarray(rng.integers(0, 99, (batch, nodes)), jnp.int32)
    token = np.asarray(chosen(logits, sampling, seed, position))
    assert token.dtype == np.int32
    order = rng.permutation(batch)
    shuffled = jax.tree.map(lambda x: x[order], (logits, sampling, seed, position))
    np.testing.assert_array_equal(chosen(*shuffled), token[order])
    for b in range(batch):
        alone = Sampling.create(1, **{name: value[b] for name, value in settings_of.items()})
        row = (logits[b : b + 1], alone, seed[b : b + 1], position[b : b + 1])
        np.testing.assert_array_equal(chosen(*row)[0], token[b])
    greedy = np.asarray(logits.argmax(-1))
    for b in (0, 4, 5):  # top_k = 1 leaves the most probable token
        np.testing.assert_array_equal(token[b], greedy[b])


def test_settings_are_content_not_shape():
    traces = []

    @jax.jit
    def step(logits, sampling, seed, position):
        traces.append(1)
        return choose(logits, sampling, seed, position, noise=quiet(2, 7))

    for heat, k, p in ((0.0, 0, 1.0), (1.0, 0, 1.0), (0.7, 5, 0.9)):
        sampling = Sampling.create(2, temperature=heat, top_k=k, top_p=p)
        step(jnp.zeros((2, 3, 7)), sampling, jnp.zeros(2, jnp.uint32), jnp.zeros((2, 3), jnp.int32))
    assert len(traces) == 1


# ---------------------------------------------------------------------------------------- settings


def test_create_takes_one_value_or_one_a_sequence():
    sampling = Sampling.create(3, temperature=[0, 0.5, 2], top_k=7)
    assert [x.dtype for x in (sampling.temperature, sampling.greedy)] == [jnp.float32, jnp.bool_]
    assert [x.dtype for x in (sampling.top_k, sampling.top_p)] == [jnp.int32, jnp.float32]
    np.testing.assert_array_equal(sampling.greedy, [True, False, False])
    np.testing.assert_array_equal(sampling.temperature, [1, 0.5, 2])
    np.testing.assert_array_equal(sampling.top_k, [7, 7, 7])
    assert Sampling.create(2).greedy.all()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"temperature": -1.0}, "temperature has to be 0 or more"),
        ({"temperature": float("nan")}, "temperature has to be 0 or more"),
        ({"temperature": float("inf")}, "temperature has to be 0 or more"),
        ({"temperature": [0.5, 0.5, 0.5]}, "temperature needs one value or 2"),
        ({"top_k": -1}, "top_k has to be 0"),
        ({"top_k": 2**31}, "top_k has to be 0 .off. or up to 2147483647"),
        ({"top_k": [3, 2**32 + 1]}, "top_k has to be 0"),
        ({"top_k": 1.5}, "top_k has to be a whole number"),
        ({"top_p": 0.0}, "top_p has to be above 0"),
        ({"top_p": 1e-50}, "top_p has to be above 0"),
        ({"top_p": [0.5, 1.1]}, "top_p has to be above 0"),
    ],
)
def test_create_refuses_in_one_line(wrong, words):
    with pytest.raises(UsageError, match=words) as caught:
        Sampling.create(2, **wrong)
    assert "\n" not in str(caught.value)
