"""Compile the update for TPUs without having one: the memory that it needs, and the time that its compiler expects.

    pip install 'jax[tpu]==VERSION'    # VERSION of the installed jax: brings the compiler (libtpu); no TPU is needed
    python tools/check_tpu_program.py --preset gpt2-124m --chip v5e --rows 8 --seq-len 1024
    python tools/check_tpu_program.py --preset llama-1b --chip v5p --mesh 1 4 1 --rows 16 --seq-len 2048 --remat dots

The update of `curriculum train` (AdamW, state donated), or with --eval the pass of an eval, is compiled from shapes
alone, in the formulation for TPUs (curriculum/model/formulation.py; the options choose others). Beside most
instructions the compiler writes how many cycles it expects them to take. `expected_ms` is their sum, a loop's once per
round, at the clock at which it expects a large product to run at the rate of the data sheet. Of the kernels of flash
attention it expects nothing: their products (`attention_ms`) are added at that rate. `mfu_expected` is the model FLOP
utilisation in both together, by the FLOPs of tools/bench_step.py. Nothing is run: what the chip makes of it remains
unknown.
"""

import argparse
import math
import os
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

# The compiler would ask the machine for its chips, and wait for another process that uses them.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
os.environ |= {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}

import jax
import jax.numpy as jnp
import numpy as np
from bench_step import model_flops
from check_scaling import collectives, compiled_eval, compiled_update
from hlo_traffic import Cost, costs
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, SingleDeviceSharding
from results import json_parser, write_json

from curriculum.model import formulation, layers, loss, modules, transformer
from curriculum.model.counts import num_parameters
from curriculum.model.presets import PRESETS, ModelConfig
from curriculum.train import step
from curriculum.train.mesh import AXES

PRODUCT = 8192  # rows and columns of the product that tells the clock
PRODUCTS = {"fwd": 2, "dkv": 4, "dq": 3}  # of each kernel of flash attention, whose scores are computed again


class Chip(NamedTuple):
    """Google's data sheet: FLOPs per second of bfloat16 products, and memory. `slice`: one of 4 chips."""

    flops: float
    memory_bytes: float
    slice: str


CHIPS = {
    "v5e": Chip(197e12, 16e9, "v5e:2x2"),
    "v5p": Chip(459e12, 95e9, "v5p:2x2x1"),
    "v6e": Chip(918e12, 32e9, "v6e:2x2"),
}


def devices_of(slice: str) -> list:
    """The absent chips of a slice; exits if the compiler for them is not installed."""
    try:
        return topologies.get_topology_desc(slice, platform="tpu").devices
    except (NotImplementedError, RuntimeError, ModuleNotFoundError) as error:
        sys.exit(f"{slice}: {error}; is the compiler for TPUs installed? pip install 'jax[tpu]=={jax.__version__}'")


def as_on_a_tpu(**choices: str | int | None) -> ExitStack:
    """A context in which everything is traced as on a TPU, with these choices in its formulation; None: its own."""
    stack = ExitStack()
    for module in (layers, modules, transformer, loss, step):
        stack.enter_context(mock.patch.object(module, "backend", lambda: "tpu"))
    given = {name: value for name, value in choices.items() if value is not None}
    chosen = replace(formulation.BY_BACKEND["tpu"], **given)
    stack.enter_context(mock.patch.dict(formulation.BY_BACKEND, {"tpu": chosen}))
    return stack


def expected_cycles(found: list[Cost]) -> int:
    """The cycles that the compiler expects these instructions to take; of some it says nothing."""
    return sum(cost.times * _cycles(cost) for cost in found)


def _cycles(cost: Cost) -> int:
    told = re.search(r'"estimated_cycles":"(\d+)"', cost.instruction.attributes)
    return int(told[1]) if told else 0


def cycles_per_second(chip: Chip) -> float:
    """The clock at which the compiler's cycles for a large product are the data sheet's rate."""
    one = SingleDeviceSharding(devices_of(chip.slice)[0])
    square = jax.ShapeDtypeStruct((PRODUCT, PRODUCT), jnp.bfloat16, sharding=one)
    program = jax.jit(jnp.matmul).lower(square, square).compile().as_text()
    return expected_cycles(costs(program)) / (2 * PRODUCT**3 / chip.flops)


def num_attention_products(found: list[Cost]) -> int:
    """How many products of all heads the kernels of flash attention make in a program."""
    kinds = ((cost, re.match(r"splash_mha_(fwd|dkv|dq)_", cost.instruction.name)) for cost in found)
    return sum(cost.times * PRODUCTS[kind[1]] for cost, kind in kinds if kind)


