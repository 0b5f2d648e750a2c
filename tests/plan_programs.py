"""Little programs for the tests of `jaxspec.plan`, built in the process that compiles them."""

import os
import time

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jaxspec.plan.program import Program, Traffic

FLOATS = ShapeDtypeStruct((64, 128), jnp.float32)


def scratch(mib: int, limit: int | None = None) -> Program:
    """A TPU kernel that keeps `mib` MiB of scratch and asks for at most `limit` MiB."""

    def kernel(x_ref, o_ref, kept):
        kept[:64] = x_ref[...]
        o_ref[...] = kept[:64] + kept[64:128]

    def run(x):
        params = pltpu.CompilerParams(vmem_limit_bytes=limit and limit << 20)
        return pl.pallas_call(
            kernel,
            out_shape=x,
            scratch_shapes=[pltpu.VMEM((mib << 11, 128), jnp.float32)],
            compiler_params=params,
            name="keeps_scratch",
        )(x)

    return Program(run, (FLOATS,), lambda: Traffic(64 * 512, 64 * 512, 2 * 64 * 512))


def transposes() -> Program:
    """XLA must move its operand around before the kernel reads it."""

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def run(x):
        return pl.pallas_call(double, out_shape=ShapeDtypeStruct((128, 64), x.dtype))(x.T)

    return Program(run, (FLOATS,))


def doubles() -> Program:
    """A GPU kernel that keeps 16 KiB in shared memory."""

    def kernel(x_ref, o_ref, kept):
        kept[...] = x_ref[...]
        o_ref[...] = kept[...] + kept[...]

    def run(x):
        return plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
            scratch_types=[plgpu.SMEM((32, 128), jnp.float32)],
            grid=(1,),
            grid_names=("step",),
        )(x)

    return Program(run, (ShapeDtypeStruct((32, 128), jnp.float32),))


def dies() -> Program:
    """Ends its process as a compiler does on a fault of its own."""
    os.write(2, b"some noise\nF0101 llo.cc:7] Check failed: llo::CouldLe(a, b)\nmore noise\n")
    os.abort()


def hangs() -> Program:
    time.sleep(60)
    raise AssertionError


def refuses() -> Program:
    print("a library prints this on standard output")
    raise ValueError("no such\n  kernel")


def plain() -> Program:
    """No Pallas kernel in it."""
    return Program(jax.nn.relu, (FLOATS,))


def huge() -> Program:
    """One operand of 16 GiB."""
    return Program(jax.nn.relu, (ShapeDtypeStruct((1 << 32,), jnp.float32),))
