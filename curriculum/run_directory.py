"""A run directory: where its files lie, and reading and writing those that describe the run."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curriculum.disk.append import is_disk_error, tell
from curriculum.disk.durable import rename_whole, write_whole
from curriculum.errors import FROM_WORKING_FOLDER, InputError, check_read_as_utf8, readable
from curriculum.record.events import EVENTS, METRICS, plain

if TYPE_CHECKING:
    import numpy as np

    from curriculum.config import Config

_OWN_FOLDERS = tuple("checkpoints gold kept frozen averages evals superseded tokenizer tensorboard".split())
_OWN_FILES = ("model.json", METRICS, "training_state.json")  # beside the config and the record of events
# In every resolved config.
_SECTIONS = tuple("name tokenizer model sources phases evalsets train adaptation command_line derived".split())


class _Inside:
    """The path of one of a run's files or folders."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, run: RunDirectory, _: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    resolved_config = _Inside("config.resolved.json")
    own_config = _Inside("config.yaml")  # as it was given; there is none if the config came from Python
    _architecture = _Inside("model.json")
    training_state = _Inside("training_state.json")
    going_back = _Inside("going_back.json")
    tokenizer = _Inside("tokenizer")
    checkpoints = _Inside("checkpoints")
    gold = _Inside("gold")
    kept = _Inside("kept")
    frozen = _Inside("frozen")  # the checkpoint of another run that its adapters were trained beside
    averages = _Inside("averages")
    _evals = _Inside("evals")
    superseded = _Inside("superseded")

    def results(self, step: int) -> Path:
        """The file with every window's sums for the eval after `step`."""
        return self._evals / f"{step}.npz"

    def all_results(self) -> list[tuple[int, Path]]:
        """(step, file) of every eval whose window sums are saved. Raises InputError if they cannot be listed."""
        paths = [self._evals / name for name in names_in(self._evals) if name.endswith(".npz")]
        return [(int(path.stem), path) for path in paths if path.stem.isdecimal()]

    @property
    def places(self) -> tuple[Path, ...]:
        """The folders that hold checkpoints, in the order in which they are searched for a step."""
        return self.checkpoints, self.gold, self.kept

    @property
    def has_config(self) -> bool:
        """Whether the directory holds a run's config; False also for a path that is too long or a symlink loop."""
        return os.path.exists(self.resolved_config)

    def holds_run(self) -> bool:
        """Whether a run was begun here: it has a record or checkpoints."""
        return (self.path / EVENTS).exists() or self.checkpoints.exists()

    def files_of_others(self, config: Config) -> list[str]:
        """Names of files that a run with this config would replace, although they are no run's."""
        if self.has_config or self.holds_run():
            return []
        own_config, text = self.own_config, config.origin.text
        replaced = [name for name in _OWN_FILES if os.path.lexists(self.path / name)]
        if text is not None and os.path.lexists(own_config):
            same = own_config.is_file() and own_config.read_text(encoding="utf-8", errors="replace") == text
            replaced += [] if same else [own_config.name]
        return replaced

    def command_line(self) -> list[str]:
        """The options that earlier commands added to the config of this run, in order."""
        return self.resolved()["command_line"] if self.has_config else []

    def resolved(self) -> dict[str, Any]:
        """The config with every default, and what was derived from it. Raises InputError if it cannot be read."""
        resolved = read_json(self.resolved_config)
        if missing := [key for key in _SECTIONS if key not in resolved]:
            raise InputError(
                f"{self.resolved_config}: has no {', '.join(missing)}; expected the JSON that this program wrote: "
                "restore it from a copy"
            )
        return resolved

    def architecture(self) -> dict[str, Any]:
        """The model's architecture as of the run's start; for later steps see `architecture_at`. Raises InputError."""
        return read_json(self._architecture)

    def keeps_tokenizer(self, section: Mapping[str, Any]) -> bool:
        """Whether the run has its own copy of the tokenizer that this section of a config asks for."""
        kept = self.has_config and self.tokenizer.exists()
        return kept and read_json(self.resolved_config).get("tokenizer") == section

    def create(self, config: Config, derived: dict[str, Any], model: dict[str, Any]) -> None:
        """Write the run's config, as given and as resolved, and its model's architecture. Safe to repeat."""
        self.path.mkdir(parents=True, exist_ok=True)
        if (inherited := config.origin.inherited_model) is not None:
            derived = {**derived, "inherited_model": inherited}
        resolved = {**config.to_json(), "command_line": config.command_line, "derived": derived}
        write_whole(self.resolved_config, json.dumps(resolved, indent=2) + "\n")  # first: see `files_of_others`
        if config.origin.text is not None:
            write_whole(self.own_config, config.origin.text)
        write_whole(self._architecture, json.dumps(model, indent=2) + "\n")

    def write_training_state(self, state: dict[str, Any]) -> None:
        """Rewrite training_state.json; if the disk fails, the old file stays and a line on stderr says so."""
        path = self.training_state
        try:
            # Not durable: training waits for it at every checkpoint, and the next one writes it anew.
            write_whole(path, json.dumps(plain(state), indent=2, allow_nan=False) + "\n", durable=False)
        except OSError as error:
            if not is_disk_error(error):
                raise
            tell(f"{path}: cannot be written: {error.strerror}; left unchanged")

    def check_usable(self, *, to_write: bool = True) -> None:
        """Raise InputError if the path lies among another run's files or, `to_write`, cannot be written to.

        Also if it is not UTF-8, which the libraries that write checkpoints need. Creates nothing.
        """
        check_read_as_utf8(os.path.abspath(self.path), "--run-dir ")
        try:
            os.lstat(self.path / EVENTS)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:  # a name too long, links in a circle
            raise InputError(f"--run-dir {self.path}: {error.strerror}; choose another") from None
        here = self.path.resolve()
        for outer, inside in zip(here.parents, (here, *here.parents), strict=False):
            run = RunDirectory(outer)
            if inside.name in _OWN_FOLDERS and (run.has_config or run.checkpoints.exists()):
                of_step = here.parent == inside and inside in run.places and here.name.isdecimal()
                at = f" --resume {here.name}" if of_step else ""
                raise InputError(
                    f"--run-dir {self.path}: lies in {inside.name}/ of the run {outer}; to continue that run give "
                    f"--run-dir {outer}{at or ' --resume latest'}, or choose a folder of its own"
                )
        if to_write:
            there = (p for p in (self.path, *self.path.absolute().parents) if os.path.lexists(p))
            self._check_writable(next(there, None))

    def check_folders(self) -> None:
        """Raise InputError if one of the run's existing subfolders cannot be written to, as training needs."""
        for folder in filter(os.path.lexists, (*self.places, self._evals, self.averages, self.superseded)):
            self._check_writable(folder)

    def _check_writable(self, folder: Path | None) -> None:
        if folder is not None and folder.is_symlink() and not folder.exists():
            linked = f"{folder} is a link to {os.readlink(folder)}, which does not exist"
            raise InputError(f"--run-dir {self.path}: {linked}; make that folder, or choose another")
        if folder is None or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"--run-dir {self.path}: {folder} is not a writable folder; fix that, or choose another")

    def set_aside_evals_after(self, step: int) -> None:
        """Move the results of evals after `step` to `superseded/`: they will be measured again."""
        for measured, path in self.all_results():
            if measured > step:
                path.replace(self.superseded_results(measured))

    def superseded_results(self, step: int) -> Path:
        """Where `results(step)` is set aside; the folder is made."""
        folder = self.superseded / "evals"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{step}.npz"


