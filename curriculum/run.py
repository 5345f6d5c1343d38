"""A run directory: where its files lie, writing those that describe the run, reading a run and its checkpoints back."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curriculum.errors import InputError, readable
from curriculum.lock import trained_by
from curriculum.manifest import damage
from curriculum.record.append import DISK_ERRORS, tell
from curriculum.record.events import EVENTS, METRICS, TAKEN_UP, eval_key, last_gold, plain, read_events, read_metrics

if TYPE_CHECKING:
    import numpy as np

    from curriculum.config import Config

DEFAULT_STORE_DIR = ".curriculum"  # beside the runs: token stores, and compiled programs
CHECKPOINT_ITEMS = ("params", "train", "ledger", "baselines")  # folders that a whole checkpoint has
_OWN_FOLDERS = ("checkpoints", "gold", "kept", "averages", "evals", "superseded", "tokenizer", "tensorboard")
_OWN_FILES = ("model.json", METRICS, "training_state.json")  # beside the config and the record of events
_SECTIONS = ("name", "tokenizer", "model", "sources", "phases", "evalsets", "train")  # in every resolved config


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run."""

    path: Path

    @property
    def resolved_config(self) -> Path:
        return self.path / "config.resolved.json"

    @property
    def _architecture(self) -> Path:
        return self.path / "model.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def averages(self) -> Path:
        return self.path / "averages"

    def results(self, step: int) -> Path:
        """The file with every window's sums for the eval after `step`."""
        return self.path / "evals" / f"{step}.npz"

    def all_results(self) -> list[tuple[int, Path]]:
        """(step, file) of every eval whose window sums are saved. Raises InputError if they cannot be listed."""
        paths = [self.path / "evals" / name for name in names_in(self.path / "evals") if name.endswith(".npz")]
        return [(int(path.stem), path) for path in paths if path.stem.isdecimal()]

    @property
    def superseded(self) -> Path:
        return self.path / "superseded"

    @property
    def going_back(self) -> Path:
        return self.path / "going_back.json"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def gold(self) -> Path:
        return self.path / "gold"

    @property
    def kept(self) -> Path:
        return self.path / "kept"

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
        own_config, text = self.path / "config.yaml", config.origin.text
        replaced = [name for name in _OWN_FILES if os.path.lexists(self.path / name)]
        if text is not None and os.path.lexists(own_config):
            same = own_config.is_file() and own_config.read_text(encoding="utf-8", errors="replace") == text
            replaced += [] if same else [own_config.name]
        return replaced

    def command_line(self) -> list[str]:
        """The options that earlier commands added to the config of this run, in order."""
        return self.resolved().get("command_line", []) if self.has_config else []

    def resolved(self) -> dict[str, Any]:
        """The run's config with every default filled in, and what was derived from it.

        Raises InputError if it cannot be read or lacks a section.
        """
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

    def create(self, config: Config, derived: dict[str, Any], model: dict[str, Any]) -> None:
        """Write the run's config, as given and as resolved, and its model's architecture. Safe to repeat."""
        self.path.mkdir(parents=True, exist_ok=True)
        resolved = {**config.to_json(), "command_line": config.command_line, "derived": derived}
        write_text(self.resolved_config, json.dumps(resolved, indent=2) + "\n")  # first: see `files_of_others`
        if config.origin.text is not None:
            write_text(self.path / "config.yaml", config.origin.text)
        write_text(self._architecture, json.dumps(model, indent=2) + "\n")

    def write_training_state(self, state: dict[str, Any]) -> None:
        """Rewrite training_state.json, the summary of the run's progress.

        If the disk fails (full, over quota, read-only), the old file stays and a line on stderr says so.
        """
        path = self.path / "training_state.json"
        try:
            write_text(path, json.dumps(plain(state), indent=2, allow_nan=False) + "\n")
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            tell(f"{path}: cannot be written: {error.strerror}; left unchanged")

    def check_usable(self) -> None:
        """Raise InputError if the path cannot be written to or lies among another run's files. Creates nothing."""
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
        self._check_writable(next((p for p in (self.path, *self.path.absolute().parents) if os.path.lexists(p)), None))

    def check_folders(self) -> None:
        """Raise InputError if one of the run's existing subfolders cannot be written to, as training needs."""
        for folder in filter(os.path.lexists, (*self.places, self.path / "evals", self.averages, self.superseded)):
            self._check_writable(folder)

    def _check_writable(self, folder: Path | None) -> None:
        if folder is None or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise InputError(f"--run-dir {self.path}: {folder} is not a writable folder; fix that, or choose another")

    def set_aside_evals_after(self, step: int) -> None:
        """Move the results of evals after `step` to `superseded/`: they will be measured again."""
        for measured, path in self.all_results():
            if measured > step:
                target = self.superseded / "evals" / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                path.replace(target)


