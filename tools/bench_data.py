"""Time the data plan's batches, planned ahead, at random steps and from bins, against a copy and random windows.

    python tools/bench_data.py [--json FILE]

Four sources as memory maps of u16, documents of about 700 tokens, batches of 32 x 1,024. The rows take turns; each is
the median of its rounds:

    planned          batches from token stores, their order worked out 256 steps at a time, as in training
    quarter          the same for a quarter of each batch's rows, as in one of four processes
    alone, random    batches asked for one by one, in sequence and in random order
    marked           `planned` where each token is marked as scored or not, as in conversations
    bins             `planned` over the same tokens as documents packed by best fit
    order_planned, order_alone    the order of the batches only, without their tokens
    windows          nanoGPT's get_batch in numpy: 32 windows at random places of one memory map, which promises no
                     epochs, no mixture and no resume
    copy             the conversion of as many tokens that are in the cache

Last, the packing of a million documents is timed; `filled` is the share of its bins that they fill.
"""

import tempfile
import time
from pathlib import Path

import numpy as np
from results import json_parser, report

from curriculum.data.packing import Bins, pack
from curriculum.data.view import TokenView
from curriculum.train.device import tune_malloc
from phases.batches import DataPlan, TokenStream, epoch_tokens
from phases.declared import Curriculum
from phases.lr import LrSchedule
from phases.resolve import resolve
from phases.schedule import Phase, SourceSupply

BATCH, LENGTH, STEPS, PLANNED, ROUNDS = 32, 1024, 512, 256, 9
EOT = 50_000
MIXTURE = {"web": 0.5, "code": 0.25, "law": 0.15, "books": 0.1}


def document_lengths(num_documents: int) -> np.ndarray:
    """Long-tailed, about 700 tokens on average, a fifth of them longer than a sequence."""
    return np.random.default_rng(0).lognormal(6, 1.1, num_documents).astype(np.int64) + 1


def make_bins(tokens: dict[str, TokenView]) -> dict[str, Bins]:
    """The streams as documents packed into bins; a last document that does not fit whole is dropped."""
    lengths = document_lengths(60_000)
    ends = np.cumsum(lengths)
    bins = {}
    for name, stream in tokens.items():
        kept = lengths[ends <= len(stream)]
        bins[name] = Bins(stream, EOT, LENGTH, *pack(kept, LENGTH))
    return bins


def make_plan(tokens_per_epoch: dict[str, int]) -> DataPlan:
    supplies = {name: SourceSupply(num_tokens) for name, num_tokens in tokens_per_epoch.items()}
    phases = [Phase("a", "50%", MIXTURE), Phase("b", "end", dict.fromkeys(MIXTURE, 0.25), ramp_steps=100)]
    curriculum = Curriculum(phases, supplies, LrSchedule(), total_steps=10_000, batch_size=BATCH, seq_len=LENGTH)
    return DataPlan(resolve(curriculum), 1, tokens_per_epoch, LENGTH)


def make_tokens(folder: Path) -> dict[str, np.ndarray]:
    tokens = {}
    for number, name in enumerate(MIXTURE):
        path, rng = folder / f"{name}.bin", np.random.default_rng(number)
        ids = rng.integers(0, EOT, 20_000_000, np.uint16)
        ids[rng.integers(0, len(ids), len(ids) // 700)] = EOT
        ids.tofile(path)
        tokens[name] = np.memmap(path, np.uint16, "r")
    return tokens


def seconds_a_batch(functions) -> dict[str, float]:
    """Seconds per batch of each function, which makes STEPS batches: medians over rounds in which they take turns."""
    times = {function.__name__: [] for function in functions}
    for _ in range(ROUNDS):
        for function in functions:
            started = time.perf_counter()
            function()
            times[function.__name__].append((time.perf_counter() - started) / STEPS)
    return {name: float(np.median(seconds)) for name, seconds in times.items()}


def main():
    parser = json_parser(__doc__)
    args = parser.parse_args()
    tune_malloc()  # as in training: otherwise glibc returns each batch's memory and takes it again page by page
    with tempfile.TemporaryDirectory() as folder:
        tokens = make_tokens(Path(folder))
        stores = {
            name: TokenView([t.view(np.ndarray)], np.array([0]), np.array([len(t)])) for name, t in tokens.items()
        }
        plan = make_plan({name: epoch_tokens(len(stream), LENGTH) for name, stream in tokens.items()})
        marks = {name: TokenView([t % 2 == 0], np.array([0]), np.array([len(t)])) for name, t in tokens.items()}
        marked_stores = {name: TokenStream(stream, EOT, marks[name]) for name, stream in stores.items()}
        packed = make_bins(stores)
        packed_plan = make_plan({name: len(bins.bins) * LENGTH for name, bins in packed.items()})
        rng = np.random.default_rng(0)
        order = rng.integers(0, 10_000, STEPS).tolist()
        flat = rng.integers(0, EOT, (BATCH, LENGTH + 1), np.uint16)
        target = np.empty((BATCH, LENGTH + 1), np.int32)

        def in_sequence(plan, streams, **options):
            for first in range(4750, 4750 + STEPS, PLANNED):  # across the phase switch, into the ramp
                for i, draws in enumerate(plan.draws(first, PLANNED)):
                    plan.batch(first + i, streams, EOT, draws=draws, **options)

        def planned():
            in_sequence(plan, stores)

        def quarter():
            in_sequence(plan, stores, rows=slice(0, BATCH // 4))

        def marked():
            in_sequence(plan, marked_stores)

        def bins():
            in_sequence(packed_plan, packed)

        def alone():
            for step in range(4750, 4750 + STEPS):
                plan.batch(step, stores, EOT)

        def random():
            for step in order:
                plan.batch(step, stores, EOT)

        def order_planned():
            for first in range(4750, 4750 + STEPS, PLANNED):
                plan.draws(first, PLANNED)

        def order_alone():
            for step in range(4750, 4750 + STEPS):
                plan.draws(step)

        def windows():
            stream = tokens["web"]
            for _ in range(STEPS):
                at = rng.integers(0, len(stream) - LENGTH, BATCH)
                np.stack([stream[i : i + LENGTH].astype(np.int64) for i in at])
                np.stack([stream[i + 1 : i + 1 + LENGTH].astype(np.int64) for i in at])

        def copy():
            for _ in range(STEPS):
                target[:] = flat

        planned()
        bins()
        functions = (planned, quarter, alone, random, marked, bins, order_planned, order_alone, windows, copy)
        times = seconds_a_batch(functions)
    rows = []
    for name, seconds in times.items():
        part = 1 / 4 if name == "quarter" else 1
        rows.append(
            {
                "what": name,
                "ms_a_batch": round(seconds * 1e3, 4),
                "M_tokens_per_s": round(part * BATCH * LENGTH / seconds / 1e6),
                "x_copy": round(part * times["copy"] / seconds, 3),
                "x_windows": round(part * times["windows"] / seconds, 2),
            }
        )
    lengths = document_lengths(1_000_000)
    started = time.perf_counter()
    num_bins = len(pack(lengths, LENGTH)[1])
    seconds = time.perf_counter() - started
    filled = float(lengths.sum() / (num_bins * LENGTH))
    report(rows, args.json, "numpy", pack_a_million_s=round(seconds, 2), bins=num_bins, filled=round(filled, 5))


if __name__ == "__main__":
    main()
