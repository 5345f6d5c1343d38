"""Time the data plan: batches in sequence planned ahead, random access, bins, and a plain copy of as many tokens.

    python tools/bench_data.py [--json FILE]

Four sources as memory maps of u16, batches of 32 x 1,024. `planned` works the order out 256 steps at a time, as
training does; `alone` asks for each step on its own, `random` for steps in any order. `bins` is `planned` where the
same tokens are documents packed by best fit. Last, the packing of a million documents itself.
"""

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path

import numpy as np

from curriculum.data.packing import Bins, pack
from phases.batches import DataPlan, epoch_tokens
from phases.lr import LrSchedule
from phases.resolve import resolve
from phases.schedule import Phase, SourceSupply

BATCH, LENGTH, STEPS, PLANNED = 32, 1024, 1024, 256
MIXTURE = {"web": 0.5, "code": 0.25, "law": 0.15, "books": 0.1}


def document_lengths(num_documents: int) -> np.ndarray:
    """Long-tailed, about 700 tokens on average, a tenth of them longer than a sequence."""
    return np.random.default_rng(0).lognormal(6, 1.1, num_documents).astype(np.int64) + 1


def make_bins(tokens: dict[str, np.ndarray]) -> dict[str, Bins]:
    """The streams as documents packed into bins; the last document is cut off."""
    lengths = document_lengths(60_000)
    ends = np.cumsum(lengths)
    bins = {}
    for name, stream in tokens.items():
        kept = lengths[ends <= len(stream)]
        bins[name] = Bins(stream, 0, LENGTH, *pack(kept, LENGTH))
    return bins


def make_plan(tokens_per_epoch: dict[str, int]) -> DataPlan:
    supplies = {name: SourceSupply(num_tokens) for name, num_tokens in tokens_per_epoch.items()}
    phases = [Phase("a", "50%", MIXTURE), Phase("b", "end", dict.fromkeys(MIXTURE, 0.25), ramp_steps=100)]
    schedule = resolve(phases, supplies, LrSchedule(), total_steps=10_000, batch_size=BATCH, seq_len=LENGTH)
    return DataPlan(schedule, 1, tokens_per_epoch, LENGTH)


def make_tokens(folder: Path) -> dict[str, np.ndarray]:
    tokens = {}
    for name in MIXTURE:
        path = folder / f"{name}.bin"
        np.random.default_rng(0).integers(0, 50_000, 20_000_000, np.uint16).tofile(path)
        tokens[name] = np.memmap(path, np.uint16, "r")
    return tokens


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
        tokens = make_tokens(Path(folder))
        plan = make_plan({name: epoch_tokens(len(stream), LENGTH) for name, stream in tokens.items()})
        packed = make_bins(tokens)
        packed_plan = make_plan({name: len(bins.bins) * LENGTH for name, bins in packed.items()})
        order = np.random.default_rng(0).integers(0, 10_000, STEPS).tolist()
        flat = np.random.default_rng(0).integers(0, 50_000, (BATCH, LENGTH + 1), np.uint16)
        target = np.empty((BATCH, LENGTH + 1), np.int32)

        def planned():
            for first in range(4500, 4500 + STEPS, PLANNED):  # over the switch and into the ramp
                for i, draws in enumerate(plan.draws(first, PLANNED)):
                    plan.batch(first + i, tokens, 0, draws=draws)

        def bins():
            for first in range(4500, 4500 + STEPS, PLANNED):
                for i, draws in enumerate(packed_plan.draws(first, PLANNED)):
                    packed_plan.batch(first + i, packed, 0, draws=draws)

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
        functions = (planned, alone, random, bins, order_planned, order_alone, copy)
        times = {function.__name__: seconds_a_batch(function) for function in functions}
    results = {"machine": platform.node(), "processor": platform.processor() or platform.machine()}
    for name, seconds in times.items():
        results[name] = {"ms_a_batch": seconds * 1e3, "M_tokens_per_s": BATCH * LENGTH / seconds / 1e6}
    print(f"{'':>14} {'ms a batch':>11} {'M tokens/s':>11} {'x copy':>8}")
    for name in times:
        row = results[name]
        ratio = times["copy"] / times[name]
        print(f"{name:>14} {row['ms_a_batch']:>11.4f} {row['M_tokens_per_s']:>11.0f} {ratio:>8.3f}")
    lengths = document_lengths(1_000_000)
    started = time.perf_counter()
    num_bins = len(pack(lengths, LENGTH)[1])
    results["pack_a_million_s"] = time.perf_counter() - started
    utilization = lengths.sum() / (num_bins * LENGTH)
    print(f"a million documents: {results['pack_a_million_s']:.2f} s, {num_bins:,} bins, {utilization:.3%} full")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
