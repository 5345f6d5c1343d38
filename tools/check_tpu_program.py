"""Compile the update for TPUs without having one: the memory that it needs, and the time that its compiler expects.

    pip install 'jax[tpu]==VERSION'    # VERSION of the installed jax: brings the compiler (libtpu); no TPU is needed
    python tools/check_tpu_program.py --preset gpt2-124m --chip v5e --rows 8 --seq-len 1024
    python tools/check_tpu_program.py --preset llama-1b --chip v5p --mesh 1 4 1 --rows 16 --seq-len 2048 --remat dots

The update of `curriculum train` (AdamW, state donated), or with --eval the pass of an eval, is compiled from shapes
alone, in bfloat16 and the formulation for TPUs (curriculum/model/formulation.py; --set changes them). Beside most
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
from typing import NamedTuple

# The compiler would ask the machine for its chips, and wait for another process that uses them.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
os.environ |= {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}

import jax
import jax.numpy as jnp
from bench_step import model_flops
from compiled_update import absent_parser, as_on, chosen, collectives, compiled_eval, compiled_update, mesh_of
from hlo_traffic import Cost, costs
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from results import print_lines, write_json

from curriculum.model.counts import num_parameters
from curriculum.model.formulation import Formulation, attention_of
from curriculum.model.presets import ModelConfig

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


def measure(config: ModelConfig, formulation: Formulation, options: argparse.Namespace) -> tuple[dict, list[Cost]]:
    """The figures of an update, by name, and the cost of each instruction."""
    chip, sizes, num_tokens = CHIPS[options.chip], tuple(options.mesh), options.rows * options.seq_len
    num_chips = math.prod(sizes)
    mesh = mesh_of(devices_of(options.slice or chip.slice)[:num_chips], sizes)
    started = time.perf_counter()
    with as_on("tpu", formulation):
        if options.eval:
            compiled = compiled_eval(config, mesh, options.rows, options.seq_len)
        else:
            accum, masked = options.grad_accum, options.document_mask
            compiled = compiled_update(config, mesh, options.rows, options.seq_len, accum, document_mask=masked)
        attention = attention_of(config, "tpu", seq_len=options.seq_len, heads_split=sizes[2] > 1)
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
    parser = absent_parser(__doc__)
    parser.add_argument("--chip", choices=CHIPS, default="v5e")
    parser.add_argument("--slice", help="the slice that the chips are of, such as v5e:4x4; by default one of 4 chips")
    parser.add_argument("--eval", action="store_true", help="an eval's forward pass instead of an update")
    parser.add_argument("--num-layers", type=int, help="instead of the preset's: fewer compile sooner")
    options = parser.parse_args(argv)
    fewer = [f"n_layer={options.num_layers}"] if options.num_layers else []
    report, found = measure(*chosen(options, "tpu", "compute_dtype=bfloat16", *fewer), options)
    print_lines(report)
    if options.most:
        print_most(found, options.most)
    write_json(options.json, report)


if __name__ == "__main__":
    main()
