"""A run read back from its directory: its config, its record, and what they say of it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curriculum.errors import InputError, check_folder, nearest, no_such, other_normalization
from curriculum.record.events import (
    AVERAGES,
    EVENTS,
    TAKEN_UP,
    DamagedRun,
    eval_key,
    last_gold,
    read_events,
    read_metrics,
    read_train_losses,
    record_name,
)
from curriculum.run_directory import RunDirectory, names_in

if TYPE_CHECKING:
    from curriculum.config import Config

DEFAULT_STORE_DIR = ".curriculum"  # beside the runs: token stores, and compiled programs


@dataclass(frozen=True)
class Run:
    """A run read back from its directory."""

    directory: RunDirectory
    resolved: dict[str, Any] = field(repr=False)
    events: list[dict[str, Any]] = field(repr=False)

    @cached_property
    def config(self) -> Config:
        """The checked config of the process that last trained the run."""
        from curriculum.config import config_from_json  # slow to import, and most views do without

        return config_from_json(self.config_json, self.directory.resolved_config)

    @property
    def config_json(self) -> dict[str, Any]:
        """The same config as plain JSON, every default filled in."""
        return {key: section for key, section in self.resolved.items() if key not in ("command_line", "derived")}

    @property
    def eval_seq_len(self) -> int:
        """Tokens of an eval window: those that the config gives, or of the longest sequence that it trains on."""
        of_phases = (phase.get("seq_len") or 0 for phase in self.resolved["phases"])
        return self.resolved["evalsets"]["seq_len"] or max(self.resolved["train"]["seq_len"], *of_phases)

    @property
    def name(self) -> str:
        """The config's name; for a branch, whose config has its trunk's name, the name of its directory."""
        return self.resolved["name"] if self.branched_from is None else self.real_path.name

    @cached_property
    def real_path(self) -> Path:
        """The absolute path of its directory, without links: what tells runs apart."""
        return self.directory.path.resolve()

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.directory.path)

    @cached_property
    def train_losses(self) -> list[tuple[int, Any]]:
        """(step, training loss) of each row of metrics.jsonl, for those who compare many long runs."""
        return read_train_losses(self.directory.path)

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
        return self.resolved["derived"].get("branched_from")

    @property
    def store_dir(self) -> str:
        """The token store directory, as given, of the process that last trained the run; a new branch has none yet."""
        return self.resolved["derived"].get("store_dir", DEFAULT_STORE_DIR)

    @property
    def own_optimizer(self) -> str | None:
        """The name of an optimizer of the user's own, without which no process can train the run on."""
        return self.resolved["derived"].get("own_optimizer")

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
        gold = last_gold(self.events)
        return gold and gold["step"]

    def evals(self, name: str = "val") -> list[tuple[int, float]]:
        """(step, loss) of every eval of a set; `val`, or `primary`, is the primary one.

        `val@ema` and `val@phase_mean` are the evals of these averages of the parameters. Raises InputError if the run
        has no such set, or if there is no such average.
        """
        known = {record_name(own) for event in self.events for own in event.get("evalsets", ())}
        evalset, at, average = name.partition("@")
        if known and record_name(evalset) not in known:
            raise InputError(f"{self.directory.path}: {evalset}: {no_such('eval set', evalset, known)}")
        if at and average not in AVERAGES:
            raise InputError(f"{self.directory.path}: {name}: {no_such('average', average, AVERAGES)}")
        evals = [(e["step"], e.get(average, {}) if at else e) for e in self.events if e["event"] == "eval"]
        key = eval_key(record_name(evalset))
        return [(step, losses[key]) for step, losses in evals if key in losses]


def load_run(run_dir: str | os.PathLike) -> Run:
    """Read a run directory. Raises InputError when there is none."""
    directory = run_directory(run_dir)
    return Run(directory, directory.resolved(), read_events(directory.path))