def measure(config: ModelConfig, options: argparse.Namespace) -> tuple[dict, list[Cost]]:
    """The figures of an update, by name, and the cost of each instruction."""
    chip, sizes, num_tokens = CHIPS[options.chip], tuple(options.mesh), options.rows * options.seq_len
    num_chips = math.prod(sizes)
    mesh = Mesh(
        np.array(devices_of(options.slice or chip.slice)[:num_chips]).reshape(sizes),
        AXES,
        axis_types=(AxisType.Auto,) * 3,
    )
    of_formulation = ("qkv", "skip", "loss_tokens", "head_rows", "padding", "block_ids")
    choices = {name: getattr(options, name) for name in of_formulation}
    started = time.perf_counter()
    with as_on_a_tpu(**choices):
        if options.eval:
            compiled = compiled_eval(config, mesh, options.rows, options.seq_len)
        else:
            compiled = compiled_update(
                config, mesh, options.rows, options.seq_len, options.grad_accum, options.document_mask
            )
        attention = formulation.attention_of(config, "tpu", seq_len=options.seq_len, heads_split=sizes[2] > 1)
    compile_seconds = time.perf_counter() - started
    program, needed = compiled.as_text(), compiled.memory_analysis()
    found = costs(program)
    seconds = expected_cycles(found) / cycles_per_second(chip)
    of_product = 2 * options.rows * config.n_head * config.head_width * options.seq_len**2 / 2  # half of the scores
    attention_s = num_attention_products(found) * of_product / num_chips / chip.flops
    flops = model_flops(config, num_tokens, options.seq_len) / num_chips / (3 if options.eval else 1)
    report = {
        "preset": options.preset,
        "num_parameters": num_parameters(config),
        "chips": f"{num_chips} x {options.chip}",
        "mesh": list(sizes),
        "rows": options.rows,
        "seq_len": options.seq_len,
        "attention": attention,
        "expected_ms": round(seconds * 1e3, 1),
        "attention_ms": round(attention_s * 1e3, 1),
        "mfu_expected": round(flops / (seconds + attention_s) / chip.flops, 2),
        "memory_gb": round(needed.peak_memory_in_bytes / 1e9, 2),
        "of_memory": round(needed.peak_memory_in_bytes / chip.memory_bytes, 2),
        "collectives": {kind: sum(shapes.values()) for kind, shapes in collectives(program).items()},
        "compile_seconds": round(compile_seconds, 1),
    }
    return report, found


def print_most(found: list[Cost], num: int) -> None:
    """Print the instructions that are expected to take longest; those of one kind and one source are summed."""
    together: dict[tuple[str, str], int] = {}
    for cost in found:
        key = cost.instruction.name.rstrip("0123456789."), cost.source
        together[key] = together.get(key, 0) + cost.times * _cycles(cost)
    total = sum(together.values())
    for (kind, source), cycles in sorted(together.items(), key=lambda item: -item[1])[:num]:
        print(f"{cycles / total:7.1%}  {kind}: {source}")


def main(argv: list[str] | None = None) -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="gpt2-124m")
    parser.add_argument("--chip", choices=CHIPS, default="v5e")
    parser.add_argument("--slice", help="the slice that the chips are of, such as v5e:4x4; by default one of 4 chips")
    parser.add_argument("--mesh", type=int, nargs=3, default=(1, 1, 1), metavar=("DATA", "FSDP", "TENSOR"))
    parser.add_argument("--rows", type=int, default=8, help="rows of the whole update")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--grad-accum", type=int, default=1)
    parser.add_argument("--eval", action="store_true", help="an eval's way forward instead of an update")
    parser.add_argument("--num-layers", type=int, help="instead of the preset's: fewer compile sooner")
    parser.add_argument("--vocab-size", type=int, help="rows of the embedding, instead of the preset's")
    parser.add_argument("--compute-dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--remat", choices=("none", "dots", "full"), default="none")
    parser.add_argument("--document-mask", action="store_true")
    parser.add_argument("--attention", choices=("auto", "splash", "xla", "plain"), default="auto")
    parser.add_argument("--layers", choices=("auto", "unrolled", "scanned"), default="auto")
    parser.add_argument("--qkv", choices=("joined", "apart"))
    parser.add_argument("--skip", choices=("branch", "select"))
    parser.add_argument("--padding", choices=("sliced", "masked"))
    parser.add_argument("--block-ids", type=int, help="ids whose logits an eval reduces at a time")
    parser.add_argument("--loss-tokens", type=int, help="tokens whose logits are computed at a time")
    parser.add_argument("--head-rows", type=int, help="the loss fills the head up to a multiple of so many rows")
    parser.add_argument("--most", type=int, default=0, help="how many kinds of instruction to list, the longest first")
    options = parser.parse_args(argv)
    config = replace(
        PRESETS[options.preset],
        compute_dtype=options.compute_dtype,
        remat=options.remat,
        attention=options.attention,
        layers=options.layers,
    )
    if options.vocab_size:
        config = replace(config, vocab_size=options.vocab_size)
    if options.num_layers:
        config = replace(config, n_layer=options.num_layers)
    report, found = measure(config, options)
    for name, value in report.items():
        print(f"{name:>20}  {value:,}" if isinstance(value, int) else f"{name:>20}  {value}")
    if options.most:
        print_most(found, options.most)
    write_json(options.json, report)


if __name__ == "__main__":
    main()
