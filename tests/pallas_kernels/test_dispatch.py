"""Which implementation runs: the platform that a program is for, and interpretation."""

import contextlib

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxspec import RunConfig
from jaxspec.errors import UsageError
from jaxspec.model.backends import check_impl
from pallas_kernels import dispatch

BACKENDS = {name: (lambda name=name: name) for name in ("ref", "cpu", "tpu", "gpu")}
DEVICES = {"tpu": ("TPU v6 lite", 1), "gpu": ("NVIDIA H200", 132)}


def compiling_for(platform: str) -> contextlib.AbstractContextManager:
    """As if a program were compiled for hardware that is not here."""
    kind, cores = DEVICES[platform]
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def traced(impl: str) -> str:
    """What an op takes while a program is traced."""
    found = []

    def program(x: jax.Array) -> jax.Array:
        found.append(dispatch.resolve(impl, "op", BACKENDS)())
        return x

    jax.eval_shape(program, 0.0)
    return found[0]


@pytest.mark.parametrize(("impl", "words"), [("tpu", "needs a TPU"), ("gpu", "needs a GPU")])
def test_a_kernel_without_its_hardware_says_what_it_needs(impl: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"{impl}.*cannot run: it {words} and this is a cpu"):
        dispatch.resolve(impl, "op", BACKENDS)
    with pytest.raises(UsageError, match="cannot run"):
        check_impl(impl)


def test_interpretation_admits_tpu_kernels_and_no_others() -> None:
    assert not dispatch.is_interpreted()
    with pltpu.force_tpu_interpret_mode():
        assert dispatch.is_interpreted()
        assert traced("tpu") == "tpu"
        assert traced("auto") == "cpu"
        with pytest.raises(ValueError, match="needs a GPU"):
            traced("gpu")
    assert not dispatch.is_interpreted()


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_a_program_for_other_hardware_takes_its_kernels(platform: str) -> None:
    other = {"tpu": "gpu", "gpu": "tpu"}[platform]
    with compiling_for(platform):
        assert traced(platform) == traced("auto") == platform
        assert traced("ref") == "ref"
        with pytest.raises(ValueError, match=f"and this is a {platform}"):
            traced(other)
    assert traced("auto") == "cpu"


def test_any_platform_runs_what_is_plain_jax() -> None:
    assert traced("cpu") == "cpu"
    with compiling_for("tpu"):
        assert traced("cpu") == "cpu"
    check_impl("cpu")
    check_impl("auto")


def test_an_engine_refuses_kernels_that_cannot_run(toy) -> None:
    from jaxspec import Engine

    params, cfg = toy.params, toy.cfg
    with pytest.raises(UsageError, match="needs a TPU"):
        Engine(params, cfg, RunConfig(method="none", impl="tpu"))
