"""Where a run's first parameters come from: its own seed, a checkpoint of another run, or a Hugging Face folder."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from curriculum.config import Config
from curriculum.disk.manifest import damage
from curriculum.errors import FROM_WORKING_FOLDER, InputError, shown
from curriculum.find_checkpoint import find_checkpoint
from curriculum.model.formats.hf_weights import hf_fingerprint
from curriculum.record.queries import base_directory
from curriculum.run_directory import RunDirectory, telling_where_started
from curriculum.schema.adaptation import Base, HfBase, find_base, same_place
from curriculum.train.processes.together import from_first

ADAPTERS_ALONE = "the run's checkpoints hold adapters only, which need the exact parameters that they were trained with"


@dataclass(frozen=True)
class Start:
    """What a run begins from; all None: from its seed."""

    lineage: dict[str, Any] | None = None
    base: Base | HfBase | None = None  # None too if the run continues from its own checkpoint: see `base_again`
    frozen: Base | HfBase | None = None  # source of the parameters under adapters, also if it continues


def start_of(config: Config, saved: Mapping[str, Any] | None = None, directory: RunDirectory | None = None) -> Start:
    """What the run of a config begins from, by the ledger `saved` that it continues from or else by the config.

    `directory`: that of the run that continues.

    Raises InputError if the config contradicts that ledger, or if there is nothing to begin from.
    """
    section = config.adaptation
    if saved is None:
        if section.init_from is None:
            return Start()
        parts = ("params/", "train/") if section.keep_optimizer else "params/"  # all that is taken from it
        base = found_by_first(partial(_base_of, config), parts)
        lineage = base.lineage(section.keep_optimizer)
        if isinstance(base, HfBase):
            lineage["fingerprint"] = from_first(lambda: hf_fingerprint(base.folder))
        return Start(lineage, base, base if section.lora else None)
    lineage = saved["lineage"] or {"init_from": None, "keep_optimizer": False}
    if not same_place(section.init_from, lineage["init_from"]):
        got, was = shown(section.init_from), shown(lineage["init_from"])
        message = f"got {got}, but the run was begun with {was}; restore it, or start a new --run-dir"
        raise config.error([("adaptation.init_from", message)])
    if section.keep_optimizer != lineage["keep_optimizer"]:
        got, was = shown(section.keep_optimizer), shown(lineage["keep_optimizer"])
        raise config.error([("adaptation.keep_optimizer", f"got {got}, but the run was begun with {was}; restore it")])
    return Start(saved["lineage"], frozen=frozen_base(config, lineage, directory) if section.lora else None)


def _base_of(config: Config, part: str | tuple[str, ...]) -> Base | HfBase:
    try:
        return find_base(config.adaptation.init_from, part)
    except InputError as error:
        raise config.error(("adaptation.init_from", problem) for problem in error.problems) from None


def frozen_base(config: Config, lineage: Mapping[str, Any], directory: RunDirectory | None) -> Base | HfBase:
    """Find again what the run in `directory` began from. Raises InputError if it is gone or damaged."""

    def find(part: str | tuple[str, ...]) -> Base | HfBase:
        with telling_where_started(directory):
            try:
                return found_again(lineage, part, directory)
            except InputError as error:
                fix = "move or link it back to that path, or restore it from a copy"
                problems = (f"{problem}: {ADAPTERS_ALONE}; {fix}" for problem in error.problems)
                raise config.error(("adaptation.init_from", problem) for problem in problems) from None

    return found_by_first(find, ("ledger/", "params/"))


def found_by_first(
    find: Callable[[str | tuple[str, ...]], Base | HfBase], part: str | tuple[str, ...]
) -> Base | HfBase:
    """What `find(part)` finds; only process 0 verifies checksums, and the others find the same without."""

    def place() -> str | None:
        base = find(part)
        return str(base.checkpoint) if isinstance(base, Base) else None

    verified, base = from_first(place), find("ledger/")
    return replace(base, checkpoint=Path(verified)) if verified else base


def found_again(
    lineage: Mapping[str, Any], part: str | tuple[str, ...], directory: RunDirectory | None = None
) -> Base | HfBase:
    """What a run of this lineage began from; `part` of a checkpoint is verified, as in `damage`.

    A checkpoint is looked for first in `frozen/` of `directory`, where `keep_base` puts it: its run may have deleted
    it, or be gone. Raises InputError if it is gone or damaged.
    """
    of_folder, given = lineage.get("kind") == "hf", lineage["init_from"]
    what = f"the {lineage['model_type']} model" if of_folder else f"step {lineage['step']} of run {lineage['run']}"
    try:
        return _folder(given) if of_folder else _checkpoint(given, lineage["step"], part, directory)
    except InputError as error:
        raise InputError(*(f"{p}; expected {what} that the run began from" for p in error.problems)) from None


def _folder(given: str) -> HfBase:
    base = find_base(given)
    if not isinstance(base, HfBase):
        raise InputError(f"{given!r} is no longer a Hugging Face folder")
    return base


def _checkpoint(given: str, step: int, part: str | tuple[str, ...], user: RunDirectory | None) -> Base:
    """The checkpoint of that step, in whichever folder the run, or the one that uses it, keeps it."""
    path = Path(os.path.abspath(os.path.expanduser(base_directory({"init_from": given}))))
    run = RunDirectory(path) if RunDirectory(path).has_config else None
    if user is not None and damage(user.frozen / str(step), part) is None:
        return Base(given, run or user, step, user.frozen / str(step))
    if run is None:
        what = "holds no run any more: its config.resolved.json is missing" if path.exists() else "is gone"
        raise InputError(f"{given!r} {what} ({FROM_WORKING_FOLDER})")
    return Base(given, run, *find_checkpoint(run, step, option="step", part=part))
