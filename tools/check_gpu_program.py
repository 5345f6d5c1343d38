"""Compile the update for NVIDIA cards without having one, and work out the least time and memory that it needs.

    pip install 'jax[cuda13]==VERSION'    # VERSION of the installed jax; for the compiler: no card, no driver is needed
    python tools/check_gpu_program.py --preset gpt2-124m --rows 32 --seq-len 1024
    python tools/check_gpu_program.py --preset llama-1b --mesh 1 8 1 --rows 32 --seq-len 2048 --remat dots --most 20

The update of `curriculum train` (AdamW, state donated) is compiled from shapes alone, with a run's XLA flags for all
cards, in bfloat16 and the formulation for GPUs (curriculum/model/formulation.py; --set changes them). The FLOPs and
bytes of its program (tools/hlo_traffic.py) are set against the card's data sheet. `least_ms` is the time if every
instruction takes no longer than its products or its memory traffic must, whichever is longer; `mfu_at_most` is the
model FLOP utilisation in that time, by the FLOPs of tools/bench_step.py. Nothing is run, so launches, caches, and how
near kernels come to these limits remain unknown; without a card the compiler picks kernels by rules instead of timing
them. What the cards send to each other is reported separately (`sent_ms`), at the rate of NVLink: it may be hidden
behind the rest.
"""

import argparse
import math
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest import mock

