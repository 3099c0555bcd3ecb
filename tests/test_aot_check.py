"""scripts/aot_check: the readers and counters on small texts, the judgement of bad programs, and a short run."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
try:
    from aot import assembly, check, hlo, jobs, traffic
    from aot.targets import TARGETS
finally:
    sys.path.remove(str(ROOT / "scripts"))

# Two steps of a "model": one product, one attention kernel, one write in place, one gather.
PROGRAM = """HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }, entry_computation_layout={}

%fused_gather (p0: f32[1000,8], p1: s32[4]) -> f32[4,8] {
  %p0 = f32[1000,8]{1,0} parameter(0)
  %p1 = s32[4]{0} parameter(1)
  ROOT %g = f32[4,8]{1,0} gather(%p0, %p1), offset_dims={1}, slice_sizes={1,8}
}

%fused_write (q0: bf16[6,16,2,8], q1: bf16[4,2,8], q2: s32[4,2]) -> bf16[6,16,2,8] {
  %q0 = bf16[6,16,2,8]{3,2,1,0} parameter(0)
  %q1 = bf16[4,2,8]{2,1,0} parameter(1)
  %q2 = s32[4,2]{1,0} parameter(2)
  ROOT %w = bf16[6,16,2,8]{3,2,1,0} scatter(%q0, %q2, %q1), to_apply=%add
}

