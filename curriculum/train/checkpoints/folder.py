"""Checkpoints: parameters, the rest of the training state, and the run's ledger as JSON, saved in the background."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from curriculum.disk.append import is_disk_error, tell
from curriculum.disk.durable import rename_whole, sync
from curriculum.disk.manifest import write_manifest
from curriculum.errors import InputError
from curriculum.find_checkpoint import checkpoint_steps
from curriculum.run_directory import RunDirectory, link_or_copy, replaced_as, step_folders
from curriculum.train.checkpoints.arrays import disk_error, in_turn, load_params, quiet_failed_saves
from curriculum.train.checkpoints.finite import check_finite
from curriculum.train.kept import jitted_by_shapes
from curriculum.train.mesh import placed
from curriculum.train.processes import together
from curriculum.train.step import TrainState

if TYPE_CHECKING:
    import orbax.checkpoint as ocp

_EMA = "ema"  # an item of its own, so that the moving average can be read alone
_ARRAYS = ("params", "train", "baselines", _EMA)  # the items of a step that are trees of arrays
_LEFT_OVER = re.compile(r"\.\d+\.(saving.*|deleting|adopted|replaced)")


def import_ahead() -> threading.Thread:
    """Start importing orbax in a thread: it takes half a second, which the first save or restore would wait for."""
    thread = threading.Thread(target=importlib.import_module, args=("orbax.checkpoint",), name="import")
    thread.start()
    return thread


class SaveFailed(OSError):
    """The disk refused a checkpoint, and nothing of it is left. `path`: that of the step in the run directory."""

    def __init__(self, error: OSError, path: str):
        super().__init__(error.errno, os.strerror(error.errno))
        self.path = path


class Checkpoints:
    """The checkpoints of one folder: the newest `keep` of them, or with None all until they are deleted.

    With `keep_planned` = (every, n), the newest n whose step is a multiple of `every` stay too. During a row of bad
    updates the newest checkpoint from before it stays as well: it is the one to go back to.

    A step's folder holds `params` (restorable alone), `train` (optimizer state and accumulators), `ema` if a moving
    average is kept, `ledger` (plain JSON: segments, consumption, the record's offsets), `baselines` (nats of every
    eval window at the evals that later ones are compared with), and their checksums in `manifest.json`. The folder
    gets its name when it is whole and on disk, and loses it before anything in it is deleted. Nothing is created
    before the first save.

    With several processes, all call the same methods in the same order. Each writes and reads the parts of the arrays
    that its devices hold, in one folder that all of them see; process 0 does everything else.
    """

    def __init__(self, directory: Path, keep: int | None = 1, keep_planned: tuple[int, int] | None = None):
        self.directory = Path(directory).absolute()
        self._keep, self._keep_planned = keep, keep_planned
        self._pending: tuple[int, Future] | None = None

    @cached_property
    def _writer(self) -> ocp.AsyncCheckpointer:
        import orbax.checkpoint as ocp

        quiet_failed_saves()
        # Compressing float32 noise saves 7 % of the disk, and takes more CPU time than all the rest of a save.
        # If processes save one step in two folders at once, each save must have barriers of its own.
        apart = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=self.directory.name)
        own = {"multiprocessing_options": apart}
        how = own | {"use_compression": False}
        if _writes_numpy():
            how["type_handler_registry"] = _numpy_handlers()
        arrays = {name: ocp.PyTreeCheckpointHandler(**how) for name in _ARRAYS}
        items = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(**own), **arrays, ledger=ocp.JsonCheckpointHandler(**own)
        )
        return ocp.AsyncCheckpointer(items, **own)

    def steps(self) -> list[int]:
        """Steps whose checkpoints are whole, ascending, without one that is being saved."""
        return checkpoint_steps(self.directory)

    def save(self, state: TrainState, ledger: dict[str, Any], baselines: Mapping[str, np.ndarray]) -> None:
        """Start saving the state at its step; `baselines` are float32 [B, N] by eval set. Waits for the save before.

        The state may be donated to the next update as soon as this returns, and that update waits for nothing. If the
        device's memory is the host's, a copy is written, which needs the state's memory a second time until it is on
        disk.

        If the folder has this step already, that stays until the new one is whole and on disk, and is what a resume
        continues from if the save fails or is killed.

        Raises SaveFailed (with several processes InputError) if the disk refuses this save or refused the one before,
        NonFiniteState before anything is written, and RuntimeError if the folder has a later step.
        """
        import orbax.checkpoint as ocp

        self.wait()
        check_finite(state)
        step = int(state.step)
        sound = int(state.guard.row_began) if int(state.guard.bad_in_a_row) else step
        newest = together.from_first(lambda: max(step_folders(self.directory), default=-1))
        if newest > step:
            raise RuntimeError(
                f"{self.directory}: step {step} was not saved: step {newest} already exists; move the later ones away"
            )
        arrays = {"params": state.params, "train": beside_params(state)}
        if state.ema is not None:
            arrays[_EMA] = state.ema
        if jax.default_backend() == "cpu":
            arrays = _copied(arrays)
        if _writes_numpy():
            arrays = jax.tree.map(np.asarray, arrays)
        saved = {name: ocp.args.PyTreeSave(tree) for name, tree in {**arrays, "baselines": dict(baselines)}.items()}
        items = ocp.args.Composite(**saved, ledger=ocp.args.JsonSave(ledger))
        if _writes_numpy():
            self._pending = step, in_turn.submit(self._write, step, sound, items)
            return
        try:
            self._begin(step, items)  # returns once the writer has the arrays on the host
        except (OSError, ValueError) as error:
            self._drop_partial()
            raise self._failure(step, error) from None
        self._pending = step, in_turn.submit(self._write, step, sound)

    def save_as(self, other: Checkpoints) -> None:
        """Start to keep the step whose save in `other` has just been started, by hard links once it is on disk.

        For a single process. Fails as that save does. Waits for the save before.
        """
        self.wait()
        step, saving = other._pending
        self._pending = step, in_turn.submit(self._adopt_saved, saving, other.directory / str(step))

    def _adopt_saved(self, saving: Future, folder: Path) -> None:
        saving.result()
        self.directory.mkdir(exist_ok=True)
        self.adopt(folder)

    def _begin(self, step: int, items: ocp.args.Composite) -> None:
        if together.is_first():
            self.directory.mkdir(exist_ok=True)
            self._drop_partial()  # left by a failed save, some of whose writes may have ended since
        together.wait_for_all()
        self._writer.save(self._partial(step), items)

    def _write(self, step: int, sound: int, items: ocp.args.Composite | None = None) -> None:
        """In the background: give the step its name once it is whole and on disk, then delete old checkpoints.

        `sound`: the newest step before the current row of bad updates. `items`: what to write; None if that has begun.
        """
        try:
            if items is not None:
                self._begin(step, items)
            self._writer.wait_until_finished()
            if not together.is_first():
                return
            partial = self._partial(step)
            write_manifest(partial, step)
            folder = self.directory / str(step)
            replaced = replaced_as(folder) if folder.exists() else None
            rename_whole(partial, folder, replaced)
        except BaseException:
            self._drop_partial()
            raise
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)  # what the disk refuses to delete goes as the run is taken up
        steps = self.steps()
        kept = set(steps if self._keep is None else steps[-self._keep :])
        kept.update([s for s in steps if s <= sound][-1:])
        if self._keep_planned is not None:
            every, num = self._keep_planned
            kept.update([s for s in steps if s % every == 0][-num:])
        for old in set(steps) - kept:
            self._drop(old)

    def _partial(self, step: int) -> Path:
        return self.directory / f".{step}.saving"

    def _drop_partial(self) -> None:
        if not together.is_first():
            return
        for path in self.directory.glob(".*.saving*"):
            shutil.rmtree(path, ignore_errors=True)

    def _failure(self, step: int, error: Exception) -> Exception:
        """The exception to raise for an error of a save.

        If the disk failed, that is SaveFailed; with several processes InputError, which ends the run, as the others
        would wait for this one's part. Otherwise it is the error itself.
        """
        error = disk_error(error)
        if is_disk_error(error):
            if together.count() > 1:
                return cannot_be_saved(self.directory / str(step), error)
            return SaveFailed(error, f"{self.directory.name}/{step}")
        return error if self._is_there else gone(self.directory.parent)

    @property
    def _is_there(self) -> bool:
        """Whether the run's directory was neither moved nor removed; a save under way may have made it anew."""
        return self.directory.exists() and RunDirectory(self.directory.parent).has_config

    def wait(self) -> None:
        """Return once every save is on disk. Raises what made one fail, once."""
        if self._pending is not None:
            (step, future), self._pending = self._pending, None
            try:
                future.result()
            except (OSError, ValueError) as error:
                raise self._failure(step, error) from None
            together.wait_for_all()  # for process 0, which gives the folder its name

    def check(self) -> None:
        """Raise what made a save fail, if that is already known; no process waits for another."""
        if self._pending is not None and self._pending[1].done() and self._pending[1].exception() is not None:
            self.wait()

    @property
    def settled(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._pending is None or self._pending[1].done()

    def close(self) -> None:
        """Wait for the saves and release the writer. Raises what made a save fail."""
        try:
            self.wait()
        finally:
            if "_writer" in self.__dict__:
                try:
                    self._writer.close()
                except (OSError, ValueError) as error:  # repeats the failure that `wait` raised
                    if self._is_there and not is_disk_error(error := disk_error(error)):
                        raise error from None
                finally:
                    del self._writer
                    self._drop_partial()

    def set_aside_after(self, step: int) -> None:
        """Move the steps after `step`, and what is named like a step but is no checkpoint, to `superseded/`.

        That is beside this folder. Those of `checkpoints` go directly there, those of another folder below its name.
        What a killed process left half saved or half deleted is removed.
        """
        self.wait()
        if not together.is_first():
            return
        for left_over in self.directory.glob(".*"):
            if _LEFT_OVER.fullmatch(left_over.name):
                _remove(left_over)
        named = [path for path in self.directory.glob("*") if path.name.isascii() and path.name.isdecimal()]
        files = {int(path.name) for path in named if not path.is_dir()}
        for s in files | set(step_folders(self.directory)) - {s for s in self.steps() if s <= step}:
            self.set_aside(s)

    def set_aside(self, step: int) -> Path:
        """Move one step to `superseded/`; returns its new place."""
        below = "" if self.directory.name == "checkpoints" else self.directory.name
        target = self.directory.parent / "superseded" / below / str(step)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(target, ignore_errors=True)
        return (self.directory / str(step)).rename(target)

    def adopt(self, folder: Path) -> None:
        """Take over a whole checkpoint from another folder, unless its step is already here."""
        if not together.is_first():
            return
        if int(folder.name) in self.steps():
            return
        partial = self.directory / f".{folder.name}.adopted"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(self.directory / folder.name, ignore_errors=True)
        link_or_copy(partial, folder)
        partial.rename(self.directory / folder.name)
        sync(self.directory)

    def delete(self, step: int) -> None:
        """Remove a step, once saves are over. Raises OSError if the disk refuses that."""
        self.wait()
        if together.is_first():
            self._delete(step)

    def drop(self, step: int) -> None:
        """The same for a step that is not needed any more: if the disk refuses that, say so."""
        self.wait()
        if together.is_first():
            self._drop(step)

    def _drop(self, step: int) -> None:
        try:
            self._delete(step)
        except OSError as error:  # what was saved is whole all the same
            tell(f"{self.directory / str(step)}: is not needed any more, but could not be deleted: {error}")

    def _delete(self, step: int) -> None:
        gone = self.directory / f".{step}.deleting"
        _remove(gone)  # of a deletion that failed
        (self.directory / str(step)).rename(gone)
        sync(self.directory)
        _remove(gone)


def restore(folder: Path, like: TrainState) -> TrainState:
    """The state in a checkpoint's folder, with the placement of `like`: arrays, or jax.ShapeDtypeStruct.

    It may have been saved from another mesh: each device reads its own part. If `like` has a moving average and the
    checkpoint has none, the average begins with the parameters. Raises InputError if the checkpoint cannot be read, or
    if an array has another shape or type than in `like`.
    """
    params = load_params(folder / "params", like.params)
    rest = load_params(folder / "train", beside_params(like))
    ema = None
    if like.ema is not None:
        has_average = together.from_first((folder / _EMA).is_dir)
        ema = load_params(folder / (_EMA if has_average else "params"), like.params)
    return TrainState(params=params, step=placed(np.int32(int(folder.name)), like.step.sharding), ema=ema, **rest)


def baselines_in(folder: Path) -> dict[str, np.ndarray]:
    """The `baselines` of a checkpoint as they were given to `save`, on the host."""
    return {name: np.asarray(nats_BN) for name, nats_BN in load_params(folder / "baselines").items()}


def gone(run_dir: Path) -> InputError:
    """The error of a run whose directory is not where it was."""
    return InputError(
        f"{run_dir}: was moved or removed while the run trained; if it is elsewhere, move it back, in place of what a "
        "save may have left here, and continue with --resume latest"
    )


def cannot_be_saved(folder: Path, error: OSError) -> InputError:
    """What ends a run of several processes whose disk refuses a checkpoint."""
    fix = "fix that, and continue from the checkpoint before with --resume latest"
    return InputError(f"{folder}: cannot be saved: {error.strerror}; {fix}")


def _remove(path: Path) -> None:
    """Remove a folder with all that is in it; of a link to one, as of a file, only itself."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def beside_params(state: TrainState) -> dict[str, Any]:
    """What a checkpoint keeps as `train`."""
    return {name: part for name, part in state._asdict().items() if name not in ("params", "step", _EMA)}


def _writes_numpy() -> bool:
    """Whether arrays are written as numpy's: those of a single process whose devices' memory is the host's.

    orbax takes less processor time for them, beside the bytes themselves (docs/performance.md).
    """
    return jax.default_backend() == "cpu" and together.count() == 1


def _numpy_handlers() -> ocp.type_handlers.TypeHandlerRegistry:
    """What orbax writes arrays with, if they are numpy's: as they are, since `save` has copied them."""
    import orbax.checkpoint as ocp

    handlers = ocp.type_handlers
    as_they_are = np.ndarray, handlers.NumpyHandler(deepcopy_host_arrays=False)
    # Without a handler of jax's arrays orbax would print a warning.
    return handlers.create_type_handler_registry(as_they_are, (jax.Array, handlers.ArrayHandler()))


@jitted_by_shapes
def _copied(tree: Any) -> Any:
    """A copy made by all cores: an update that is given arrays still being read would copy them with one.

    An update without donation, which would leave them to the save, is slower by as much as the copy takes: for 154 MB
    on 2 cores 22 ms of their time, and the copy 25.
    """
    return jax.tree.map(jnp.copy, tree)
