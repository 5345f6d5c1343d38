"""Checkpoints: parameters, the rest of the training state, and the run's ledger as JSON, saved in the background."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, EveryNSteps, LatestN

from curriculum.errors import InputError
from curriculum.run import CHECKPOINT_ITEMS
from curriculum.train.step import TrainState

_EMA = "ema"  # an item of its own where a moving average is kept, so that it can be read alone


class Checkpoints:
    """The checkpoints of one folder, the newest `keep` of them; None: all, until they are deleted.

    With `keep_planned` = (every, n) also the newest n whose step is a multiple of `every`.

    A step's folder holds `params` (restorable alone), `train` (optimizer state and accumulators), `ledger`
    (plain JSON: segments, consumption, the record's offsets) and `baselines` (nats of every eval window at the evals
    that later ones are compared with). A save that was interrupted leaves no step behind.
    The folder is made when it is first looked into. `read_only`: create and clean up nothing, so that a run may be read
    while it trains.
    """

    def __init__(
        self,
        directory: Path,
        keep: int | None = 1,
        keep_planned: tuple[int, int] | None = None,
        *,
        read_only: bool = False,
    ):
        self.directory = Path(directory).absolute()
        self._preserved: list[Any] = [LatestN(keep)]
        if keep_planned is not None:
            self._preserved.append(EveryNSteps(interval_steps=keep_planned[0], max_to_keep=keep_planned[1]))
        self._read_only = read_only

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        return ocp.CheckpointManager(
            self.directory,
            item_names=(*CHECKPOINT_ITEMS, _EMA),
            options=ocp.CheckpointManagerOptions(
                preservation_policy=AnyPreservationPolicy(self._preserved),
                enable_async_checkpointing=True,
                cleanup_tmp_directories=not self._read_only,
                create=not self._read_only,
            ),
        )

    def steps(self) -> list[int]:
        """Steps that can be restored, ascending."""
        return sorted(s for s in self._manager.all_steps() if self._is_whole(s))

    def save(self, state: TrainState, ledger: dict[str, Any], baselines: Mapping[str, np.ndarray]) -> None:
        """Start saving the state as of its step; `baselines` are float32 [B, N] by eval set.

        Raises RuntimeError when it would not be saved. A failure of the save before, in the background, is raised here.
        """
        step = int(state.step)
        rest = beside_params(state)
        started = self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                train=ocp.args.StandardSave(rest),
                ledger=ocp.args.JsonSave(ledger),
                baselines=ocp.args.StandardSave(dict(baselines)),
                **({} if state.ema is None else {_EMA: ocp.args.StandardSave(state.ema)}),
            ),
        )
        if not started:
            raise RuntimeError(
                f"{self.directory}: step {step} was not saved: steps {self.steps()} are there already; "
                "move the later ones away"
            )

    def baselines(self, step: int) -> dict[str, np.ndarray]:
        """What `save` got as such, on the host."""
        self._check(step)
        saved = load_params(self.directory / str(step) / "baselines")
        return {name: np.asarray(nats_BN) for name, nats_BN in saved.items()}

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of a step, with the shapes, types and placement of `like`: arrays, or jax.ShapeDtypeStruct.

        It may have been saved from another mesh: each device reads its own part. A moving average that `like` has
        and the checkpoint has not begins with the parameters. Raises InputError where it cannot be read.
        """
        self._check(step)
        rest = beside_params(like)
        args = ocp.args.Composite(
            params=ocp.args.StandardRestore(_abstract(like.params)),
            train=ocp.args.StandardRestore(_abstract(rest)),
        )
        restored = _read(self.directory / str(step), lambda: self._manager.restore(step, args=args))
        ema = None
        if like.ema is not None:
            ema = self.restore_params(step, like.params, ema=self._has_ema(step))
        rest = restored["train"]
        saved_step = jax.device_put(jax.numpy.int32(step), like.step.sharding)
        skipped, guard = rest["skipped"], rest["guard"]
        return TrainState(restored["params"], rest["opt_state"], saved_step, rest["window"], skipped, guard, ema)

    def restore_params(self, step: int, like: Any, *, ema: bool = False) -> Any:
        """The parameters of a step alone, or their moving average; nothing else is read.

        Raises InputError where the step has no moving average, or cannot be read.
        """
        self._check(step)
        if ema and not self._has_ema(step):
            raise InputError(f"{self.directory}: step {step} was saved without a moving average (averages.ema_decay)")
        item = _EMA if ema else "params"
        args = ocp.args.Composite(**{item: ocp.args.StandardRestore(_abstract(like))})
        return _read(self.directory / str(step) / item, lambda: self._manager.restore(step, args=args)[item])

    def set_aside_after(self, step: int) -> None:
        """Move the steps after `step`, and folders without a whole checkpoint, into `superseded/` beside this folder.

        Those of `checkpoints` go there directly, those of another folder below its name.
        """
        later = [s for s in self._manager.all_steps() if s > step or not self._is_whole(s)]
        for s in later:
            below = "" if self.directory.name == "checkpoints" else self.directory.name
            target = self.directory.parent / "superseded" / below / str(s)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            (self.directory / str(s)).rename(target)
        if later:
            self._manager.reload()

    def adopt(self, folder: Path) -> None:
        """Take in a whole checkpoint from another folder of the same disk, as hard links; one of its step stays."""
        if int(folder.name) in self.steps():
            return
        # A name that is no step, until the copy is complete.
        partial = self.directory / f".{folder.name}.adopted"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(self.directory / folder.name, ignore_errors=True)
        shutil.copytree(folder, partial, copy_function=os.link)
        partial.rename(self.directory / folder.name)
        self._manager.reload()

    def delete(self, step: int) -> None:
        """Remove a step, once it is saved."""
        self.wait()
        self._manager.delete(step)

    def wait(self) -> None:
        """Return once every save has reached the disk. Raises what made one fail."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        if "_manager" in self.__dict__:
            self._manager.close()

    def _is_whole(self, step: int) -> bool:
        return all((self.directory / str(step) / item).is_dir() for item in CHECKPOINT_ITEMS)

    def _has_ema(self, step: int) -> bool:
        return (self.directory / str(step) / _EMA).is_dir()

    def _check(self, step: int) -> None:
        if step not in (steps := self.steps()):
            there = ", ".join(map(str, steps)) or "none"
            raise InputError(f"{self.directory}: no checkpoint of step {step}; there are: {there}")


def beside_params(state: TrainState) -> dict[str, Any]:
    """What a checkpoint keeps as `train`."""
    skipped, guard = state.skipped_updates, state.guard
    return {"opt_state": state.opt_state, "window": state.window, "skipped": skipped, "guard": guard}


def load_params(folder: str | os.PathLike, like: Any = None) -> Any:
    """A saved tree of arrays: `RUN/checkpoints/STEP/params`, whatever devices it was saved from.

    On the host, or with the shapes, types and placement of `like`. Raises InputError where there is none, or it cannot
    be read.
    """
    folder = Path(folder).absolute()
    if not (folder / "_METADATA").exists():
        raise InputError(f"{folder}: holds no saved arrays; expected the folder RUN/checkpoints/STEP/params")
    return _read(folder, lambda: _restore(folder, like))


def _restore(folder: Path, like: Any) -> Any:
    if like is None:
        host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        saved = ocp.StandardCheckpointHandler().metadata(folder).tree
        like = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=host), saved)
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, like)


def check_readable(checkpoint: Path) -> None:
    """Raise InputError where an item of a checkpoint cannot be read: before something is made that goes on from it."""
    for metadata in sorted(checkpoint.glob("*/_METADATA")):
        load_params(metadata.parent)


def _read(folder: Path, restore: Callable[[], Any]) -> Any:
    """What `restore` returns. Raises InputError where the saved arrays of the folder cannot be read."""
    try:
        return restore()
    except Exception as error:
        # Where an array's bytes are missing orbax raises the class Exception itself; any other is none of the file's.
        if not (type(error) is Exception or isinstance(error, ValueError | OSError | KeyError)):
            raise
        cause = error.__cause__ if type(error) is Exception and error.__cause__ else error
        what = next(iter(str(cause).partition(" [tensorstore_spec")[0].splitlines()), type(cause).__name__)
        del cause
    # Outside of `except`, so that nothing holds on to the reads of other arrays that were under way: as they go,
    # each would be told with a traceback.
    told, sys.unraisablehook = sys.unraisablehook, lambda _: None
    gc.collect()
    sys.unraisablehook = told
    message = f"{folder}: cannot be read: {what[:300]}; use the checkpoint of another step, or restore this one"
    raise InputError(f"{message} from a copy")


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