%body (c: (s32[], bf16[6,16,2,8], f32[1000,8], bf16[8,32])) -> (s32[], bf16[6,16,2,8], f32[1000,8], bf16[8,32]) {
  %c = (s32[], bf16[6,16,2,8]{3,2,1,0}, f32[1000,8]{1,0}, /*index=3*/bf16[8,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %pages = bf16[6,16,2,8]{3,2,1,0} get-tuple-element(%c), index=1
  %table = f32[1000,8]{1,0} get-tuple-element(%c), index=2
  %weights = bf16[8,32]{1,0} get-tuple-element(%c), index=3
  %ids = s32[4]{0} constant({0, 1, 2, 3})
  %places = s32[4,2]{1,0} constant({...})
  %rows = f32[4,8]{1,0} fusion(%table, %ids), kind=kLoop, calls=%fused_gather, metadata={op_name="jit(f)/gather"}
  %gemm_fusion_dot = bf16[4,2,8]{2,1,0} custom-call(%rows, %weights), custom_call_target="__cublas$gemm"
  %written = bf16[6,16,2,8]{3,2,1,0} fusion(%pages, %gemm_fusion_dot, %places), kind=kInput, calls=%fused_write
  %out = bf16[4,2,8]{2,1,0} custom-call(%gemm_fusion_dot, %written, %written), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/while/body/paged_decode/pallas_call"}
  ROOT %next = (s32[], bf16[6,16,2,8]{3,2,1,0}, f32[1000,8]{1,0}, bf16[8,32]{1,0}) tuple(%i, %written, %table, %weights)
}

%cond (d: (s32[], bf16[6,16,2,8], f32[1000,8], bf16[8,32])) -> pred[] {
  %d = (s32[], bf16[6,16,2,8]{3,2,1,0}, f32[1000,8]{1,0}, bf16[8,32]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a0: f32[1000,8], a1: bf16[6,16,2,8], a2: bf16[8,32]) -> (s32[], bf16[6,16,2,8], f32[1000,8], bf16[8,32]) {
  %a0 = f32[1000,8]{1,0} parameter(0)
  %a1 = bf16[6,16,2,8]{3,2,1,0} parameter(1)
  %a2 = bf16[8,32]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %t = (s32[], bf16[6,16,2,8]{3,2,1,0}, f32[1000,8]{1,0}, bf16[8,32]{1,0}) tuple(%zero, %a1, %a0, %a2)
  ROOT %loop = (s32[], bf16[6,16,2,8]{3,2,1,0}, f32[1000,8]{1,0}, bf16[8,32]{1,0}) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"2"}}
}
"""  # noqa: E501
SIZES = traffic.Sizes(
    slots=4, context=10, layers=1, hidden=8, heads=2, kv_heads=2, head_dim=8, intermediate=8, vocab=50
)


def test_a_program_is_read():
    module = hlo.parse(PROGRAM)
    [loop] = [i for i in module.entry.instructions if i.opcode == "while"]
    assert loop.trip_count == 2 and loop.called == {"condition": "cond", "body": "body"}
    assert module.aliases == {0: 1}
    assert [str(a) for a in loop.arrays] == ["s32[]", "bf16[6,16,2,8]", "f32[1000,8]", "bf16[8,32]"]
    body = module.computations["body"]
    assert body.by_name["out"].operands == ("gemm_fusion_dot", "written", "written")
    assert body.by_name["pages"].index == 1 and body.by_name["pages"].bytes == 6 * 16 * 2 * 8 * 2
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule nothing")


def test_bytes_of_a_step():
    """By hand: 4 gathered rows in and out; the product's rows, weights, result; the write by its rows; live K and V."""
    moved = traffic.step_traffic(hlo.parse(PROGRAM), SIZES)
    rows, result = 4 * 8 * 4, 4 * 2 * 8 * 2
    gather = rows + 4 * 4 + rows  # what is taken, the ids, the result
    write = result + 4 * 2 * 4 + result  # rows, places, rows again
    assert moved.products == rows + 8 * 32 * 2 + result
    assert moved.attention == 2 * 4 * 10 * 2 * 8 * 2 + result + result
    assert moved.other == gather + write
    assert moved.total == moved.products + moved.attention + moved.other


def test_the_least_bytes():
    """Weights once (no embedding table), live and new K and V, rows in and out of products, logits out and in."""
    weights = 2 * (8 * 48 + 16 * 8 + 8 * 16 + 8 * 8 + 2 * 8 + 8 + 8 * 50)
    rows = 4 * (8 + 48 + 16 + 8 + 8 + 16 + 8 + 8) * 2
    assert SIZES.weights == weights
    assert SIZES.least == weights + 2 * 4 * (10 + 1) * 16 * 2 + rows + 4 * (8 * 2 + 2 * 4 * 50)


def test_copies_are_found():
    assert traffic.copies_of(hlo.parse(PROGRAM), (6, 16, 2, 8)) == []
    copied = PROGRAM.replace("%written, %table", "%copy.1, %table").replace(
        "  ROOT %next", "  %copy.1 = bf16[6,16,2,8]{3,2,1,0} copy(%written)\n  ROOT %next"
    )
    assert traffic.copies_of(hlo.parse(copied), (6, 16, 2, 8)) == ["copy copy.1"]
    turned = PROGRAM.replace(
        "  ROOT %next", "  %turn = bf16[32,8]{1,0} transpose(%weights), dimensions={1,0}\n  ROOT %next"
    )
    assert traffic.copies_of(hlo.parse(turned), (8, 32)) == ["transpose turn"]


REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'paged_decode' for 'sm_90a'
ptxas info    : Function properties for paged_decode
    {stack} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 84 registers, used 1 barriers
"""


def test_the_assemblers_report():
    [one] = assembly.read_report(
        REPORT.format(stack=8, stores=4, loads=12), "wgmma.mma_async.sync\nmma.sync.aligned"
    )
    assert dataclasses.astuple(one) == ("paged_decode", 84, 16, 8, 1, 1)
    assert assembly.read_report("nothing was compiled") == []


def test_the_compilers_plan():
    plan = """001: kCopy         [source        | next=002 (1) ] kCopy
002: kWhile        [prev=001 (1)  | sink ]
condition:
    003: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    004: kCustomKernel [source | sink] paged_decode grid: [8, 2, 64] threads: [128, 1, 1]  shared_memory: 71680 bytes
"""
    launches = assembly.read_plan(plan)
    assert [(x.kind, x.name, x.shared, x.depth) for x in launches] == [
        ("kCopy", "kCopy", 0, 0), ("kWhile", "", 0, 0), ("kCustomKernel", "compare", 0, 1),
        ("kCustomKernel", "paged_decode", 71680, 1),
    ]  # fmt: skip


KERNEL = {"name": "k", "registers": 100, "spills": 0, "stack": 0, "wgmma": 4, "mma": 0}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"spills": 16}, "16 bytes of registers spilled; none may"),
        ({"shared": 240_000}, "240000 bytes of shared memory; a block has at most 232448"),
        ({"wgmma": 0}, "no wgmma instruction"),
        ({"error": "ValueError: no"}, "ValueError: no"),
        ({"assembled": []}, "no kernel was found"),
    ],
)
def test_kernels_are_judged(change, fault):
    result = {
        "temp": 0,
        "launches": [{"shared": change.pop("shared", 1000)}],
        "assembled": [{**KERNEL, **change}],
    }
    result |= {k: v for k, v in change.items() if k in ("error", "assembled")}
    row = check.judge_kernel(jobs.PREFILLS[0], TARGETS["h200"], result)
    if fault is None:
        assert row.faults == []
    else:
        assert fault in row.faults[0]


def test_programs_are_judged():
    """A program of another shape than was asked for: every promise that it breaks is named."""
    launches = [{"name": "rotate_and_write", "shared": 0, "depth": 1, "kind": "kCustomKernel"}] * 2
    result = {
        "hlo": PROGRAM,
        "kv_bytes": 1 << 30,
        "alias": 0,
        "temp": 1 << 28,
        "pool": [1000, 8],
        "launches": launches,
    }
    row = check.judge_program(jobs.Program(1, 8, 0), TARGETS["h200"], result)
    words = " | ".join(row.faults)
    for fault in (
        "0 of 1024 MiB KV aliased",
        "256 MiB of temporaries; at most 2%",
        "trip counts of the loops at the top: [2], not 8",
    ):
        assert fault in words


def test_names_tell_jobs_apart():
    pairs = [
        (target.name, case.backend, case.name, case.capacity) for target, case in check.kernel_jobs(False)
    ]
    assert len(pairs) == len(set(pairs)) > 120


def test_the_short_form_finds_nothing():
    """Compiles a few kernels and a round of four layers for an H200. Needs the CUDA compiler's packages."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "scripts")}
    done = subprocess.run(
        [sys.executable, "-m", "aot.check", "--fast"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode == check.SKIPPED:
        pytest.skip("the CUDA compiler's packages are not there and cannot be had")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert ", 0 at fault," in done.stdout
