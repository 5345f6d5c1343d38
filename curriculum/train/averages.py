"""Averages of the parameters that are measured beside the raw ones: a moving one, and the mean of a phase's end.

The mean of the last n checkpoints of a phase (arXiv:2209.14981) is worked out where the phase ends, from the
checkpoints on disk and the parameters at hand, and kept as `averages/<phase>` in the run directory.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from curriculum.errors import InputError
from curriculum.manifest import damage, write_manifest
from curriculum.model.model import Params
from curriculum.record.append import DISK_ERRORS, tell
from curriculum.record.events import AVERAGES
from curriculum.scheduling import mean_steps
from curriculum.train.abstract import abstract_of, zeros
from curriculum.train.checkpoints.arrays import load_params, save_params
from curriculum.train.checkpoints.folder import Checkpoints
from curriculum.train.mesh import constrain, place_state
from curriculum.train.processes.together import count, from_first, is_first
from curriculum.train.setup import Setup
from curriculum.train.step import TrainState

EMA, PHASE_MEAN = AVERAGES
SIDECAR = "mean.json"


def averages_at(
    setup: Setup, done: int, state: TrainState, checkpoints: Checkpoints, folder: Path
) -> dict[str, Params]:
    """What to measure beside the raw parameters after `done` updates, by name; nothing at step 0.

    At the end of a phase with two or more checkpoints its mean is among them, and is written to `folder`/<phase>; on a
    full disk it is only measured. No save of `checkpoints` may be under way.
    """
    averages = {EMA: state.ema} if state.ema is not None and done else {}
    schedule = setup.course.schedule
    phase, start = next(((name, start) for name, start, end in schedule.phase_bounds if end == done), (None, 0))
    if phase is None or setup.config.averages.phase_mean is None:
        return averages
    # It is there where a run goes on from here and has new sets to measure.
    if from_first(lambda: _end(folder / phase)) == done:
        averages[PHASE_MEAN] = place_state(setup.mesh, load_params(folder / phase / "params"))
        return averages
    # Some may be missing: not saved on a full disk, or deleted before the run went back or changed checkpoint.every.
    planned = mean_steps(setup.config, start, done, schedule.total_steps)
    steps = from_first(lambda: [s for s in planned if s == done or _whole(checkpoints, s)])
    if len(steps) > 1:
        averages[PHASE_MEAN] = _mean(setup, state, done, steps, checkpoints)
        try:
            _write(folder / phase, averages[PHASE_MEAN], {"steps": steps, "end": done})
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            why = f"{folder / phase}: cannot be written: {error.strerror}"
            if count() > 1:  # others wait for this one's part
                raise InputError(f"{why}; mend that, and go on with --resume latest") from None
            tell(f"{why}; the mean is measured, but not kept")
    return averages


def _whole(checkpoints: Checkpoints, step: int) -> bool:
    """Whether the parameters of a checkpoint are there and verify; those that do not are told."""
    if step not in checkpoints.steps():
        return False
    if why := damage(checkpoints.directory / str(step), "params/"):
        tell(f"{checkpoints.directory / str(step)}: is damaged: {why}; the mean of the phase is worked out without it")
    return why is None


def _mean(setup: Setup, state: TrainState, done: int, steps: list[int], checkpoints: Checkpoints) -> Params:
    mean = jax.tree.map(lambda p: zeros(abstract_of(p)), state.params)
    for step in steps:
        params = state.params if step == done else checkpoints.restore_params(step, state.params)
        mean = _add(setup.mesh, mean, params, np.float32(len(steps)))
    return mean


@partial(jax.jit, static_argnums=0)
def _add(mesh: Mesh, mean: Params, params: Params, num: jax.Array) -> Params:
    """A mean with one of its `num` parts added, placed as parameters are."""
    return constrain(mesh, jax.tree.map(lambda m, p: m + p / num, mean, params))


def mean_of_phase(folder: Path, phase: str) -> tuple[int, Path]:
    """(step that the phase ended at, folder of the arrays) of a phase's mean. Raises InputError where there is none."""
    if phase not in (there := {path.parent.name: path for path in folder.glob(f"*/{SIDECAR}")}):
        names = ", ".join(sorted(there)) or "none"
        raise InputError(
            f"{folder}: no mean of phase {phase!r}; there are: {names} (averages.phase_mean makes one at the end of a "
            "phase with two checkpoints or more)"
        )
    if why := damage(folder / phase):
        raise InputError(f"{folder / phase}: is damaged: {why}; restore it from a copy, or use a checkpoint")
    return json.loads(there[phase].read_text())["end"], folder / phase / "params"


def set_aside_means_after(folder: Path, step: int, target: Path) -> None:
    """Move the means of phases that end after `step` to `target`: they come again. And those that are not whole.

    Their arrays are verified where they are used: to read all of them here would keep a large run waiting.
    """
    for path in folder.glob(f"*/{SIDECAR}"):
        if (end := _end(path.parent, SIDECAR)) is None or end > step:
            shutil.rmtree(target / path.parent.name, ignore_errors=True)
            target.mkdir(parents=True, exist_ok=True)
            path.parent.rename(target / path.parent.name)


def _end(folder: Path, part: str = "") -> int | None:
    """The step that the phase of a mean ended at; None where there is no mean whose `part` verifies, as by `damage`."""
    return json.loads((folder / SIDECAR).read_text())["end"] if damage(folder, part) is None else None


def _write(folder: Path, mean: Any, sidecar: dict[str, Any]) -> None:
    """Written whole or not at all: made beside its place, and moved there. Each process writes its part."""
    partial = folder.with_name(f".{folder.name}.partial")
    if is_first():
        shutil.rmtree(partial, ignore_errors=True)
    try:
        save_params((partial / "params").absolute(), mean)
        if not is_first():
            return
        (partial / SIDECAR).write_text(json.dumps(sidecar) + "\n")
        write_manifest(partial)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
