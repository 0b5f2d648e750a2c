"""Ahead-of-time compiles: what compilers say is read right, and their deaths do no harm."""

import dataclasses
import json
import subprocess
import sys
import time

import pytest

from jaxspec.plan import __main__ as command
from jaxspec.plan import dumps, table
from jaxspec.plan.compile import Compiler, compile_all
from jaxspec.plan.kernels import OPS, jobs
from jaxspec.plan.program import Job, Kernel, Outcome, Traffic
from jaxspec.plan.targets import TARGETS, missing

HLO = """\
HloModule jit_f

%fused (p: bf16[8,128]) -> bf16[8,128] {
  %copy.9 = bf16[8,128]{1,0} copy(%p)
}

ENTRY %main (a: f32[3]) -> f32[3] {
  %a = f32[3]{0} parameter(0)
  %pad.1 = bf16[8,128]{1,0:T(8,128)(2,1)} pad(%a), padding=0_1
  %slice-done = s8[16]{0:T(128)S(1)} slice-done(%a)
  %copy-start.1 = (f32[3]{0}, f32[3]{0}) copy-start(%a)
  %fusion = (u8[5]{0}, pred[4]{0}) fusion(%a), kind=kLoop
  ROOT %copy.2 = f32[3]{0} copy(%a)
}
"""
JOB = Job("tree", "tests.plan_programs:refuses", is_memory_bound=True)


def program(name: str, **arguments: int) -> Job:
    return Job(name, f"tests.plan_programs:{name}", arguments)


def compile_here(target: str, *wanted: Job) -> list[Outcome]:
    if (lack := missing(TARGETS[target])) is not None:
        pytest.skip(lack)
    return list(compile_all(TARGETS[target], wanted, timeout=120))


def test_the_operations_around_kernels_are_those_of_the_entry() -> None:
    assert dumps.around_kernels(HLO) == {
        "pad": 2048,
        "slice-done to VMEM": 16,
        "fusion": 9,
        "copy": 12,
    }


def test_utilization_counts_bundles_and_slots() -> None:
    text = "== CAPACTIY:\nMXU, VSTORE:SPILL\n  2  1\n== UTILIZATION:\n0 0\n2 1\n1 0\n"
    assert dumps.read_utilization(text) == (3, {"MXU": (3, 6), "VSTORE:SPILL": (1, 3)})


def test_gpu_kernels_are_read_from_what_is_printed() -> None:
    """Registers and both kinds of spill from ptxas, shared memory from the host's launch."""

    def ptxas(name: str, registers: int, spills: tuple[int, int]) -> str:
        return (
            f"ptxas info    : Compiling entry function '{name}_mosaic_gpu_kernel' for 'sm_90a'\n"
            f"    8 bytes stack frame, {spills[0]} bytes spill stores, "
            f"{spills[1]} bytes spill loads\n"
            f"ptxas info    : Used {registers} registers, used 16 barriers, 1 bytes smem\n"
        )

    def launch(function: str, smem: int) -> str:
        sizes = ", ".join(f"i32 {n}" for n in range(1, 10))
        return f"  call void @mosaic_gpu_{function}(ptr %0, {sizes}, i32 {smem}, ptr %1, ptr %2)\n"

    first = launch("launch_kernel", 4096) + "noise\n" + ptxas("scores", 168, (4, 12))
    second = launch("build_kernel_spec", 512) + ptxas("choice", 40, (0, 0))
    scores = Kernel("scores", smem=4096, registers=168, spilled=16)
    choice = Kernel("choice", smem=512, registers=40, spilled=0)
    assert dumps.printed_kernels("noise\n" + first + second) == [scores, choice]
    alone = dataclasses.replace(choice, smem=None)
    assert dumps.printed_kernels(ptxas("choice", 40, (0, 0))) == [alone]

    def call(key: str) -> str:
        return f'custom-call(%a), custom_call_target="mosaic_gpu_v2", kernel_hash = "{key}", m\n'

    known: dict[str, Kernel] = {}
    quote = '\\A0\\"'
    assert dumps.gpu_kernels(call("a") + call(quote), first + second, known) == (scores, choice)
    assert dumps.gpu_kernels(call(quote) + call("a"), "", known) == (choice, scores)
    (unknown,) = dumps.gpu_kernels(call("b"), first + second, known)
    assert unknown.registers is None


