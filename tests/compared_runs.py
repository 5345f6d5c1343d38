"""Runs held against each other, bit for bit: the lines of their records but for the clock, and all that was saved."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from curriculum.run import load_run
from curriculum.train.checkpoints.arrays import load_params

CLOCK_FIELDS = {
    "timestamp", "elapsed_s", "eval_duration_s", "tokens_per_sec", "step_time_s", "peak_memory_gb", "started_at",
    "first_step_compile_time_s", "switch_stall_s", "total_elapsed_s", "steps_per_sec",
}  # fmt: skip


def without_clock(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Events or rows of metrics without the fields of clock, speed and memory."""
    return [{key: value for key, value in line.items() if key not in CLOCK_FIELDS} for line in lines]


def record(run_dir: Path, without: Iterable[str] = ("resume",)) -> tuple[list, list]:
    """Events, but for those of the names `without`, and rows of metrics."""
    run = load_run(run_dir)
    assert run.events and run.metrics
    return without_clock(e for e in run.events if e["event"] not in without), without_clock(run.metrics)


def saved_arrays(checkpoint: Path, items: Iterable[str] = ("params", "train")) -> dict[str, bytes]:
    """Every array of a checkpoint by its path, such as `params/embed/embedding`."""
    import jax

    arrays = {
        f"{item}/{jax.tree_util.keystr(path, simple=True, separator='/')}": np.asarray(array).tobytes()
        for item in items
        for path, array in jax.tree.leaves_with_path(load_params(checkpoint / item))
    }
    assert len(arrays) > 20
    return arrays
