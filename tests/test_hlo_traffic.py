"""What tools/hlo_traffic.py counts of a compiled program, on one that is worked out by hand."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import hlo_traffic
import pytest

TOOLS = Path(__file__).parents[1] / "tools"

PROGRAM = """HloModule jit_step, is_scheduled=true

%fused_dot (p0: bf16[8,4], p1: bf16[4,16]) -> bf16[8,16] {
  %p0 = bf16[8,4]{1,0} parameter(0)
  %p1 = bf16[4,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,16]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused_slice (stacked: f32[12,8,16], layer: s32[]) -> f32[8,16] {
  %layer = s32[] parameter(1)
  %stacked = f32[12,8,16]{2,1,0} parameter(0)
  %zero = s32[] constant(0)
  %one = f32[1,8,16]{2,1,0} dynamic-slice(%stacked, %layer, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %flat = f32[8,16]{1,0} bitcast(%one)
}

%fused_update (stacked: f32[12,8,16], new: f32[8,16], layer: s32[]) -> f32[12,8,16] {
  %stacked = f32[12,8,16]{2,1,0} parameter(0)
  %new = f32[8,16]{1,0} parameter(1)
  %layer = s32[] parameter(2)
  %zero = s32[] constant(0)
  %one = f32[1,8,16]{2,1,0} bitcast(%new)
  %updated = f32[12,8,16]{2,1,0} dynamic-update-slice(%stacked, %one, %layer, %zero, %zero)
  ROOT %again = f32[12,8,16]{2,1,0} bitcast(%updated)
}

%body (state: (s32[], f32[12,8,16])) -> (s32[], f32[12,8,16]) {
  %state = (s32[], f32[12,8,16]{2,1,0}) parameter(0)
  %layer = s32[] get-tuple-element(%state), index=0
  %stacked = f32[12,8,16]{2,1,0} get-tuple-element(%state), index=1
  %read = f32[8,16]{1,0} fusion(%stacked, %layer), kind=kLoop, calls=%fused_slice
  %written = f32[12,8,16]{2,1,0} fusion(%stacked, %read, %layer), kind=kLoop, calls=%fused_update
  ROOT %next = (s32[], f32[12,8,16]{2,1,0}) tuple(%layer, %written)
}

%condition (state: (s32[], f32[12,8,16])) -> pred[] {
  %state = (s32[], f32[12,8,16]{2,1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main.1 (x: bf16[8,4], w: bf16[4,16], /*index=2*/all: (s32[], f32[12,8,16]), q: bf16[2,8,3,4]) -> bf16[8,16] {
  %x = bf16[8,4]{1,0} parameter(0)
  %w = bf16[4,16]{1,0} parameter(1)
  %all = (s32[], f32[12,8,16]{2,1,0}) parameter(2)
  %q = bf16[2,8,3,4]{3,2,1,0} parameter(3)
  %product = bf16[8,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_dot, metadata={op_name="jit(step)/dot"}
  %loop = (s32[], f32[12,8,16]{2,1,0}) while(%all), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %attention = bf16[2,8,3,4]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  %gathering = (bf16[4,16]{1,0}, bf16[32,16]{1,0}) all-gather-start(%w), dimensions={0}
  %gathered = bf16[32,16]{1,0} all-gather-done(%gathering)
  %summed = bf16[4,16]{1,0} all-reduce(%w), to_apply=%add
  ROOT %copy = bf16[8,16]{1,0} copy(%product)
}
"""


@pytest.fixture(scope="module")
def found():
    return {cost.instruction.name: cost for cost in hlo_traffic.costs(PROGRAM)}


def test_a_product_counts_its_flops_and_what_it_reads_and_writes(found):
    assert found["product"].flops == 2 * 8 * 16 * 4
    assert found["product"].num_bytes == 2 * (8 * 4 + 4 * 16 + 8 * 16)
    assert found["product"].source == "jit(step)/dot" and found["copy"].source == ""
    assert (found["copy"].flops, found["copy"].num_bytes) == (0, 2 * 2 * 8 * 16)


def test_a_loop_counts_its_rounds_and_of_stacked_arrays_one_layer(found):
    index, layer = 4, 4 * 8 * 16
    assert found["read"][1:] == (12, 0, layer + index + layer, 0)
    assert found["written"][1:] == (12, 0, layer + index + layer, 0)  # in place: what it updates is not read


def test_attention_counts_two_products_of_half_a_square(found):
    assert found["attention"].flops == 2 * 2 * (2 * 3) * 8 * 8 * 4 / 2
    whole = PROGRAM.replace('"__cudnn$fmhaSoftmax"', '"__cudnn$fmhaSoftmax", backend_config={"mask_type":"NO_MASK"}')
    assert {c.instruction.name: c for c in hlo_traffic.costs(whole)}["attention"].flops == 2 * found["attention"].flops
    for target, times in (("fmhaScaleBiasSoftmax", 1), ("fmhaSoftmaxBackward", 5 / 2)):
        other = {cost.instruction.name: cost for cost in hlo_traffic.costs(PROGRAM.replace("fmhaSoftmax", target))}
        assert other["attention"].flops == times * found["attention"].flops


def test_a_product_of_cublas_counts_without_the_memory_for_its_own_use():
    program = """
ENTRY %main (x: bf16[8,4], w: bf16[16,4]) -> bf16[8,16] {
  %x = bf16[8,4]{1,0} parameter(0)
  %w = bf16[16,4]{1,0} parameter(1)
  ROOT %both = (bf16[8,16]{1,0}, s8[33554432]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_batch_dimensions":[],"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
}
"""
    (cost,) = hlo_traffic.costs(program)
    assert (cost.flops, cost.num_bytes) == (2 * 8 * 16 * 4, 2 * (8 * 4 + 16 * 4 + 8 * 16))


def test_what_is_sent_is_counted_apart(found):
    assert (found["gathering"].num_bytes, found["gathering"].sent_bytes) == (0, 2 * 32 * 16)
    assert (found["summed"].num_bytes, found["summed"].sent_bytes) == (0, 2 * 2 * 4 * 16)
    assert set(found) == {"product", "read", "written", "attention", "gathering", "summed", "copy"}


@pytest.mark.skipif(find_spec("jax_plugins") is not None, reason="the compiler for NVIDIA cards may be installed")
def test_where_the_compiler_is_missing_the_tool_says_how_to_get_it():
    command = [sys.executable, TOOLS / "check_gpu_program.py", "--preset", "tiny"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(TOOLS.parent)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("the compiler for NVIDIA cards is not installed: pip install 'jax[")


def test_of_branches_that_of_a_condition_that_holds_counts():
    """A condition of jax is an index, of which 1 is that it holds."""
    branches = """%held (x: bf16[8,16]) -> bf16[8,16] {
  %x = bf16[8,16]{1,0} parameter(0)
  ROOT %moved = bf16[8,16]{1,0} copy(%x)
}

%not_held (x: bf16[8,16]) -> bf16[8,16] {
  ROOT %kept = bf16[8,16]{1,0} parameter(0)
}

ENTRY"""
    choice = "conditional(%index, %product, %product), branch_computations={%not_held, %held}"
    program = PROGRAM.replace("ENTRY", branches).replace("copy(%product)", choice)
    assert program.count("held") == 4
    found = {cost.instruction.name: cost for cost in hlo_traffic.costs(program)}
    assert found["moved"].num_bytes == 2 * 2 * 8 * 16 and "copy" not in found


def test_a_loop_lasts_as_long_as_its_condition_says_where_the_compiler_says_nothing():
    counted = """%condition (state: (s32[], f32[12,8,16])) -> pred[] {
  %state = (s32[], f32[12,8,16]{2,1,0}) parameter(0)
  %layer = s32[] get-tuple-element(%state), index=0
  %end = s32[]{:T(128)} constant(7)
  ROOT %more = pred[]{:T(512)} compare(%layer, %end), direction=LT
}"""
    start = PROGRAM.index("%condition (")
    program = PROGRAM[:start] + counted + PROGRAM[PROGRAM.index("\n}", start) + 2 :]
    told = {cost.instruction.name: cost.times for cost in hlo_traffic.costs(program)}
    assert told["read"] == 12  # the compiler's own word
    program = program.replace("known_trip_count", "induction")
    assert {cost.instruction.name: cost.times for cost in hlo_traffic.costs(program)}["read"] == 7


def test_cycles_are_summed_over_all_rounds_of_a_loop():
    told = 'calls=%fused_slice, backend_config={"estimated_cycles":"50"}'
    program = PROGRAM.replace("calls=%fused_slice", told).replace(
        "calls=%fused_dot", 'calls=%fused_dot, backend_config={"estimated_cycles":"7"}'
    )
    command = "import sys, hlo_traffic, check_tpu_program; print(check_tpu_program.expected_cycles(hlo_traffic.costs(sys.stdin.read())))"
    environment = os.environ | {"PYTHONPATH": f"{TOOLS}{os.pathsep}{TOOLS.parent}"}
    done = subprocess.run(
        [sys.executable, "-c", command], input=program, env=environment, capture_output=True, text=True
    )
    assert done.stdout == f"{12 * 50 + 7}\n", done.stderr


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="the compiler for TPUs is installed")
def test_where_the_compiler_for_tpus_is_missing_the_tool_says_how_to_get_it():
    command = [sys.executable, TOOLS / "check_tpu_program.py", "--preset", "tiny"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(TOOLS.parent)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "is the compiler for TPUs installed? pip install 'jax[tpu]==" in done.stderr.splitlines()[-1]


def test_a_loop_of_unknown_length_is_an_error():
    with pytest.raises(ValueError, match="loop: a loop of an unknown number of rounds"):
        hlo_traffic.costs(PROGRAM.replace("known_trip_count", "induction"))
