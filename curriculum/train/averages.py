"""Averages of the parameters, measured beside the raw ones: a moving one, and the mean of a phase's last checkpoints.

The mean of the last n checkpoints of a phase (arXiv:2209.14981) is computed at the end of the phase, from the
checkpoints on disk and the current parameters, and saved as `averages/<phase>` in the run directory.
"""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from curriculum.config import Config
from curriculum.disk.append import is_disk_error, tell
from curriculum.disk.durable import rename_whole
from curriculum.disk.manifest import damage, write_manifest
from curriculum.errors import InputError
from curriculum.find_checkpoint import MEAN_SIDECAR, checkpoint_steps
from curriculum.model.model import Params
from curriculum.record.events import EMA, PHASE_MEAN
from curriculum.record.wording import listed
from curriculum.run_directory import RunDirectory
from curriculum.scheduling import mean_steps
from curriculum.train.checkpoints.arrays import load_params, save_params
from curriculum.train.checkpoints.folder import Checkpoints
from curriculum.train.mesh import constrain, zeros
from curriculum.train.processes.together import count, from_first, is_first
from curriculum.train.setup import Setup
from curriculum.train.step import TrainState


def averages_at(
    setup: Setup, done: int, state: TrainState, directory: RunDirectory
) -> tuple[dict[str, Params], list[str]]:
    """(averages to measure beside the raw parameters after `done` updates, by name; notes on what a mean lacks).

    There are none at step 0. At the end of a phase with two or more checkpoints, the mean of the phase is one of them,
    and is written to `averages/<phase>`. If the disk refuses it, it is only measured; with several processes
    InputError is raised. The notes name planned checkpoints that are missing. No save may be under way.
    """
    averages = {EMA: state.ema} if state.ema is not None and done else {}
    schedule, folder = setup.course.schedule, directory.averages
    phase, start = next(((name, start) for name, start, end in schedule.phase_bounds if end == done), (None, 0))
    if phase is None or setup.config.averages.phase_mean is None:
        return averages, []
    # It exists if the run continues from here and has new sets to measure.
    if from_first(lambda: _end(folder / phase)) == done:
        averages[PHASE_MEAN] = load_params(folder / phase / "params", state.params)
        return averages, []
    planned = mean_steps(setup.config, start, done, schedule.total_steps)
    parts: dict[int, str | None] = {}  # by step, the checkpoint's path; None: the state itself
    without: list[str] = []
    for step, path, why in from_first(lambda: [[s, *_found(directory, s)] for s in planned if s != done]):
        if path is None:
            without.append(f"checkpoint {step} {why}")
        else:
            parts[step] = path
    if done in planned:
        parts[done] = None
    missing = "; ".join(without)
    if len(parts) < 2:
        return averages, [f"no mean of phase {phase} is taken: {missing}"] if missing else []
    averages[PHASE_MEAN] = _mean(setup, state, directory, parts)
    try:
        _write(folder / phase, averages[PHASE_MEAN], {"steps": list(parts), "end": done})
    except OSError as error:
        if not is_disk_error(error):
            raise
        why = f"{folder / phase}: cannot be written: {error.strerror}"
        if count() > 1:  # the others wait for the part of this process
            raise InputError(f"{why}; fix that, and continue with --resume latest") from None
        tell(f"{why}; the mean is measured, but not kept")
    of = listed([f"{s}" for s in parts])
    return averages, [f"the mean of phase {phase} covers only the checkpoints {of}: {missing}"] if missing else []


def adopt_parts(config: Config, directory: RunDirectory, checkpoints: Checkpoints, step: int) -> None:
    """Link checkpoints that the mean of a phase may need from `gold/` and `kept/` into `checkpoints`.

    `step` is the one that the run continues from. A run without interruption has them all until the phase ends,
    whereas a gold may be deleted earlier.
    """
    if config.averages.phase_mean is None or not is_first():
        return
    every = config.checkpoint.every
    for planned in range(step // every * every, 0, -every)[: config.averages.phase_mean]:
        for place in (directory.gold, directory.kept):
            if planned in checkpoint_steps(place):
                checkpoints.adopt(place / str(planned))


def _found(directory: RunDirectory, step: int) -> tuple[str | None, str]:
    """(path in the run of a checkpoint whose parameters verify, or None; why there is none)."""
    why = "is gone"  # not saved on a full disk, or deleted before the run went back, or changed checkpoint.every
    for folder in (place / str(step) for place in directory.places):
        if folder.is_dir():
            if (damaged := damage(folder, "params/")) is None:
                return f"{folder.parent.name}/{step}", ""
            why = f"is damaged: {damaged}"
    return None, why


def _mean(setup: Setup, state: TrainState, directory: RunDirectory, parts: Mapping[int, str | None]) -> Params:
    """The mean of `parts`, {step: path of the checkpoint in the run}; None stands for the state itself."""
    mean = jax.tree.map(zeros, state.params)
    for path in parts.values():
        params = state.params if path is None else load_params(directory.path / path / "params", state.params)
        mean = _add(setup.mesh, mean, params, np.float32(len(parts)))
    return mean


@partial(jax.jit, static_argnums=0)
def _add(mesh: Mesh, mean: Params, params: Params, num: jax.Array) -> Params:
    """Add one of the `num` parts to a mean; the result is placed as parameters are."""
    return constrain(mesh, jax.tree.map(lambda m, p: m + p / num, mean, params))


def set_aside_means_after(directory: RunDirectory, step: int) -> None:
    """Move the means of phases that end after `step`, and damaged ones, to `superseded/`: they will be made again.

    Their arrays are verified when they are used: reading all of them here would delay a large run.
    """
    target = directory.superseded / "averages"
    for path in directory.averages.glob(f"*/{MEAN_SIDECAR}"):
        if (end := _end(path.parent, MEAN_SIDECAR)) is None or end > step:
            shutil.rmtree(target / path.parent.name, ignore_errors=True)
            target.mkdir(parents=True, exist_ok=True)
            path.parent.rename(target / path.parent.name)


def _end(folder: Path, part: str = "") -> int | None:
    """The step at which the phase of a mean ended; None if `part` of the mean does not verify, as in `damage`."""
    return json.loads((folder / MEAN_SIDECAR).read_text())["end"] if damage(folder, part) is None else None


def _write(folder: Path, mean: Any, sidecar: dict[str, Any]) -> None:
    """Write a mean whole or not at all: it is made beside its place and moved there. Each process writes its part.

    With several processes, a failed write leaves its files, as another process may still be writing; the next write
    clears them.
    """
    unfinished = folder.with_name(f".{folder.name}.partial")
    if is_first():
        shutil.rmtree(unfinished, ignore_errors=True)
    try:
        save_params((unfinished / "params").absolute(), mean)
        if not is_first():
            return
        (unfinished / MEAN_SIDECAR).write_text(json.dumps(sidecar) + "\n")
        write_manifest(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        rename_whole(unfinished, folder)
    except OSError:
        if count() == 1:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