@dataclass(frozen=True)
class Run:
    """A run read back from its directory."""

    directory: RunDirectory
    resolved: dict[str, Any]
    events: list[dict[str, Any]]

    @cached_property
    def config(self) -> Config:
        """The checked config of the process that last trained the run."""
        from curriculum.config import config_from_json  # slow to import, and most views do without

        return config_from_json(self.config_json)

    @property
    def config_json(self) -> dict[str, Any]:
        """The same config as plain JSON, every default filled in."""
        return {key: section for key, section in self.resolved.items() if key not in ("command_line", "derived")}

    @property
    def name(self) -> str:
        """The config's name; for a branch, whose config has its trunk's name, the name of its directory."""
        return self.resolved["name"] if self.branched_from is None else self.directory.path.resolve().name

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl."""
        return read_metrics(self.directory.path)

    @property
    def start(self) -> dict[str, Any]:
        """The `training_start` event. Raises InputError if the record is empty or begins with another event."""
        path = self.directory.path / EVENTS
        if not self.events:
            raise InputError(
                f"{path}: has no complete line: the run has not begun yet, or the file is damaged (then restore it "
                "from a copy)"
            )
        if self.events[0]["event"] != "training_start":
            raise InputError(f"{path}:1: got {self.events[0]['event']}, expected training_start; restore the file")
        return self.events[0]

    @property
    def plan(self) -> dict[str, Any]:
        """The latest plan in the record: from the start, or from the last resume or rollback."""
        return next((e["plan"] for e in reversed(self.events) if e["event"] in TAKEN_UP), self.start["plan"])

    @property
    def branched_from(self) -> dict[str, Any] | None:
        """{run, step, id, branched_from} of the branch point, None if the run is no branch."""
        return self.resolved.get("derived", {}).get("branched_from")

    @property
    def store_dir(self) -> str:
        """The token store directory, as given, of the process that last trained the run."""
        return self.resolved.get("derived", {}).get("store_dir", DEFAULT_STORE_DIR)

    @property
    def complete(self) -> dict[str, Any] | None:
        """The `training_complete` event, None while the run is not finished."""
        return self.events[-1] if self.events and self.events[-1]["event"] == "training_complete" else None

    @property
    def diverged(self) -> dict[str, Any] | None:
        """The `diverged` event if the run ended with it, else None. Resuming the run removes it from the record."""
        return self.events[-1] if self.events and self.events[-1]["event"] == "diverged" else None

    @property
    def gold_step(self) -> int | None:
        """The step of the gold checkpoint, None while there is none."""
        return _gold_step(self.events)

    def evals(self, name: str = "val") -> list[tuple[int, float]]:
        """(step, loss) of every eval of a set; `val` is the primary one."""
        key = eval_key(name)
        return [(e["step"], e[key]) for e in self.events if e["event"] == "eval" and key in e]


def load_run(run_dir: str | os.PathLike) -> Run:
    """Read a run directory. Raises InputError when there is none."""
    directory = run_directory(run_dir)
    return Run(directory, directory.resolved(), read_events(directory.path))


def run_directory(run_dir: str | os.PathLike) -> RunDirectory:
    """The directory of a run. Raises InputError if it holds no run's config; other files may be missing."""
    directory = RunDirectory(Path(run_dir))
    if not directory.has_config and os.path.exists(directory.path / EVENTS):
        fix = "restore it from a copy, or resume the run with all options that it had"
        raise InputError(f"{directory.resolved_config}: is missing; {fix}")
    if not directory.has_config:
        below = runs_below(run_dir)
        there = f"; it contains runs: {', '.join(below)}" if below else ""
        raise InputError(f"{run_dir}: holds no run; expected a directory made by `curriculum train`{there}")
    return directory