@contextmanager
def telling_where_started(run: RunDirectory | None) -> Iterator[None]:
    """Add to an InputError of a path that is not there where the run was last started, if that was elsewhere."""
    try:
        yield
    except InputError as error:
        away = any(FROM_WORKING_FOLDER in problem for problem in error.problems)
        started_in = away and run is not None and read_json(run.resolved_config).get("derived", {}).get("started_in")
        with suppress(OSError):  # of a working folder that was removed
            if not started_in or started_in == os.getcwd():
                raise
        hint = f"the run {run.path} was started in {started_in}: start this command there, if what is missing is there"
        raise InputError(*error.problems, details=[*error.details, hint]) from None


def replaced_as(folder: Path) -> Path:
    """What the folder of a step is called from the moment before another one gets its name until it is deleted."""
    return folder.with_name(f".{folder.name}.replaced")


def put_back_replaced(place: Path) -> None:
    """Give a step's folder its name again, if a kill came just before the one that replaces it had that name.

    It is then the newest. Else it is what the disk refused to delete, perhaps a part of it.
    """
    newest = max(step_folders(place), default=-1)
    for name in names_in(place):
        step = name.removeprefix(".").removesuffix(".replaced")
        if step.isdecimal() and int(step) > newest and place / name == replaced_as(place / step):
            (place / name).rename(place / step)


def step_folders(place: Path) -> dict[int, Path]:
    """Folders named after a step, by step, ascending; they may be damaged. Raises InputError as `names_in` does."""
    steps = [int(name) for name in names_in(place) if name.isascii() and name.isdecimal()]
    with readable(place):
        return {step: folder for step in sorted(steps) if (folder := place / str(step)).is_dir()}


def names_in(place: Path) -> list[str]:
    """The names in a folder, none if it does not exist. Raises InputError if it cannot be listed."""
    with readable(place, "listed"):
        try:
            return os.listdir(place)
        except FileNotFoundError:
            return []


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read: {error}; expected the JSON that this program wrote") from None
    if not isinstance(found, dict):
        raise InputError(f"{path}: got {json.dumps(found)[:60]}, expected the JSON object that this program wrote")
    return found


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz file by name. Raises InputError."""
    import numpy as np  # slow to import, and most views do without

    try:
        with open(path, "rb") as file, np.load(file) as arrays:  # of a damaged file numpy does not close its own
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:  # TypeError: an .npy
        raise InputError(f"{path}: cannot be read: {error}; expected the arrays that this program wrote") from None


def write_tokenizer(directory: RunDirectory, tokenizer) -> None:
    """Save the tokenizer in the run directory, unless it is there, so that checkpoints can be read from it alone."""
    if directory.tokenizer.exists():
        return
    temporary = directory.path / "tokenizer.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    tokenizer.save(temporary)
    rename_whole(temporary, directory.tokenizer)


def link_or_copy(to: Path, path: Path) -> None:
    """Make `to` the same as `path`, by hard links where possible: files are never modified. Raises OSError."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(path, to, copy_function=_link) if path.is_dir() else _link(path, to)
    except shutil.Error as error:  # (from, to, why) of every file
        _, where, why = error.args[0][0]
        raise OSError(f"{where}: {why}") from None


def _link(path: str | Path, to: str | Path) -> None:
    try:
        os.link(os.path.realpath(path), to)
    except OSError:  # another disk, one without hard links, another user's file; copying raises any other error
        shutil.copy2(path, to)