# The plugin would ask the driver for versions, and there is none. It reads these variables as it is loaded.
os.environ |= {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu"}

import jax
from bench_step import model_flops
from compiled_update import absent_parser, as_on, chosen, collectives, compiled_update, mesh_of
from hlo_traffic import Cost, costs
from jax.experimental import topologies
from jax.sharding import Mesh
from results import print_lines, write_json

from curriculum.model import memory
from curriculum.model.counts import num_parameters
from curriculum.model.formulation import BY_BACKEND, Formulation
from curriculum.model.presets import ModelConfig
from curriculum.train.device import GPU_FLAGS, missing_flags


@dataclass(frozen=True)
class Card:
    """NVIDIA's data sheet: FLOPs per second of dense bfloat16 products (float32, as TF32, has half of it), memory
    bandwidth and size, and NVLink's bandwidth one way."""

    flops: float
    memory_bytes_per_second: float
    memory_bytes: float
    sent_bytes_per_second: float


CARDS = {"H100": Card(989e12, 3.35e12, 80e9, 450e9), "H200": Card(989e12, 4.8e12, 141e9, 450e9)}
# What the compiler would ask a card: compute capability 9.0, 132 multiprocessors.
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  memory_bandwidth: {bandwidth:.0f} device_memory_size: {memory:.0f} cuda_compute_capability {{ major: 9 }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} runtime_version {{ major: 13 minor: 0 }}
device_description_str: "NVIDIA {name}"
"""


def card_of(name: str, config: ModelConfig) -> Card:
    """The card with the FLOPs per second of the config's compute_dtype."""
    card = CARDS[name]
    return card if config.compute_dtype == "bfloat16" else replace(card, flops=card.flops / 2)


def cards_mesh(name: str, sizes: tuple[int, int, int]) -> Mesh:
    """A data x fsdp x tensor mesh of absent cards; exits if the compiler for them is not installed."""
    card, num = CARDS[name], math.prod(sizes)
    description = _DESCRIPTION.format(name=name, bandwidth=card.memory_bytes_per_second, memory=card.memory_bytes)
    hosts = -(-num // 8)
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=description, topology=f"1x{hosts}x{num // hosts}"
        )
    except NotImplementedError:
        sys.exit(f"the compiler for NVIDIA cards is not installed: pip install 'jax[cuda13]=={jax.__version__}'")
    return mesh_of(topology.devices, sizes)


def as_on_a_gpu(formulation: Formulation = BY_BACKEND["gpu"]) -> ExitStack:
    """A context in which everything is traced as if jax had such a card."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    stack = as_on("gpu", formulation)
    # jax asks the card whether it is a Hopper or newer, and whether it is a Blackwell of one kind.
    stack.enter_context(mock.patch.object(cudnn, "check_compute_capability", lambda least: float(least) <= 9.0))
    stack.enter_context(mock.patch.object(cudnn, "is_cuda_compute_capability_equal", lambda exact: exact == "9.0"))
    return stack


def least_seconds(cost: Cost, card: Card) -> float:
    """The least time of all executions of an instruction, without sending."""
    return cost.times * max(cost.flops / card.flops, cost.num_bytes / card.memory_bytes_per_second)


def measure(card: Card, config: ModelConfig, formulation: Formulation, options: argparse.Namespace) -> tuple:
    """The figures of an update, by name, and the cost of each instruction."""
    sizes = tuple(options.mesh)
    rows, seq_len = options.rows, options.seq_len
    started = time.perf_counter()
    with as_on_a_gpu(formulation):
        mesh, masked = cards_mesh(options.card, sizes), options.document_mask
        compiled = compiled_update(config, mesh, rows, seq_len, options.grad_accum, document_mask=masked)
        estimate = memory.memory_estimate(
            config,
            rows=rows // options.grad_accum // (sizes[0] * sizes[1]),
            seq_len=seq_len,
            backend="gpu",
            grad_accum=options.grad_accum,
            document_mask=masked,
            fsdp=sizes[1],
            tensor=sizes[2],
        )
    compile_seconds = time.perf_counter() - started
    program, needed = compiled.as_text(), compiled.memory_analysis()
    found = costs(program)
    seconds = sum(least_seconds(cost, card) for cost in found)
    in_products = sum(least_seconds(cost, card) for cost in found if cost.flops)
    num_cards = math.prod(sizes)
    flops = model_flops(config, rows * seq_len, seq_len) / num_cards
    report = {
        "preset": options.preset,
        "num_parameters": num_parameters(config),
        "cards": f"{num_cards} x {options.card}",
        "mesh": list(sizes),
        "rows": rows,
        "seq_len": seq_len,
        "least_ms": round(seconds * 1e3, 1),
        "of_products_ms": round(in_products * 1e3, 1),
        "mfu_at_most": round(flops / seconds / card.flops, 2),
        "moved_gb": round(sum(cost.times * cost.num_bytes for cost in found) / 1e9, 1),
        "sent_ms": round(sum(cost.times * cost.sent_bytes for cost in found) / card.sent_bytes_per_second * 1e3, 1),
        "instructions": sum(cost.times for cost in found),
        "memory_gb": round(needed.peak_memory_in_bytes / 1e9, 2),
        "memory_estimate_gb": round(estimate.total / 1e9, 2),
        "collectives": {kind: sum(shapes.values()) for kind, shapes in collectives(program).items()},
        "attention": dict(
            Counter(c.instruction.name.split(".")[0] for c in found if "fmha" in c.instruction.attributes)
        ),
        "compile_seconds": round(compile_seconds, 1),
    }
    return report, found


def print_most(found: list[Cost], card: Card, num: int) -> None:
    """Print the instructions with the longest least times; those of one kind and one source are summed."""
    together: dict[tuple[str, str], list[float]] = {}
    for cost in found:
        kind = cost.instruction.name.rstrip("0123456789.")
        sums = together.setdefault((kind, cost.source), [0.0, 0.0, 0.0])
        sums[0] += least_seconds(cost, card) * 1e3
        sums[1] += cost.times * cost.flops / 1e12
        sums[2] += cost.times * cost.num_bytes / 1e9
    print(f"{'ms':>7} {'TFLOP':>7} {'GB':>7}")
    for (kind, source), (ms, tflop, gb) in sorted(together.items(), key=lambda item: -item[1][0])[:num]:
        print(f"{ms:7.2f} {tflop:7.2f} {gb:7.1f}  {kind}: {source}")


def main(argv: list[str] | None = None) -> None:
    parser = absent_parser(__doc__)
    parser.set_defaults(rows=32)
    parser.add_argument("--card", choices=CARDS, default="H100")
    options = parser.parse_args(argv)
    config, formulation = chosen(options, "gpu", "compute_dtype=bfloat16")
    card = card_of(options.card, config)
    given = os.environ.get("XLA_FLAGS", "")  # the compiler, which has not been started, reads them
    added = missing_flags(given, [flag for card, flag in GPU_FLAGS if not card])
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *added])
    report, found = measure(card, config, formulation, options)
    print_lines(report)
    if options.most:
        print_most(found, card, options.most)
    write_json(options.json, report)


if __name__ == "__main__":
    main()
