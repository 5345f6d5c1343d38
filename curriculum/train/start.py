"""Where a run's first parameters come from: its own seed, a checkpoint of another run, or a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from curriculum.adaptation import Base, HfBase, differences, find_base, same_place
from curriculum.config import Config
from curriculum.manifest import damage
from curriculum.model.hf_weights import hf_fingerprint
from curriculum.model.model import Model, abstract_params, parameter_name
from curriculum.record.events import plain
from curriculum.run import RunDirectory, find_checkpoint, read_ledger, step_folders
from curriculum.train.checkpoint import load_params
from curriculum.train.frozen import frozen_base
from curriculum.train.optimizer import state_layout
from curriculum.train.processes import from_first


@dataclass(frozen=True)
class Start:
    """What a run begins from. All None: from its seed."""

    lineage: dict[str, Any] | None = None
    base: Base | HfBase | None = None  # None too for a run that goes on from a checkpoint of its own
    frozen: Base | HfBase | None = None  # what a run trains adapters beside, also where it goes on


class Resumed(NamedTuple):
    """The checkpoint that a run goes on from; it verified."""

    step: int
    folder: Path
    ledger: dict[str, Any]


def to_resume(directory: RunDirectory, resume: str | int | None) -> Resumed | None:
    """What `resume` means of a run, None where the run begins. Raises InputError for a checkpoint that is not there.

    "latest" is the newest of `checkpoints/` that verifies; where none does, the newest of `gold/` and `kept/`.
    """
    if resume is None:
        return None
    if resume == "latest":
        for places in ((directory.checkpoints,), (directory.gold, directory.kept)):
            found = sorted((step, folder) for place in places for step, folder in step_folders(place).items())
            for step, folder in reversed(found):
                if damage(folder) is None:
                    return Resumed(step, folder, read_ledger(folder))
        return None
    step, folder = find_checkpoint(directory, resume, option="--resume")
    own = directory.checkpoints / str(step)
    if own.is_dir() and damage(own) is None:  # its record is the one of an unbroken run
        folder = own
    return Resumed(step, folder, read_ledger(folder))


def resumed_by_first(find: Callable[[], Resumed | None]) -> Resumed | None:
    """What process 0 finds, in every process."""

    def found() -> list[Any] | None:
        resumed = find()
        return resumed and [resumed.step, str(resumed.folder), resumed.ledger]

    told = from_first(found)
    return told and Resumed(told[0], Path(told[1]), told[2])


class Damaged(NamedTuple):
    """A checkpoint that is not as it was saved."""

    step: int
    folder: Path
    why: str


def damaged_checkpoints(directory: RunDirectory, resumed: Resumed | None) -> list[Damaged]:
    """The damaged ones among the `checkpoints/` of a run that goes on from one of its own, or begins anew.

    Of those that are older, only the ledger is read: it says which golds must stay.
    """
    found = []
    for s, folder in step_folders(directory.checkpoints).items():
        older = resumed is not None and s < resumed.step
        verified = resumed is not None and folder == resumed.folder
        if not verified and (why := damage(folder, "ledger/" if older else "")):
            found.append(Damaged(s, folder, why))
    return found


def start_of(config: Config, saved: Mapping[str, Any] | None = None) -> Start:
    """Where the run of a config comes from: what `saved` says, the ledger that it goes on from, or else the config.

    Raises InputError where the config says otherwise than the checkpoint, or where there is nothing to begin from.
    """
    section = config.adaptation
    if saved is None:
        if section.init_from is None:
            return Start()
        base = find_base(section.init_from)
        lineage = base.lineage(section.keep_optimizer)
        if isinstance(base, HfBase):
            lineage["fingerprint"] = hf_fingerprint(base.folder)
        return Start(lineage, base, base if section.lora else None)
    lineage = saved.get("lineage") or {"init_from": None, "keep_optimizer": False}
    if not same_place(section.init_from, lineage["init_from"]):
        got, was = json.dumps(section.init_from), json.dumps(lineage["init_from"])
        message = f"got {got}, but the run was begun with {was}; restore it, or start a new --run-dir"
        raise config.error([("adaptation.init_from", message)])
    if section.keep_optimizer != lineage["keep_optimizer"]:
        got, was = json.dumps(section.keep_optimizer), json.dumps(lineage["keep_optimizer"])
        raise config.error([("adaptation.keep_optimizer", f"got {got}, but the run was begun with {was}; restore it")])
    return Start(saved.get("lineage"), frozen=frozen_base(config, lineage) if section.lora else None)


def check_base(base: Base | HfBase, config: Config, model: Model) -> None:
    """Raise InputError where the arrays of the checkpoint or folder are not those of the run that begins from it."""
    problems = []
    if isinstance(base, HfBase):
        if config.model is not None:  # and agrees: it was compared when the config was read
            return
        message = f"{base.folder} is a Hugging Face folder, which gives the `model` section its parameters, but the run"
        raise config.error([("adaptation.init_from", f"{message} has another model (make_model); leave that out")])
    saved = base.ledger
    name = f"{base.directory.path}, step {base.step},"
    parameters = {parameter_name(path): list(a.shape) for path, a in jax.tree.leaves_with_path(abstract_params(model))}
    were = saved["parameters"]
    if different := [n for n in sorted({**were, **parameters}) if parameters.get(n) != were.get(n)]:
        first = different[0]
        message = f"parameter {first}: {name} has {were.get(first)}, this model {parameters.get(first)}"
        more = f" ({len(different) - 1} more differ)" if len(different) > 1 else ""
        problems.append(("adaptation.init_from", f"{message}{more}; expected the same model"))
    elif different := differences(plain(dict(model.architecture)), base.architecture):
        problems.append(("adaptation.init_from", f"the architecture is not that of {name} but has {different}"))
    if config.adaptation.keep_optimizer:
        layout, was = state_layout(config.optim), saved["optimizer"]
        for key in {**was, **layout}:
            if layout.get(key) != was.get(key):
                got = f"got {layout.get(key)}, but {name} kept the state of {was.get(key)}"
                problems.append((f"optim.{key}", f"{got}; give that, or leave keep_optimizer out"))
    if problems:
        raise config.error(problems)


def load_base_optimizer(base: Base, like: Any) -> Any:
    """The checkpoint's optimizer state, placed as in `like`, what `TrainState` keeps beside the parameters."""
    return load_params(base.checkpoint / "train", like)["opt_state"]
