"""Trace an update on an NVIDIA card, and say how long its kernels take and at which rate they move memory.

    python tools/profile_step.py --size gpt2-124m --dtype bfloat16 --most 30
    python tools/profile_step.py --size gpt2-124m --dtype bfloat16 --settings layers=scanned

The update, its sizes and its settings are those of `step` in tools/bench_step.py. A few updates are traced by jax's
profiler, after others that are timed without it. XLA names its own kernels by the instruction of the program that they
compute: these are summed by kind and by where in the traced function they come from, and the bytes are those that such
an instruction must read and write (tools/hlo_traffic.py). Kernels of cuBLAS and cuDNN have names of their own.
"""

import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from bench_step import SIZES, jax_program
from hlo_traffic import Cost, costs
from results import json_parser, machine, print_figures, print_table, write_json

from curriculum.train.device import tune_device

NUM_TIMES, UPDATES_A_TIME, NUM_TRACED = 5, 10, 3


def main(argv: list[str] | None = None) -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="gpt2-124m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="type of matrix products")
    parser.add_argument("--settings", default="", help="as after the colon of step in bench_step.py")
    parser.add_argument("--most", type=int, default=20, help="how many rows to print, those that take longest first")
    args = parser.parse_args(argv)
    tune_device(deterministic=None)  # before jax starts

    import jax

    if jax.default_backend() != "gpu":
        parser.error(f"got jax backend {jax.default_backend()}, expected an NVIDIA GPU")
    program = jax_program(f"step:{args.settings}", args.size, args.dtype)
    state, program = program.state, program._replace(state=None)

    def run(num: int) -> float:
        nonlocal state
        started = time.perf_counter()
        for _ in range(num):
            state = program.state_of(program.compiled(state, *program.inputs))
        jax.block_until_ready(state)
        return (time.perf_counter() - started) / num * 1e3

    run(2)
    times = [run(UPDATES_A_TIME) for _ in range(NUM_TIMES)]
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run(NUM_TRACED)
        (file,) = Path(folder).rglob("*.xplane.pb")
        kernels = list(kernels_of(jax.profiler.ProfileData.from_file(str(file))))
    rows = by_source(kernels, costs(program.compiled.as_text()))
    busy_ms = sum(row["ms"] for row in rows)
    report = {
        "machine": machine("jax") | {"card": jax.devices()[0].device_kind},
        "size": args.size,
        "settings": args.settings,
        "compile_seconds": round(program.compile_seconds, 1),
        "ms_median": round(statistics.median(times), 2),
        "busy_ms": round(busy_ms, 2),
        "results": rows,
    }
    print_figures(report["machine"])
    print(f"{args.size} {args.settings}: {report['ms_median']} ms an update, {busy_ms:.2f} ms in kernels while traced")
    print_table(rows[: args.most])
    write_json(args.json, report)


def kernels_of(profile) -> Iterable[tuple[str, float]]:
    """(name, ms) of each kernel that a card ran."""
    for plane in profile.planes:
        if plane.name.startswith("/device:GPU"):
            for line in plane.lines:
                if line.name.startswith("Stream"):
                    yield from ((event.name, event.duration_ns / 1e6) for event in line.events)


def by_source(kernels: Iterable[tuple[str, float]], program: Iterable[Cost]) -> list[dict]:
    """A row for each kind of kernel and source, per update, those that take longest first."""
    instructions = {re.sub(r"[.\-]", "_", cost.instruction.name): cost for cost in program}
    sums = defaultdict(lambda: [0.0, 0, 0])
    for name, ms in kernels:
        cost = instructions.get(name)
        kind = re.sub(r"(_\d+)+$" if cost is not None else r"^void |_\d\w*$|[(<].*", "", name)
        # Layers and chunks differ by a number only.
        of = sums[kind, re.sub(r"\d+", "#", cost.source) if cost is not None else ""]
        of[0] += ms
        of[1] += 1
        of[2] += cost.num_bytes if cost is not None else 0
    return [
        {
            "ms": round(ms / NUM_TRACED, 3),
            "times": round(times / NUM_TRACED, 1),
            "gb": round(num_bytes / NUM_TRACED / 1e9, 2) if num_bytes else None,
            "tb_per_sec": round(num_bytes / ms / 1e9, 2) if num_bytes else None,
            "kernel": kind,
            "source": source,
        }
        for (kind, source), (ms, times, num_bytes) in sorted(sums.items(), key=lambda item: -item[1][0])
    ]


if __name__ == "__main__":
    main()
