"""Time the data plan's batches, planned ahead, at random steps and from bins, against random windows.

    python tools/bench_data.py [--json FILE]

Four sources as memory maps of u16, documents of about 700 tokens, batches of 32 x 1,024. The rows take turns; each is
the median of its rounds:

    planned          batches from token stores, their order worked out 256 steps at a time, as in training
    random           batches asked for one by one, in random order
    bins             `planned` over the same tokens as documents packed by best fit
    order_planned, order_alone    the order of the batches only, without their tokens; alone: one by one
    windows          nanoGPT's get_batch in numpy: 32 windows at random places of one memory map, which promises no
                     epochs, no mixture and no resume

Last, the packing of a million documents is timed; `filled` is the share of its bins that they fill.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from results import in_turns, json_parser, report

from curriculum.data.packing import Bins, pack
from curriculum.data.store import TokenView
from curriculum.train.device import tune_malloc
from phases.batches import DataPlan, epoch_tokens
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


def each(steps, function) -> None:
    for step in steps:
        function(step)


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
        packed = make_bins(stores)
        packed_plan = make_plan({name: len(bins.bins) * LENGTH for name, bins in packed.items()})
        rng = np.random.default_rng(0)
        order = rng.integers(0, 10_000, STEPS).tolist()
        steps = range(4750, 4750 + STEPS)  # across the phase switch, into the ramp

        def planned(plan, streams):
            for first in steps[::PLANNED]:
                for i, draws in enumerate(plan.draws(first, PLANNED)):
                    plan.batch(first + i, streams, EOT, draws=draws)

        def windows():
            stream = tokens["web"]
            for _ in range(STEPS):
                at = rng.integers(0, len(stream) - LENGTH, BATCH)
                np.stack([stream[i : i + LENGTH].astype(np.int64) for i in at])
                np.stack([stream[i + 1 : i + 1 + LENGTH].astype(np.int64) for i in at])

        work = {  # each makes STEPS batches
            "planned": lambda: planned(plan, stores),
            "random": lambda: each(order, lambda step: plan.batch(step, stores, EOT)),
            "bins": lambda: planned(packed_plan, packed),
            "order_planned": lambda: each(steps[::PLANNED], lambda step: plan.draws(step, PLANNED)),
            "order_alone": lambda: each(steps, plan.draws),
            "windows": windows,
        }
        taken = in_turns(work, ROUNDS)
    seconds = {name: statistics.median(wall for wall, _ in times) / STEPS for name, times in taken.items()}
    rows = [
        {
            "what": name,
            "ms_a_batch": round(of_batch * 1e3, 4),
            "M_tokens_per_s": round(BATCH * LENGTH / of_batch / 1e6),
            "x_windows": round(seconds["windows"] / of_batch, 2),
        }
        for name, of_batch in seconds.items()
    ]
    lengths = document_lengths(1_000_000)
    started = time.perf_counter()
    num_bins = len(pack(lengths, LENGTH)[1])
    seconds = time.perf_counter() - started
    filled = float(lengths.sum() / (num_bins * LENGTH))
    report(rows, args.json, "numpy", pack_a_million_s=round(seconds, 2), bins=num_bins, filled=round(filled, 5))


if __name__ == "__main__":
    main()
