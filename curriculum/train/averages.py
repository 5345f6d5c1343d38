"""Averages of the parameters that are measured beside the raw ones: a moving one, and the mean of a phase's end.

The mean of the last n checkpoints of a phase (arXiv:2209.14981) is worked out where the phase ends, from the
checkpoints on disk and the parameters at hand, and kept as `averages/<phase>` in the run directory.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from curriculum.errors import InputError
from curriculum.model.model import Params
from curriculum.record.events import AVERAGES
from curriculum.train.checkpoint import Checkpoints
from curriculum.train.setup import Setup
from curriculum.train.step import TrainState

EMA, PHASE_MEAN = AVERAGES


def averages_at(
    setup: Setup, done: int, state: TrainState, checkpoints: Checkpoints, folder: Path
) -> dict[str, Params]:
    """What to measure beside the raw parameters after `done` updates, by name; nothing at step 0.

    At the end of a phase with two or more checkpoints, its mean is among them and is written to `folder`/<phase>.
    """
    averages = {EMA: state.ema} if state.ema is not None and done else {}
    phase = next((name for name, _, end in setup.schedule.phase_bounds if end == done), None)
    if phase is not None and len(steps := mean_steps(setup, done)) > 1:
        checkpoints.wait()
        mean = jax.tree.map(jax.numpy.zeros_like, state.params)
        for step in steps:
            params = state.params if step == done else checkpoints.restore_params(step, state.params)
            mean = jax.tree.map(lambda total, p: total + p / len(steps), mean, params)  # noqa: B023
        _write(folder / phase, mean, steps)
        averages[PHASE_MEAN] = mean
    return averages


def mean_steps(setup: Setup, done: int) -> list[int]:
    """The checkpoints, oldest first, whose mean is taken where a phase ends after `done` updates.

    Only those that the schedule asks for count, so that a run that was stopped in between has the same mean.
    """
    config, total = setup.config, setup.schedule.total_steps
    if config.averages.phase_mean is None:
        return []
    start = next(start for _, start, end in setup.schedule.phase_bounds if end == done)
    planned = [s for s in range(start + 1, done + 1) if s % config.checkpoint.every == 0 or s == total]
    return planned[-config.averages.phase_mean :]


def mean_of_phase(folder: Path, phase: str) -> tuple[int, Path]:
    """(last of the averaged steps, folder of the arrays) of a phase's mean. Raises InputError where there is none."""
    if phase not in (there := {path.parent.name: path for path in folder.glob("*/steps.json")}):
        names = ", ".join(sorted(there)) or "none"
        raise InputError(f"{folder}: no mean of phase {phase!r}; there are: {names} (averages.phase_mean makes them)")
    return json.loads(there[phase].read_text())[-1], folder / phase / "params"


def _write(folder: Path, mean: Any, steps: list[int]) -> None:
    """Written whole or not at all: the list of steps comes last."""
    shutil.rmtree(folder, ignore_errors=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / "params").absolute(), mean)
    (folder / "steps.json").write_text(json.dumps(steps) + "\n")