def test_outcomes_survive_the_way_through_text() -> None:
    kernel = Kernel("k", vmem=1, bundles=3, slots={"MXU": (1, 6)})
    outcome = Outcome(JOB, True, kernels=(kernel,), traffic=Traffic(1, 2, 3), around={"copy": 4})
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == outcome


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compiles": False}, "does not compile"),
        ({"compiles": False, "fits": False}, None),
        ({"kernels": ()}, "no Pallas kernel"),
        ({"temp_bytes": 200 * 10**9}, "of the device's"),
        ({"traffic": Traffic(116, 0, 100)}, "1.16 times"),
        ({"kernels": (Kernel("k", spilled=4),)}, "k spills 4 B"),
        ({"kernels": (Kernel("k", smem=240_000),)}, "shared memory"),
    ],
)
def test_each_broken_limit_is_said(change: dict, words: str | None) -> None:
    good = {"compiles": True, "kernels": (Kernel("k", spilled=0, smem=232_448),)}
    good["traffic"] = Traffic(100, 15, 100)
    target = TARGETS["h200"]
    assert table.broken(Outcome(JOB, **good), target) == []
    chunk = dataclasses.replace(JOB, is_memory_bound=False)
    assert table.broken(Outcome(chunk, **good | {"traffic": Traffic(300, 0, 100)}), target) == []
    said = table.broken(Outcome(JOB, **good | change), target)
    assert len(said) == (words is not None)
    assert all(words in each for each in said)


def test_deaths_hangs_and_refusals_are_outcomes() -> None:
    """Each in its own words, and the next job is compiled as if nothing had been."""
    with Compiler(TARGETS["v6e"]) as compiler:
        died = compiler.compile(program("dies"), timeout=60)
        assert "SIGABRT" in died.words
        assert "Check failed: llo::CouldLe(a, b)" in died.words
        refused = compiler.compile(program("refuses"), timeout=60)
        assert (refused.compiles, refused.words) == (False, "ValueError: no such kernel")
        start = time.monotonic()
        hung = compiler.compile(program("hangs"), timeout=0.5)
        assert "not done within 0.5 s" in hung.words
        assert time.monotonic() - start < 20
        assert compiler.compile(program("refuses"), timeout=60).words == refused.words


def test_operands_beyond_the_memory_are_not_compiled() -> None:
    job = Job("huge", "tests.plan_programs:huge")
    with Compiler(TARGETS["v5e"]) as compiler:
        outcome = compiler.compile(job, timeout=60)
    assert (outcome.compiles, outcome.fits) == (False, False)
    assert "16 GiB, more than the device's 15.75 GiB" in outcome.words


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e", "v5p", "v6e", "7x"])
def test_a_tpu_kernel_is_read_right(target: str) -> None:
    small, raised, large, moved = compile_here(
        target,
        program("scratch", mib=2),
        program("scratch", mib=40, limit=60),
        program("scratch", mib=40),
        program("transposes"),
    )
    (kernel,) = small.kernels
    assert kernel.name == "keeps_scratch"
    assert 2 << 20 <= kernel.vmem < 3 << 20
    assert kernel.vmem_limit is None
    assert kernel.bundles > 8
    assert kernel.slots["VLOAD"][0] >= 8
    assert kernel.spilled == 0
    assert table.broken(small, TARGETS[target]) == []
    assert raised.kernels[0].vmem_limit == 60 << 20
    assert not large.compiles
    assert "vmem" in large.words
    assert sum(moved.around.values()) >= 64 * 512