def run_directory(run_dir: str | os.PathLike) -> RunDirectory:
    """The directory of a run. Raises InputError if it holds no run's config; other files may be missing."""
    check_folder("run", run_dir)
    directory = RunDirectory(Path(run_dir))
    if not directory.has_config and os.path.exists(directory.path / EVENTS):
        fix = "restore it from a copy, or resume the run with all options that it had (if complete, with more steps)"
        raise InputError(f"{directory.resolved_config}: is missing; {fix}")
    if not directory.has_config:
        below = runs_below(run_dir)
        there = f"; it contains runs: {', '.join(below)}" if below else ""
        there = there or absent(directory.path)
        raise InputError(f"{run_dir}: holds no run; expected a directory made by `curriculum train`{there}")
    return directory


def run_near(given: str, near: Path) -> RunDirectory | None:
    """The run that a lineage calls `given`, a path relative to the folder where a run at `near` was started.

    It is looked for in each folder above `near`, then in the working folder; None if there is no run.
    """
    folders = (*near.resolve().parents, Path())
    places = (RunDirectory(folder / Path(given).expanduser()) for folder in folders)
    return next((place for place in places if place.has_config), None)


def absent(path: Path) -> str:
    """That a run directory does not exist, and which one may be meant, as the end of a message; empty if it exists."""
    if os.path.lexists(path):
        return ""
    for folder in (path.parent, path.parent / "runs"):
        if near := nearest(path.name, runs_below(folder)):
            same = other_normalization(path.name, near)
            return f"; it does not exist; did you mean {str(folder / near)!r}?{same}"
    return "; it does not exist"


def load_runs(paths: Iterable[str | os.PathLike], check: Callable[[Run], object]) -> tuple[list[Run], dict[str, str]]:
    """The runs at these paths, and {path: why} of those that are left out.

    A folder of runs stands for all of its other runs, in order of name. One of them is left out if it cannot be read,
    or if `check` raises InputError for it. Raises InputError for a run that is given itself, and if none is left.
    """
    runs, damaged = [], {}
    for path, is_given in _runs_in(paths):
        try:
            run = load_run(path)
            check(run)
            runs.append(run)
        except InputError as error:
            if is_given:
                raise
            damaged[str(path)] = error.problems[0]
    if damaged and not runs:
        raise InputError(*damaged.values())
    return runs, damaged


def of_whole_runs(
    made_of: Callable[[list[Run]], Any],
    runs: list[Run],
    damaged: dict[str, str],
    paths: Iterable[str | os.PathLike],
) -> Any:
    """What is made of the `runs` of `load_runs(paths)`, without those that turn out to be damaged on the way.

    They are added to `damaged`. What is made depends on which runs there are, so it is then made again. Raises
    DamagedRun for a run that is given itself, and InputError if none is left.
    """
    given = set(map(Path, paths))
    while True:
        try:
            return made_of(runs)
        except DamagedRun as error:
            whole = [run for run in runs if run.directory.path != error.run_dir]
            if error.run_dir in given or len(whole) == len(runs):  # it is the base of one of them
                raise
            damaged[str(error.run_dir)], runs = error.problems[0], whole
            if not runs:
                raise InputError(*damaged.values()) from None


def left_out(damaged: Mapping[str, str]) -> list[str]:
    """A line for each run that `load_runs` left out."""
    return [f"{path}: left out: {why}" for path, why in damaged.items()]


def _runs_in(paths: Iterable[str | os.PathLike]) -> list[tuple[Path, bool]]:
    """Run directories, and whether each is given itself, or found in a folder that is."""
    found: list[tuple[Path, bool]] = []
    for given in paths:
        check_folder("run", given)
        path = Path(given)
        below = [] if RunDirectory(path).has_config else runs_below(path)
        there = {run.resolve() for run, _ in found}
        others = [(path / name, False) for name in below if (path / name).resolve() not in there]
        found += others if below else [(path, True)]
    return found


def runs_below(folder: str | os.PathLike) -> list[str]:
    """Names of the runs in a folder, `run10` after `run9`, without a config too; none if there is no folder."""
    paths = [Path(folder) / name for name in names_in(Path(folder))] if os.path.isdir(folder) else []
    found = [path.name for path in paths if RunDirectory(path).has_config or os.path.exists(path / EVENTS)]
    return sorted(found, key=lambda name: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", name)])