def runs_below(folder: str | os.PathLike) -> list[str]:
    """Names of the run directories directly in a folder, `run10` after `run9`; none if the folder does not exist."""
    names = names_in(Path(folder)) if os.path.isdir(folder) else []
    found = [name for name in names if RunDirectory(Path(folder) / name).has_config]
    return sorted(found, key=lambda name: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", name)])


def find_checkpoint(
    directory: RunDirectory,
    wanted: str | int | None = None,
    *,
    option: str = "--step",
    part: str | tuple[str, ...] = "",
) -> tuple[int, Path]:
    """(step, folder) of the checkpoint `wanted`, verified: "latest", "gold" or a step.

    None means the gold checkpoint, or the latest if the record names no gold or is missing. "latest" is the newest in
    `checkpoints/`. A step is looked for there first, then in `gold/` and `kept/`. `option` is the option that gave
    `wanted`, for messages. `part` is the part of the checkpoint that will be read, as for `damage`; only that part is
    verified.

    While a run trains, its gold may still be being saved. The gold before it is then used, and stderr says so.

    Raises InputError that lists the existing steps if there is no such checkpoint, if the gold that the record names is
    gone, or if there is a gold but no line in the record; and one that lists the undamaged steps if the checkpoint is
    damaged.
    """
    if isinstance(wanted, str) and wanted not in ("latest", "gold") and not _is_step(wanted):
        raise InputError(f"{option} {wanted}: expected 'latest', 'gold' or the step of a checkpoint")
    record = directory.path / EVENTS
    # Before the folders are listed: a gold's line comes before its checkpoint has its name.
    events = read_events(directory.path) if wanted in (None, "gold") and record.exists() else None
    found = {folder.name: list(step_folders(folder)) for folder in directory.places}
    there = _listed(found)
    if not there and not (directory.has_config or directory.holds_run()):
        raise InputError(f"{directory.path}: holds no run; expected a directory made by `curriculum train`")
    if not there:
        raise InputError(f"{directory.path}: has no checkpoint yet; train it up to its first save (checkpoint.every)")
    if wanted is None or wanted == "gold":
        if events == [] and found["gold"]:
            raise InputError(
                f"{record}: has no complete line to say which checkpoint is the gold one; restore it from a copy, or "
                f"give a step (available: {there})"
            )
        gold = _gold_step(events or [])
        if gold not in (None, *found["gold"]) and trained_by(directory.path):
            before = [e["step"] for e in events if e["event"] == "gold_checkpoint" and e["step"] in found["gold"]]
            told = f"gold/{before[-1]}, the one before it, is used" if before else "there is none before it"
            print(f"{directory.gold / str(gold)}: is being saved; {told}", file=sys.stderr)
            gold = before[-1] if before else None
        if gold in found["gold"]:
            return gold, undamaged(directory.gold / str(gold), f"{option} gold: " if wanted else "", part)
        if gold is not None:
            raise InputError(
                f"{directory.gold / str(gold)}: is gone, but the record names it as the gold checkpoint; restore it "
                f"from a copy, or give {option} latest or another step (available: {there})"
            )
        if wanted == "gold":
            raise InputError(f"{option} gold: {directory.path} has no gold checkpoint; available: {there}")
    if wanted is None or wanted == "latest":
        if not found["checkpoints"]:
            raise InputError(f"{option} latest: {directory.checkpoints} is empty; available: {there}")
        newest = found["checkpoints"][-1]
        return newest, undamaged(directory.checkpoints / str(newest), f"{option} latest: " if wanted else "", part)
    folders = [directory.path / name / str(int(wanted)) for name, steps in found.items() if int(wanted) in steps]
    if not folders:
        raise InputError(f"{option} {wanted}: {directory.path} has no checkpoint of that step; available: {there}")
    whole = next((folder for folder in folders if damage(folder, part) is None), None)
    return int(wanted), whole or undamaged(folders[0], f"{option} {wanted}: ", part)


def _is_step(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 20


def undamaged(checkpoint: Path, given: str = "", part: str | tuple[str, ...] = "") -> Path:
    """`checkpoint` itself, if it verifies. Otherwise raises InputError that lists the steps that do.

    `given` begins the message: how the user named the checkpoint. `part` is as for `damage`.
    """
    if (why := damage(checkpoint, part)) is None:
        return checkpoint
    check_there(checkpoint)
    places = RunDirectory(checkpoint.parents[1]).places
    whole = {
        place.name: [step for step, folder in step_folders(place).items() if damage(folder, part) is None]
        for place in places
    }
    raise InputError(
        f"{given}{checkpoint}: is damaged: {why}; restore it from a copy, or use another step (those that verify: "
        f"{_listed(whole) or 'none'})"
    )


def check_there(checkpoint: Path) -> None:
    """Raise InputError if a checkpoint that was found is gone: it is not damaged, a training run deleted it."""
    if not checkpoint.exists():
        raise InputError(
            f"{checkpoint}: is gone: a training run keeps only its newest checkpoints (checkpoint.keep) and "
            "their golds; try again, or wait for the run to end"
        )


def step_folders(place: Path) -> dict[int, Path]:
    """Folders named after a step, by step, ascending; they may be damaged. Raises InputError as `names_in` does."""
    steps = [int(name) for name in names_in(place) if name.isascii() and name.isdecimal()]
    with readable(place):
        return {step: folder for step in sorted(steps) if (folder := place / str(step)).is_dir()}


def names_in(place: Path) -> list[str]:
    """The names in a folder, none if it does not exist.

    Raises InputError if it cannot be listed, which must not pass for an empty folder.
    """
    with readable(place, "listed"):
        try:
            return os.listdir(place)
        except FileNotFoundError:
            return []


def checkpoint_steps(place: Path) -> list[int]:
    """Steps of the checkpoints in a folder that have all CHECKPOINT_ITEMS, ascending; files in them may be damaged."""
    return [step for step, folder in step_folders(place).items() if set(CHECKPOINT_ITEMS) <= set(names_in(folder))]


def read_ledger(checkpoint: Path) -> dict[str, Any]:
    """The ledger in a checkpoint's folder."""
    return read_json(checkpoint / "ledger" / "metadata")


def architecture_at(ledger: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The architecture of a run's parameters after `step` updates, from any ledger of the run that reaches that step.

    It is the run's architecture, as in model.json, with the rope theta of the phase that made these parameters.
    """
    from phases.schedule import Schedule, segments_from_json  # brings numpy, and most views do without

    theta = Schedule(segments_from_json(ledger["segments"])).rope_theta_at(step)
    return ledger["model"] if theta is None else {**ledger["model"], "rope_theta": theta}


def _gold_step(events: list[dict[str, Any]]) -> int | None:
    gold = last_gold(events)
    return gold and gold["step"]


def _listed(found: dict[str, list[int]]) -> str:
    """`2, 4; in gold/: 3`."""
    own = ", ".join(map(str, found["checkpoints"]))
    rest = [f"in {folder}/: {', '.join(map(str, found[folder]))}" for folder in ("gold", "kept") if found[folder]]
    return "; ".join(filter(None, [own, *rest]))


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
        with np.load(path) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:  # TypeError: an .npy
        raise InputError(f"{path}: cannot be read: {error}; expected the arrays that this program wrote") from None


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a kill or a full disk leaves either the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_tokenizer(directory: RunDirectory, tokenizer) -> None:
    """Save the tokenizer in the run directory, unless it is there, so that checkpoints can be read from it alone."""
    if directory.tokenizer.exists():
        return
    temporary = directory.path / "tokenizer.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    tokenizer.save(temporary)
    temporary.rename(directory.tokenizer)
