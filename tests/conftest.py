"""Settings of the whole test run, and the small model that the law tests share."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# XLA's pool of threads: a warpgroup that waits in the interpreter of GPU kernels holds one of them,
# and with no more threads than warpgroups nothing ever arrives.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))
# Tests compile for longer than they run. What shows in optimised programs alone asks for them:
# `full_compile`, and `FULL_COMPILE` of `serial.py`.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}"
# What is drawn is mostly the seed of a generator, of which there is no simpler one to look for.
PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.shrink]
hypothesis.settings.register_profile("jaxspec", deadline=None, print_blob=True, phases=PHASES)
hypothesis.settings.load_profile("jaxspec")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--transformers-python",
        default=sys.executable,
        metavar="PATH",
        help="Python that has transformers, for -m transformers (default: that of the tests)",
    )


TINY = {
    "compress_ratios": [0, 4, 8],
    "sliding_window": 8,
    "index_topk": 2,
    "qk_rope_head_dim": 4,
}
"""One layer of each kind, with windows and ratios so small that every edge is near."""


MOST_MAPPINGS = 30_000
"""Of a process between two files of tests. XLA maps every kernel of a program on its own, Linux
allows 65,530 by default, and at the limit a compilation aborts the process."""


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """After a file, forgets all compiled programs if they are many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_bytes().splitlines()) > MOST_MAPPINGS:
        import jax

        jax.clear_caches()


@pytest.fixture
def full_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine's programs are compiled as they are for its users."""
    from jaxspec import compiler
    from tests.serial import FULL_COMPILE

    options = compiler.inference_options
    monkeypatch.setattr(compiler, "inference_options", lambda: (options() or {}) | FULL_COMPILE)
    compiler.jit.cache_clear()
    yield
    compiler.jit.cache_clear()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """The model TINY with random weights."""
    from tests.serial import random_model

    return random_model(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="session")
def started(tiny):
    """A batch of sequences of TINY, decoded serially up to the start positions below 131."""
    from tests.starts import POSITIONS, start_at

    return start_at(tiny, [position for position in POSITIONS if position < 131])


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory):
    """The model without layers of `doubles.py`."""
    from tests.doubles import toy_model

    return toy_model(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def drafter(toy):
    """Its drafter that is right often and wrong often."""
    from tests.doubles import dice_drafter

    return dice_drafter(toy, nodes=8, depth=4, seed=0)


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """`shared/fixtures` beside the checkout: tiny checkpoints with the released code's outputs."""
    folder = Path(__file__).parents[2] / "shared" / "fixtures"
    if not folder.exists():
        pytest.skip(f"no fixtures at {folder}: put them beside the checkout to run this")
    return folder