@pytest.mark.aot
def test_a_gpu_kernel_is_read_right() -> None:
    doubles, again, plain = compile_here(
        "h200", program("doubles"), program("doubles"), program("plain")
    )
    assert doubles.words == ""
    (kernel,) = doubles.kernels
    assert kernel.spilled == 0
    assert 8 <= kernel.registers <= 255
    assert 16 << 10 <= kernel.smem < 18 << 10
    assert again.kernels == doubles.kernels
    assert plain.compiles
    assert plain.kernels == ()


def test_every_op_has_jobs_of_distinct_names() -> None:
    names = [job.name for op in OPS for job in jobs(op, "tpu")]
    assert len(names) == len(set(names))
    assert all(any(name.startswith(op) for name in names) for op in OPS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "required: kernels"),
        (["kernels"], "--target"),
        (["kernels", "--target", "h900"], "choose one of v5e"),
        (["kernels", "--target", "v6e", "--op", "tree_attentoin"], "nearest: tree_attention"),
        (["kernels", "--target", "v6e", "--timeout", "soon"], "seconds"),
        (["kernels", "--target", "v6e", "--timeout", "inf"], "up to 86400"),
        (["kernels", "--target", "v6e", "--json", "/no/such/folder/x.json"], "cannot write"),
    ],
)
def test_bad_arguments_get_one_line(arguments: list[str], words: str, capsys) -> None:
    assert command.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]


def test_a_missing_compiler_names_its_extra(monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for target in ("v6e", "h200"):
        assert command.main(["kernels", "--target", target]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "jaxspec[aot]" in line


def test_the_command_starts() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jaxspec.plan", "kernels", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "--target" in done.stdout


@pytest.mark.parametrize(("temp_bytes", "status"), [(0, 0), (200 * 10**9, 1)])
def test_the_command_prints_judges_and_writes(
    temp_bytes: int, status: int, monkeypatch, tmp_path, capsys
) -> None:
    """A limit that is broken is said and makes the status 1; `--case` narrows what is compiled."""
    kernel = Kernel("streams", vmem=3 << 20, bundles=10, spilled=2, slots={"MXU": (5, 20)})

    def compile_all(target, wanted, timeout):
        for job in wanted:
            moved = Traffic(read=100, written=10, fewest=100)
            yield Outcome(job, True, kernels=(kernel,), temp_bytes=temp_bytes, traffic=moved)

    monkeypatch.setattr(command, "compile_all", compile_all)
    monkeypatch.setattr(command, "require", TARGETS.__getitem__)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2.3")
    path = tmp_path / "figures.json"
    asked = ["--target", "v6e", "--op", "index_topk", "--case", "64k B=8", "--json", str(path)]
    assert command.main(["kernels", *asked]) == status
    out = capsys.readouterr().out
    assert "compiled by jax 1.2.3, libtpu 1.2.3; nothing was run" in out
    assert "streams: VMEM 3 MiB of 32 MiB (default); 10 bundles: MXU 5 (25%)" in out
    assert "moves 110 B, 1.100 times the fewest" in out
    assert ("LIMIT: needs 186.3 GiB" in out) == bool(status)
    figures = json.loads(path.read_text())
    names = [case["job"]["name"] for case in figures["cases"]]
    assert names == [job.name for job in jobs("index_topk", "tpu") if "64k B=8" in job.name]
    assert command.main(["kernels", "--target", "v6e", "--case", "9k"]) == 2
    assert "no case has '9k'" in capsys.readouterr().err


def test_an_op_without_a_kernel_for_the_target_is_said(monkeypatch, capsys) -> None:
    def compile_all(target, wanted, timeout):
        assert wanted
        yield from (Outcome(job, True, kernels=(Kernel("some"),)) for job in wanted)

    monkeypatch.setattr(command, "compile_all", compile_all)
    monkeypatch.setattr(command, "require", TARGETS.__getitem__)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2.3")
    asked = ["kernels", "--target", "h200", "--op", "grouped_matmul"]
    assert command.main(asked) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "grouped_matmul: no kernel for GPUs" in said
    assert command.main([*asked, "index_topk"]) == 0
    out = capsys.readouterr().out
    assert "grouped_matmul: no kernel for GPUs" in out
    assert "0 of" not in out
