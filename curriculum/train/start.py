"""Where a run's first parameters come from: its own seed, a checkpoint of another run, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from curriculum.adaptation import Base, HfBase, differences, find_base, same_place
from curriculum.config import Config
from curriculum.errors import InputError, shown
from curriculum.model.formats.hf_weights import hf_fingerprint
from curriculum.model.model import Model, abstract_params, by_name
from curriculum.record.events import plain
from curriculum.train.frozen import found_again, found_by_first, frozen_base
from curriculum.train.optimizer import state_layout
from curriculum.train.processes.together import from_first


@dataclass(frozen=True)
class Start:
    """What a run begins from; all None: from its seed."""

    lineage: dict[str, Any] | None = None
    base: Base | HfBase | None = None  # None too for a run that continues from its own checkpoint: see `base_again`
    frozen: Base | HfBase | None = None  # source of the parameters under adapters, also if it continues


def start_of(config: Config, saved: Mapping[str, Any] | None = None) -> Start:
    """What the run of a config begins from, by the ledger `saved` that it continues from or else by the config.

    Raises InputError if the config contradicts that ledger, or if there is nothing to begin from.
    """
    section = config.adaptation
    if saved is None:
        if section.init_from is None:
            return Start()
        base = _base_of(config, "ledger/")
        lineage = base.lineage(section.keep_optimizer)
        # One process verifies the checksums of all that is taken from it, not each.
        if fingerprint := from_first(lambda: _verified(config)):
            lineage["fingerprint"] = fingerprint
        return Start(lineage, base, base if section.lora else None)
    lineage = saved["lineage"] or {"init_from": None, "keep_optimizer": False}
    if not same_place(section.init_from, lineage["init_from"]):
        got, was = shown(section.init_from), shown(lineage["init_from"])
        message = f"got {got}, but the run was begun with {was}; restore it, or start a new --run-dir"
        raise config.error([("adaptation.init_from", message)])
    if section.keep_optimizer != lineage["keep_optimizer"]:
        got, was = shown(section.keep_optimizer), shown(lineage["keep_optimizer"])
        raise config.error([("adaptation.keep_optimizer", f"got {got}, but the run was begun with {was}; restore it")])
    return Start(saved["lineage"], frozen=frozen_base(config, lineage) if section.lora else None)


def base_again(config: Config, model: Model, lineage: Mapping[str, Any]) -> Base | HfBase:
    """What a run first began from, for a run that has to begin anew.

    Raises InputError if it is gone, damaged or changed.
    """
    parts = ("params/", "train/") if lineage["keep_optimizer"] else "params/"
    base = found_by_first(partial(found_again, lineage), parts)

    def check_weights() -> None:
        if isinstance(base, HfBase) and (found := hf_fingerprint(base.folder)) != lineage.get("fingerprint", found):
            raise InputError(f"{base.folder}: holds other weights than when the run began")

    from_first(check_weights)
    if isinstance(base, Base) and base.config["name"] != lineage["run"]:
        raise InputError(f"{base.directory.path}: is run {base.config['name']}, the run began from {lineage['run']}")
    check_base(base, config, model)
    return base


def _base_of(config: Config, part: str | tuple[str, ...]) -> Base | HfBase:
    try:
        return find_base(config.adaptation.init_from, part)
    except InputError as error:
        raise config.error(("adaptation.init_from", problem) for problem in error.problems) from None


def _verified(config: Config) -> str | None:
    """Raise InputError if what a run begins from is damaged; return a Hugging Face folder's fingerprint, else None."""
    base = _base_of(config, ("params/", "train/") if config.adaptation.keep_optimizer else "params/")
    return hf_fingerprint(base.folder) if isinstance(base, HfBase) else None


def check_base(base: Base | HfBase, config: Config, model: Model) -> None:
    """Raise InputError if the arrays of the checkpoint or folder do not fit the run that begins from it."""
    problems = []
    if isinstance(base, HfBase):
        if config.model is not None:  # and agrees: it was compared when the config was read
            return
        message = f"{base.folder} is a Hugging Face folder, which gives the `model` section its parameters, but the run"
        raise config.error([("adaptation.init_from", f"{message} uses another model (make_model); leave that out")])
    saved = base.ledger
    name = f"{base.directory.path}, step {base.step},"
    parameters = {n: list(a.shape) for n, a in by_name(abstract_params(model)).items()}
    were = saved["parameters"]
    if different := [n for n in sorted({**were, **parameters}) if parameters.get(n) != were.get(n)]:
        first = different[0]
        message = f"parameter {first}: {name} has {were.get(first)}, this model {parameters.get(first)}"
        more = f" ({len(different) - 1} more differ)" if len(different) > 1 else ""
        problems.append(("adaptation.init_from", f"{message}{more}; expected the same model"))
    elif different := differences(plain(model.architecture), base.architecture):
        problems.append(("adaptation.init_from", f"the architecture is not that of {name} but has {different}"))
    if config.adaptation.keep_optimizer:
        layout, was = state_layout(config.optim), saved["optimizer"]
        for key in {**was, **layout}:
            if layout.get(key) != was.get(key):
                got = f"got {layout.get(key)}, but the optimizer state of {name} belongs to {was.get(key)}"
                problems.append((f"optim.{key}", f"{got}; set it to that, or leave keep_optimizer out"))
    if problems:
        raise config.error(problems)
