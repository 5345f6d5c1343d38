"""The frozen parameters beside which a run trains adapters, read each time from what the run began from.

They are in no checkpoint. The run's lineage keeps their digest, so that adapters are never combined with others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from curriculum.adaptation import Base, HfBase, find_base
from curriculum.config import Config
from curriculum.errors import InputError
from curriculum.find_checkpoint import find_checkpoint
from curriculum.model.formats.hf import load_hf
from curriculum.model.lora import adapters_of, frozen_of, joined
from curriculum.model.model import Params, by_name
from curriculum.model.presets import ModelConfig
from curriculum.run_directory import RunDirectory
from curriculum.train.checkpoints.arrays import load_params
from curriculum.train.mesh import on_host
from curriculum.train.processes.together import from_first

DIGEST = "frozen"  # the digest's key in a lineage
_FIX = "the run's checkpoints hold adapters only, which need the exact parameters that they were trained with"


def frozen_base(config: Config, lineage: Mapping[str, Any]) -> Base | HfBase:
    """Find again what a run began from. Raises InputError if it is gone or damaged."""

    def find(part: str | tuple[str, ...]) -> Base | HfBase:
        try:
            return found_again(lineage, part)
        except InputError as error:
            problems = (f"{problem}: {_FIX}; restore it from a copy" for problem in error.problems)
            raise config.error(("adaptation.init_from", problem) for problem in problems) from None

    return found_by_first(find, ("ledger/", "params/"))


def found_by_first(
    find: Callable[[str | tuple[str, ...]], Base | HfBase], part: str | tuple[str, ...]
) -> Base | HfBase:
    """What `find(part)` finds; only process 0 verifies checksums, and the others find the same without."""

    def place() -> str | None:
        base = find(part)
        return base.checkpoint.parent.name if isinstance(base, Base) else None

    verified, base = from_first(place), find("ledger/")
    return replace(base, checkpoint=base.directory.path / verified / str(base.step)) if verified else base


def found_again(lineage: Mapping[str, Any], part: str | tuple[str, ...]) -> Base | HfBase:
    """What a run of this lineage began from; `part` of a checkpoint is verified, as in `damage`.

    Raises InputError if it is gone or damaged.
    """
    of_folder, given = lineage.get("kind") == "hf", lineage["init_from"]
    what = f"the {lineage['model_type']} model" if of_folder else f"step {lineage['step']} of run {lineage['run']}"
    try:
        return _folder(given) if of_folder else _checkpoint(given, lineage["step"], part)
    except InputError as error:
        raise InputError(*(f"{p}; expected {what} that the run began from" for p in error.problems)) from None


def _folder(given: str) -> HfBase:
    base = find_base(given)
    if not isinstance(base, HfBase):
        raise InputError(f"{given!r} is no longer a Hugging Face folder")
    return base


def _checkpoint(given: str, step: int, part: str | tuple[str, ...]) -> Base:
    """The checkpoint of that step, in whichever folder the run keeps it, and whatever its gold is by now."""
    path = Path(os.path.abspath(os.path.expanduser(given)))
    runs = (RunDirectory(place) for place in (path, path.parent, path.parent.parent))
    run = next((run for run in runs if run.has_config), None)
    if run is None:
        raise InputError(f"{given!r} is gone (paths are relative to the working folder)")
    return Base(given, run, *find_checkpoint(run, step, option="step", part=part))


def load_frozen(
    config: Config, architecture: ModelConfig, base: Base | HfBase, lineage: Mapping[str, Any], like: Params
) -> tuple[Params, dict[str, Any]]:
    """(the frozen parameters of a model, placed as in `like`; the lineage with their digest).

    Raises InputError if the lineage already has another digest.
    """
    if isinstance(base, HfBase):
        frozen = load_hf(base.folder, architecture, like)
    else:
        frozen = load_params(base.checkpoint / "params", like)
    found = digest(frozen)
    if lineage.get(DIGEST, found) != found:
        message = f"{lineage['init_from']!r} holds other parameters than when the run began (xxh3_128 {found}, "
        message += f"expected {lineage[DIGEST]}): {_FIX}; restore it from a copy"
        raise config.error([("adaptation.init_from", message)])
    return frozen, {**lineage, DIGEST: found}


def whole_params(
    config: Config, architecture: ModelConfig | None, lineage: Mapping[str, Any] | None, arrays: Path, like: Params
) -> Params:
    """The whole parameters of a run, placed as in `like`; saved adapters are joined with their frozen parameters.

    `arrays`: the folder of the saved parameters. `architecture`: the run's `resolved_model`, None for a custom model.
    `lineage`: that of the run's ledger. Raises InputError if something is gone or has changed.
    """
    if config.adaptation.lora is None:
        return load_params(arrays, like)
    adapters = load_params(arrays, adapters_of(like))
    frozen, _ = load_frozen(config, architecture, frozen_base(config, lineage), lineage, frozen_of(like))
    return joined(frozen, adapters)


def digest(params: Params) -> str:
    """xxh3_128 of names, shapes and float32 bytes, whatever the placement; one array at a time on the host."""
    checksum = xxhash.xxh3_128()
    for name, array in by_name(params).items():
        checksum.update(f"{name}{list(array.shape)}".encode())
        checksum.update(np.ascontiguousarray(on_host(array), np.float32))
    return checksum.hexdigest()
