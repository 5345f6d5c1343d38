"""What the compiled update holds on a device and sends between devices, by the compiler's own account of it."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
FSDP = [(1, n, 1) for n in (1, 2, 4, 8)]
DATA, TENSOR, ALL = (8, 1, 1), (1, 1, 2), (2, 2, 2)
# Of the tool's model: preset tiny with 2 layers, 8 rows x 64 tokens; [inputs, outputs].
LAYERS, WIDTH, INNER, KV, VOCAB = 2, 128, 256, 64, 4096
PROJECTIONS = [(WIDTH, WIDTH)] * 2 + [(WIDTH, KV)] * 2 + [(WIDTH, INNER)] * 2 + [(INNER, WIDTH)]
MATRICES = LAYERS * PROJECTIONS + [(VOCAB, WIDTH)]
# Query, key and value are joined on a CPU, and so is their gradient.
GRADIENTS = LAYERS * [(WIDTH, WIDTH + 2 * KV), (WIDTH, WIDTH), *PROJECTIONS[4:]] + [(VOCAB, WIDTH)]
NUM_PARAMETERS = sum(a * b for a, b in MATRICES) + (2 * LAYERS + 1) * WIDTH


ODD_VOCAB = 4095
CASES = {
    "none": ([], [*FSDP, DATA, TENSOR, ALL]),
    "full": (["--remat", "full"], [FSDP[-1]]),
    "accum": (["--grad-accum", "4"], [(2, 1, 1), (1, 2, 1)]),
    "chunks": (["--seq-len", "512"], [(2, 1, 1), (1, 2, 1)]),
    "odd": (["--vocab-size", str(ODD_VOCAB)], [TENSOR]),
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What the tool says, by case and mesh."""
    folder, found = tmp_path_factory.mktemp("scaling"), {}
    # What is counted does not need the optimizations, which take longer than all the rest.
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": str(ROOT)}
    for case, (options, meshes) in CASES.items():
        command = [sys.executable, ROOT / "tools/check_scaling.py", "--layers", str(LAYERS), "--seq-len", "64"]
        command += [text for mesh in meshes for text in ("--mesh", *map(str, mesh))]
        done = subprocess.run(
            [*command, *options, "--json", folder / "found.json"], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        missing = (VOCAB - ODD_VOCAB) * WIDTH if case == "odd" else 0
        assert f"{NUM_PARAMETERS - missing:,} parameters" in done.stdout
        found |= {(case, *row["mesh"]): row for row in json.loads((folder / "found.json").read_text())}
    return found


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            ["--mesh", "3", "2", "1"],
            "--mesh 3 2 1, --rows: got 8 in 1 micro-steps of 8 rows, expected rows that the mesh's",
        ),
        (["--mesh", "2", "-1", "1"], "--mesh 2 -1 1: expected three sizes of 1 or more; as many devices are simulated"),
        (["--grad-accum", "3"], "--rows 8: expected a multiple of --grad-accum (3), both 1 or more"),
        (["--rows", "0"], "--rows 0: expected a multiple of --grad-accum (1), both 1 or more"),
    ],
)
def test_sizes_that_do_not_divide_are_told(options, told):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "tools/check_scaling.py", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and f"error: {told}" in done.stderr and "Traceback" not in done.stderr


def sent(row, kind, what="collectives"):
    """{sorted dimensions of what a device gets: how often}, of float arrays of two axes and more."""
    shapes = Counter()
    for shape, count in row[what].get(kind, {}).items():
        dtype, _, dims = shape.rstrip("]").partition("[")
        if "," in dims and not (dtype == "s32" and dims.endswith(",1")):  # which ids the embedding gave
            assert dtype == "f32"
            shapes[tuple(sorted(map(int, dims.split(","))))] += count
    return dict(shapes)


def counted(*lists):
    return dict(Counter(tuple(sorted(shape)) for shapes in lists for shape in shapes))


def test_state_falls_with_the_devices_that_share_it(measured):
    for mesh, parts in [*zip(FSDP, (1, 2, 4, 8), strict=True), (DATA, 1), (TENSOR, 2), (ALL, 4)]:
        whole = 3 * 4 * NUM_PARAMETERS  # parameters and two moments
        small = 3 * 4 * (2 * LAYERS + 1) * WIDTH  # norms: every device has all of them
        state = measured["none", *mesh]["state_bytes"]
        assert (whole - small) / parts + small <= state < (whole - small) / parts + small + 4096  # counters, the guard


def test_one_device_sends_nothing(measured):
    assert measured["none", 1, 1, 1]["collectives"] == {}


