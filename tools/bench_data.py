"""Time the data plan: batches in sequence planned ahead, random access, and a plain copy of as many tokens.

    python tools/bench_data.py [--json FILE]

Four sources as memory maps of u16, batches of 32 x 1,024. `planned` works the order out 256 steps at a time, as
training does; `alone` asks for each step on its own, `random` for steps in any order.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import numpy as np

from phases.batches import DataPlan, epoch_tokens
from phases.lr import LrSchedule
from phases.resolve import resolve
from phases.schedule import Phase, SourceSupply

BATCH, LENGTH, STEPS, PLANNED = 32, 1024, 1024, 256
MIXTURE = {"web": 0.5, "code": 0.25, "law": 0.15, "books": 0.1}


def make_plan(folder: Path) -> tuple[DataPlan, dict[str, np.ndarray]]:
    tokens = {}
    for name in MIXTURE:
        path = folder / f"{name}.bin"
        np.random.default_rng(0).integers(0, 50_000, 20_000_000, np.uint16).tofile(path)
        tokens[name] = np.memmap(path, np.uint16, "r")
    supplies = {name: SourceSupply(epoch_tokens(len(stream), LENGTH)) for name, stream in tokens.items()}
    phases = [Phase("a", "50%", MIXTURE), Phase("b", "end", dict.fromkeys(MIXTURE, 0.25), ramp_steps=100)]
    schedule = resolve(phases, supplies, LrSchedule(), total_steps=10_000, batch_size=BATCH, seq_len=LENGTH)
    return DataPlan(schedule, 1, {name: len(stream) for name, stream in tokens.items()}, LENGTH), tokens


def seconds_a_batch(function, rounds=5) -> float:
    """Median over rounds of the time for STEPS batches, a batch."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        times.append((time.perf_counter() - started) / STEPS)
    return float(np.median(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plan, tokens = make_plan(Path(folder))
        order = np.random.default_rng(0).integers(0, 10_000, STEPS).tolist()
        flat = np.random.default_rng(0).integers(0, 50_000, (BATCH, LENGTH + 1), np.uint16)
        target = np.empty((BATCH, LENGTH + 1), np.int32)

        def planned():
            for first in range(4500, 4500 + STEPS, PLANNED):  # over the switch and into the ramp
                for i, draws in enumerate(plan.draws(first, PLANNED)):
                    plan.batch(first + i, tokens, 0, draws=draws)

        def alone():
            for step in range(4500, 4500 + STEPS):
                plan.batch(step, tokens, 0)

        def random():
            for step in order:
                plan.batch(step, tokens, 0)

        def order_planned():
            for first in range(4500, 4500 + STEPS, PLANNED):
                plan.draws(first, PLANNED)

        def order_alone():
            for step in range(4500, 4500 + STEPS):
                plan.draws(step)

        def copy():
            for _ in range(STEPS):
                target[:] = flat

        planned()
        functions = (planned, alone, random, order_planned, order_alone, copy)
        times = {function.__name__: seconds_a_batch(function) for function in functions}
    results = {"machine": platform.node(), "processor": platform.processor() or platform.machine()}
    for name, seconds in times.items():
        results[name] = {"ms_a_batch": seconds * 1e3, "M_tokens_per_s": BATCH * LENGTH / seconds / 1e6}
    print(f"{'':>14} {'ms a batch':>11} {'M tokens/s':>11} {'x copy':>8}")
    for name in times:
        row = results[name]
        ratio = times["copy"] / times[name]
        print(f"{name:>14} {row['ms_a_batch']:>11.4f} {row['M_tokens_per_s']:>11.0f} {ratio:>8.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
