"""The parameters beside which a run's adapters are trained: read from what it began from, each time anew.

They are in no checkpoint. What they were is kept in the run's lineage as a digest, so that adapters are never put
beside others.
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
from curriculum.model.formats.hf import load_hf
from curriculum.model.lora import adapters_of, frozen_of, joined
from curriculum.model.model import Params, by_name
from curriculum.model.presets import ModelConfig
from curriculum.run import RunDirectory, find_checkpoint
from curriculum.train.checkpoints.arrays import load_params
from curriculum.train.mesh import on_host
from curriculum.train.processes.together import from_first

DIGEST = "frozen"  # the digest's key in a lineage
_FIX = "the run's checkpoints hold adapters alone, which go with the very parameters that they were trained beside"


def frozen_base(config: Config, lineage: Mapping[str, Any]) -> Base | HfBase:
    """What a run began from, found again. Raises InputError where it is gone or damaged."""

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
    """What `find(part)` finds, reading it for its checksums, in process 0 alone: the others find the same without."""

    def place() -> str | None:
        base = find(part)
        return base.checkpoint.parent.name if isinstance(base, Base) else None

    verified, base = from_first(place), find("ledger/")
    return replace(base, checkpoint=base.directory.path / verified / str(base.step)) if verified else base


def found_again(lineage: Mapping[str, Any], part: str | tuple[str, ...]) -> Base | HfBase:
    """What a run of this lineage began from; of a checkpoint `part` is verified, as by `damage`.

    Raises InputError where it is gone or damaged.
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
        raise InputError(f"{given!r} is no Hugging Face folder any more")
    return base


def _checkpoint(given: str, step: int, part: str | tuple[str, ...]) -> Base:
    """The checkpoint of that step, wherever the run keeps it now, and whatever its gold is by now."""
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

    Raises InputError where the lineage has the digest of others.
    """
    if isinstance(base, HfBase):
        frozen = load_hf(base.folder, architecture, like)
    else:
        frozen = load_params(base.checkpoint / "params", like)
    found = digest(frozen)
    if lineage.get(DIGEST, found) != found:
        message = f"{lineage['init_from']!r} holds other parameters than it did when the run began (xxh3_128 {found}, "
        message += f"expected {lineage[DIGEST]}): {_FIX}; restore it from a copy"
        raise config.error([("adaptation.init_from", message)])
    return frozen, {**lineage, DIGEST: found}


def whole_params(
    config: Config, architecture: ModelConfig | None, lineage: Mapping[str, Any] | None, arrays: Path, like: Params
) -> Params:
    """The whole parameters of a run's saved ones, placed as in `like`: of adapters with what they were trained beside.

    `architecture`: the run's `resolved_model`, None for a model of one's own; `lineage`: that of the run's ledger.
    Raises InputError where something is gone, or is not what it was.
    """
    if config.adaptation.lora is None:
        return load_params(arrays, like)
    adapters = load_params(arrays, adapters_of(like))
    frozen, _ = load_frozen(config, architecture, frozen_base(config, lineage), lineage, frozen_of(like))
    return joined(frozen, adapters)


def digest(params: Params) -> str:
    """xxh3_128 of names, shapes and float32 bytes, wherever the arrays lie; one of them at a time on the host."""
    checksum = xxhash.xxh3_128()
    for name, array in by_name(params).items():
        checksum.update(f"{name}{list(array.shape)}".encode())
        checksum.update(np.ascontiguousarray(on_host(array), np.float32))
    return checksum.hexdigest()
