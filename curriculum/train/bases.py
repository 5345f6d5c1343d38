"""The parameters that a run takes from another, or from a Hugging Face folder: whether they fit it, and frozen ones.

The frozen ones, beside which a run trains adapters, are in no checkpoint: they are read each time from what the run
began from. Its lineage keeps their digest, so that adapters are never combined with others.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from curriculum.config import Config
from curriculum.disk.durable import clear_killed, rename_whole, scratch
from curriculum.disk.manifest import write_part_of
from curriculum.errors import InputError
from curriculum.model.formats.hf import load_hf
from curriculum.model.formats.hf_weights import hf_fingerprint
from curriculum.model.lora import adapters_of, frozen_of, joined
from curriculum.model.model import Model, Params, abstract_params, by_name, shapes_by_name
from curriculum.model.presets import ModelConfig
from curriculum.record.events import plain
from curriculum.run_directory import RunDirectory
from curriculum.schema.adaptation import Base, HfBase, differences
from curriculum.train.checkpoints.arrays import load_params
from curriculum.train.mesh import on_host
from curriculum.train.optimizer import state_layout
from curriculum.train.processes.together import from_first
from curriculum.train.resuming.start import ADAPTERS_ALONE, found_again, found_by_first, frozen_base

DIGEST = "frozen"  # the digest's key in a lineage


def base_again(config: Config, model: Model, lineage: Mapping[str, Any]) -> Base | HfBase:
    """What a run first began from, to begin anew. Raises InputError if it is gone, damaged or changed."""
    parts = ("params/", "train/") if lineage["keep_optimizer"] else "params/"
    base = found_by_first(partial(found_again, lineage), parts)

    def check_weights() -> None:
        if isinstance(base, HfBase) and hf_fingerprint(base.folder) != lineage["fingerprint"]:
            raise InputError(f"{base.folder}: holds other weights than when the run began")

    from_first(check_weights)
    if isinstance(base, Base):
        found, began_from = (base.config["name"], base.started_at), (lineage["run"], lineage["started_at"])
        if found != began_from:
            (name, at), (was, then) = found, began_from
            raise InputError(f"{base.directory.path}: is run {name} of {at}, but the run began from {was} of {then}")
    check_base(base, config, model)
    return base


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
    parameters = shapes_by_name(abstract_params(model))
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
        of_another = layout["name"] != was["name"]  # then its other settings are of no use here
        for key in ("name",) if of_another else {**was, **layout}:
            if layout.get(key) != was.get(key):
                got = f"got {layout.get(key)}, but the optimizer state of {name} belongs to {was.get(key)}"
                problems.append((f"optim.{key}", f"{got}; set it to that, or leave keep_optimizer out"))
    if problems:
        raise config.error(problems)


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
        message += f"expected {lineage[DIGEST]}): {ADAPTERS_ALONE}; restore it from a copy"
        raise config.error([("adaptation.init_from", message)])
    return frozen, {**lineage, DIGEST: found}


def keep_base(directory: RunDirectory, lineage: Mapping[str, Any]) -> None:
    """Hard-link what the adapters in `directory` need of another run's checkpoint into `frozen/`.

    That run deletes its checkpoints as it is trained further. On another disk there are no such links: nothing is kept.
    """
    base = found_again(lineage, "ledger/", directory)
    if not isinstance(base, Base) or (to := directory.frozen / str(base.step)).exists():
        return
    to.parent.mkdir(exist_ok=True)
    clear_killed(to.parent, to)
    with suppress(OSError, ValueError), scratch(to.parent, to) as folder:
        for file in (path for part in ("ledger", "params") for path in (base.checkpoint / part).rglob("*")):
            if file.is_file():
                link = folder / file.relative_to(base.checkpoint)
                link.parent.mkdir(parents=True, exist_ok=True)  # which their owner may delete, whatever the base's may
                os.link(os.path.realpath(file), link)
        write_part_of(folder, base.checkpoint, ("ledger/", "params/"))
        rename_whole(folder, to)


def whole_params(
    config: Config, architecture: ModelConfig | None, lineage: Mapping[str, Any] | None, arrays: Path, like: Params
) -> Params:
    """The whole parameters of a run, placed as in `like`; saved adapters are joined with their frozen parameters.

    `arrays`: the folder of the saved parameters, in the run's directory. `architecture`: the run's `resolved_model`,
    None for a custom model.
    `lineage`: that of the run's ledger. Raises InputError if something is gone or has changed.
    """
    if config.adaptation.lora is None:
        return load_params(arrays, like)
    adapters = load_params(arrays, adapters_of(like))
    base = frozen_base(config, lineage, RunDirectory(arrays.parents[2]))
    frozen, _ = load_frozen(config, architecture, base, lineage, frozen_of(like))
    return joined(frozen, adapters)


def digest(params: Params) -> str:
    """xxh3_128 of names, shapes and float32 bytes, whatever the placement; one array at a time on the host."""
    checksum = xxhash.xxh3_128()
    for name, array in by_name(params).items():
        checksum.update(f"{name}{list(array.shape)}".encode())
        checksum.update(np.ascontiguousarray(on_host(array), np.float32))
    return checksum.hexdigest()