def test_data_parallel_sums_each_gradient_once(measured):
    """The embedding's is two: of what it reads, and of what it predicts."""
    row = measured["none", *DATA]
    assert list(row["collectives"]) == ["all-reduce"]
    assert sent(row, "all-reduce") == counted(GRADIENTS, [(VOCAB, WIDTH)])
    rest = {shape: n for shape, n in row["collectives"]["all-reduce"].items() if "," not in shape}
    # Norms; nats and tokens by source; tokens that are filled.
    assert rest == {f"f32[{WIDTH}]": 2 * LAYERS + 1, "f32[2]": 1, "s32[2]": 1, "s32[]": 1}


def test_fsdp_gathers_each_matrix_once_and_again_where_blocks_are_computed_again(measured):
    """Of the embedding each device adds up its part of the width, of what all devices read."""
    row = measured["none", *FSDP[-1]]
    assert set(row["collectives"]) == {"all-gather", "all-reduce", "all-to-all"}
    assert sent(row, "all-gather") == counted(MATRICES)
    assert sent(row, "all-reduce") == counted(GRADIENTS)  # for GPUs: reduce-scatter
    assert row["collectives"]["all-to-all"] == {f"f32[64,1,{WIDTH // 8}]": 8}
    again = measured["full", *FSDP[-1]]
    assert sent(again, "all-gather") == counted(MATRICES, LAYERS * PROJECTIONS)
    assert sent(again, "all-reduce") == sent(row, "all-reduce")


@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_each_micro_step_sums_its_gradients(measured, axis):
    """4 times as many bytes as one. What is gathered stays."""
    mesh = (2, 1, 1) if axis == "data" else (1, 2, 1)
    row, embeddings = measured["accum", *mesh], [(VOCAB, WIDTH)] * (axis == "data")
    assert sent(row, "all-reduce") == counted(4 * (GRADIENTS + embeddings))
    assert row["collectives"]["all-reduce"][f"f32[{WIDTH}]"] == 4 * (2 * LAYERS + 1)
    assert sent(row, "all-gather") == (counted(MATRICES) if axis == "fsdp" else {})


@pytest.mark.parametrize("axis", ["data", "fsdp"])
def test_chunks_of_the_loss_sum_the_gradient_of_the_head_once(measured, axis):
    """4 rows of 512 a device, and 1,024 tokens at a time (`LOSS_LOGITS` of 4,096 ids): 2 chunks."""
    mesh = (2, 1, 1) if axis == "data" else (1, 2, 1)
    row, embeddings = measured["chunks", *mesh], [(VOCAB, WIDTH)] * (axis == "data")
    assert sent(row, "all-reduce") == counted(GRADIENTS, embeddings)


def test_a_vocabulary_that_tensor_does_not_divide_is_whole_and_sends_nothing(measured):
    row = measured["odd", *TENSOR]
    small, embedding = 3 * 4 * (2 * LAYERS + 1) * WIDTH, 3 * 4 * ODD_VOCAB * WIDTH
    split = 3 * 4 * LAYERS * sum(a * b for a, b in PROJECTIONS) / 2
    assert embedding + split + small <= row["state_bytes"] < embedding + split + small + 4096
    assert sent(row, "all-reduce") == {(WIDTH, 8 * 64): LAYERS * (2 + 5)} and len(row["collectives"]) == 1


def test_tensor_parallel_sends_the_residual_stream_alone(measured):
    row = measured["none", *TENSOR]
    assert set(row["collectives"]) == {"all-reduce"}
    tokens = (WIDTH, 8 * 64)
    # A block: 2 in the forward pass; in the backward pass one for each matrix that reads the stream. And two more: what
    # the embedding reads, and the gradient of what the head multiplies.
    assert sent(row, "all-reduce")[tokens] == LAYERS * (2 + 5) + 2
    exchanging = {case for case, found in measured.items() if "all-to-all" in found["collectives"]}
    assert exchanging == {case for case in measured if case[2] > 1 and case[3] == 1} > {("none", *FSDP[-1])}
    assert set(measured["none", *ALL]["collectives"]) == {"all-gather", "all-reduce"}


def test_an_eval_sends_matrices_and_the_residual_stream_but_no_logits(measured):
    assert measured["none", *DATA]["eval_collectives"] == {}
    assert set(measured["none", *FSDP[-1]]["eval_collectives"]) == {"all-gather"}
    assert sent(measured["none", *FSDP[-1]], "all-gather", "eval_collectives") == counted(MATRICES)
    for mesh, tokens in ((TENSOR, (8, 64)), (ALL, (2, 64))):
        sums = dict(measured["none", *mesh]["eval_collectives"]["all-reduce"])
        rows, positions = tokens
        assert sums.pop(f"f32[{rows * positions},{WIDTH}]") == LAYERS * 2 + 1  # a block's two, and the embedding
        # The largest logit, the sum of exponentials, the target's logit; and whether that is the likeliest.
        per_token = [f"{rows},{positions}", f"{rows},{positions},1"]
        assert set(sums) <= {f"{dtype}[{shape}]" for dtype in ("f32", "pred") for shape in per_token}
        assert sum(sums.values()) == 4
