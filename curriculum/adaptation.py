"""Begin from what was learned before: a run's checkpoint or a Hugging Face folder, the sections taken from it, and
replay of what it knew.

Nothing here imports jax: a plan needs it too.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from curriculum.data.hf_files import DEFINITION_NAME
from curriculum.data.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from curriculum.errors import InputError
from curriculum.model.hf import checked_tensors
from curriculum.model.hf_config import HF_CONFIG, architecture_fields, hf_model_type, read_hf_config
from curriculum.model.hf_weights import INDEX, stored_tensors
from curriculum.model.presets import HOW, LoraConfig, ModelConfig, ModelSection, model_problems, resolve_model
from curriculum.run import (
    RunDirectory,
    architecture_at,
    find_checkpoint,
    read_json,
    read_ledger,
    step_folders,
    undamaged,
)
from curriculum.typed import Limits
from phases.schedule import Phase

if TYPE_CHECKING:
    from curriculum.config import Config

INHERITED = ("model", "tokenizer")  # sections that a config may leave to what it begins from


@dataclass(frozen=True)
class AdaptationSection:
    """Begin from another run or a pretrained model, and keep what it knew by replay."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    init_from: str | None = None
    """A run: its gold checkpoint, else its latest; RUN/gold; RUN/{checkpoints,gold,kept}/N; a Hugging Face folder."""
    keep_optimizer: bool = False
    """Take the optimizer's state over too, not the parameters alone; the step is 0 either way."""
    replay: dict[str, Annotated[float, Limits(gt=0, lt=1)]] = field(default_factory=dict)
    """Source to share, above 0 and below 1, mixed into every phase whose mixture does not name the source."""
    lora: LoraConfig | None = None
    """Train adapters alone, such as `{rank: 16, alpha: 32, targets: [query, value]}`; null: all of the model."""


def resolved_model(config: Config, vocab_size: int) -> ModelConfig:
    """The model that a config trains, adapters included, for a tokenizer of `vocab_size` ids.

    Raises InputError as `resolve_model` does.
    """
    return replace(resolve_model(config.model, vocab_size), lora=config.adaptation.lora)


@dataclass(frozen=True)
class Base:
    """The checkpoint that a run begins from."""

    init_from: str  # as it was given
    directory: RunDirectory
    step: int
    checkpoint: Path

    @property
    def config(self) -> dict[str, Any]:
        """The base run's resolved config."""
        return self.directory.resolved()

    @property
    def architecture(self) -> dict[str, Any]:
        """What its parameters are computed with."""
        return architecture_at(self.ledger, self.step)

    @property
    def ledger(self) -> dict[str, Any]:
        return read_ledger(self.checkpoint)

    def lineage(self, keep_optimizer: bool) -> dict[str, Any]:
        """Where a run that begins here comes from, back to the first, as its record keeps it."""
        return {
            "init_from": self.init_from,
            "run": self.config["name"],
            "step": self.step,
            "keep_optimizer": keep_optimizer,
            "lineage": self.ledger.get("lineage"),
        }


@dataclass(frozen=True)
class HfBase:
    """The Hugging Face folder that a run begins from; its weights fit its config.json."""

    init_from: str  # as it was given
    folder: Path
    model_type: str
    model: ModelConfig

    def lineage(self, keep_optimizer: bool) -> dict[str, Any]:
        """Where a run that begins here comes from. `train.start` adds the fingerprint, for which all is read."""
        return {
            "init_from": self.init_from,
            "kind": "hf",
            "model_type": self.model_type,
            "keep_optimizer": keep_optimizer,
            "lineage": None,
        }


def find_base(init_from: str | os.PathLike) -> Base | HfBase:
    """What `adaptation.init_from` means.

    Raises InputError where there is nothing to begin from, and for a run that trained adapters alone.
    """
    base = _find_base(init_from)
    if isinstance(base, Base) and base.config.get("adaptation", {}).get("lora") is not None:
        raise InputError(
            f"{base.init_from!r} trained adapters alone (adaptation.lora), which are no model without the one that it "
            "began from; export it with --format hf --merge, and begin from that folder"
        )
    return base


def _find_base(init_from: str | os.PathLike) -> Base | HfBase:
    given = str(init_from)
    if not given:
        raise InputError(f"got an empty path, expected {_EXPECTED}")
    path = Path(os.path.abspath(os.path.expanduser(given)))
    if path.parent.name in _PLACES and (run := _run_at(path.parents[1], given)) is not None:
        steps = step_folders(path.parent)
        if path.name in map(str, steps):
            return Base(given, run, int(path.name), undamaged(run.path / path.parent.name / path.name))
        raise InputError(f"{given!r} is no whole checkpoint; there are: {', '.join(map(str, steps)) or 'none'}")
    if not os.path.exists(path):
        parent = next(p for p in path.parents if os.path.exists(p))
        near = difflib.get_close_matches(path.name, os.listdir(parent), 1) if parent == path.parent else []
        hint = f"; did you mean {str(Path(given).with_name(near[0]))!r}?" if near else ""
        raise InputError(f"{given!r} does not exist{hint} (paths are relative to the working folder)")
    if (run := _run_at(path, given)) is not None:
        return Base(given, run, *find_checkpoint(run))
    if path.name == "gold" and (run := _run_at(path.parent, given)) is not None:
        return Base(given, run, *find_checkpoint(run, "gold", option=f"{given}:"))
    if any((path / name).is_file() for name in (HF_CONFIG, INDEX)) or any(path.glob("*.safetensors")):
        return _hf_base(_as_given(path, given), given)
    raise InputError(f"{given!r} holds no run and is no checkpoint of one; expected {_EXPECTED}")


_EXPECTED = "a run, RUN/checkpoints/STEP, RUN/gold, RUN/gold/STEP, RUN/kept/STEP or a Hugging Face folder"
_PLACES = ("checkpoints", "gold", "kept")


def _run_at(path: Path, given: str) -> RunDirectory | None:
    """The run in a folder, its path as relative as the one that was given; None where there is none."""
    directory = RunDirectory(_as_given(path, given))
    return directory if os.path.isfile(directory.resolved_config) else None


def _hf_base(folder: Path, given: str) -> HfBase:
    """Raises InputError with all that is wrong with a folder, so far as headers tell."""
    model, problems = None, []
    try:
        model = read_hf_config(folder)
    except InputError as error:
        problems += error.problems
    try:
        stored_tensors(folder) if model is None else checked_tensors(folder, model)
    except InputError as error:
        problems += error.problems
    if not (folder / DEFINITION_NAME).is_file():
        fix = "in transformers, AutoTokenizer.from_pretrained and then save_pretrained writes it"
        problems.append(f"{folder / DEFINITION_NAME}: is missing, the tokenizer as `tokenizers` reads it; {fix}")
    if problems or model is None:
        raise InputError(*problems)
    return HfBase(given, folder, hf_model_type(folder), model)


def _as_given(path: Path, given: str) -> Path:
    return path if os.path.isabs(os.path.expanduser(given)) else Path(os.path.relpath(path))


@dataclass(frozen=True)
class Heritage:
    """The `model` and `tokenizer` sections that a config takes from a run or a folder, and may not contradict.

    The vocabulary of a folder's model may be padded up.
    """

    run: str  # as messages name it
    sections: dict[str, Any]
    tokenizer: Tokenizer
    architecture: dict[str, Any]
    is_hf: bool = False

    def under(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The data of a config with what it leaves out taken over: a section, or of `model` single fields.

        A `model` with a preset is a whole one.
        """
        merged, model, its = self.sections | data, data.get("model"), self.sections["model"]
        if isinstance(model, dict) and its is not None and model.get("preset") is None:
            merged["model"] = its | model
        return merged

    def problems(self, model: ModelSection | None, tokenizer: TokenizerConfig) -> Iterator[tuple[str, str]]:
        """(path, message) for everything in which sections that a config gives differ from the run's."""
        fix = "leave the section out to take what it has"
        if tokenizer.kind not in (self.tokenizer.kind, self.sections["tokenizer"]["kind"]):
            yield "tokenizer.kind", f"got {tokenizer.kind}, but {self.run} has {self.tokenizer.kind}; {fix}"
        for key, its in (("vocab_size", self.tokenizer.vocab_size), ("name", self.tokenizer.name)):
            if getattr(tokenizer, key) not in (None, its):
                yield f"tokenizer.{key}", f"got {getattr(tokenizer, key)}, but {self.run} has {its}; {fix}"
        if tokenizer.path not in (None, self.sections["tokenizer"]["path"]):
            try:
                found = load_tokenizer(os.path.expanduser(tokenizer.path))
                if found.fingerprint != self.tokenizer.fingerprint:
                    yield "tokenizer.path", f"{tokenizer.path} holds another tokenizer than {self.run}; {fix}"
            except InputError as error:
                yield "tokenizer.path", str(error)
        if self.is_hf and model is not None and model.vocab_size is not None:
            rows = self.sections["model"]["num_ids"] or self.sections["model"]["vocab_size"]
            if model.vocab_size < rows:
                got = f"got {model.vocab_size}, but {self.run} has {rows} rows"
                yield "model.vocab_size", f"{got}; expected as many, or more to pad it up"
        if model is None or model_problems(model, self.tokenizer.vocab_size):
            return
        resolved = resolve_model(model, self.tokenizer.vocab_size)
        if self.is_hf:
            resolved = replace(resolved, vocab_size=resolved.num_ids or resolved.vocab_size, num_ids=None)
        if different := differences(resolved.architecture, self.architecture):
            only = f"or give no preset and only what may differ ({', '.join(HOW)})"
            yield "model", f"the architecture is not that of {self.run}: {different}; {fix}, {only}"


def heritage(init_from: str, continues: str | os.PathLike | None = None) -> Heritage:
    """What a config that begins from `init_from` takes from there.

    A run that goes on has its own copy of all of it: with `continues`, the directory of one that began from there,
    nothing else is looked at. Raises InputError where there is no checkpoint to begin from.
    """
    if continues is not None and RunDirectory(Path(continues)).resolved_config.exists():
        own = RunDirectory(Path(continues))
        resolved = own.resolved()
        if same_place(resolved.get("adaptation", {}).get("init_from"), init_from) and own.tokenizer.exists():
            its = read_json(own.path / "model.json")
            return _heritage_of(own, {name: resolved[name] for name in INHERITED}, its)
    base = find_base(init_from)
    if isinstance(base, HfBase):
        return _hf_heritage(base)
    resolved = base.config
    kind = resolved["tokenizer"]["kind"]
    path = None if kind == "byte" else str(base.directory.tokenizer)
    model, architecture = resolved["model"], base.architecture
    if model is not None and architecture != base.ledger["model"]:  # a phase changed it
        model = model | {"rope_theta": architecture["rope_theta"]}
    sections = {"model": model, "tokenizer": asdict(TokenizerConfig(kind, path=path))}
    return _heritage_of(base.directory, sections, architecture)


def _heritage_of(directory: RunDirectory, sections: dict[str, Any], architecture: dict[str, Any]) -> Heritage:
    tokenizer = load_tokenizer(directory.tokenizer)
    architecture.pop("lora", None)  # of a run that goes on: the section `model` says nothing of its adapters
    if (model := sections["model"]) is not None and model.get(
        "vocab_size"
    ) is not None:  # what is padding there, is here
        num_ids = architecture.get("num_ids", architecture["vocab_size"])
        sections = sections | {"model": model | {"num_ids": num_ids}}
    return Heritage(str(directory.path), sections, tokenizer, architecture)


def _hf_heritage(base: HfBase) -> Heritage:
    """All rows of the folder's embedding are ids, whether its tokenizer has them or not: its model predicts them."""
    tokenizer, num_ids = load_tokenizer(base.folder), base.model.vocab_size
    if num_ids < tokenizer.vocab_size:
        got = f"got {num_ids}, but its tokenizer.json has {tokenizer.vocab_size} ids"
        raise InputError(f"{base.folder / HF_CONFIG}: vocab_size: {got}; expected a row for each")
    sections = {
        "model": architecture_fields(base.model) | {"vocab_size": num_ids, "num_ids": num_ids},
        "tokenizer": asdict(TokenizerConfig("hf", path=str(base.folder))),
    }
    return Heritage(str(base.folder), sections, tokenizer, base.model.architecture, is_hf=True)


def model_from(data: dict[str, Any], continues: str | os.PathLike | None = None) -> dict[str, Any]:
    """The data of a config whose `model.from` is replaced by the fields that it stands for, its own fields on top.

    A run that goes on, in the directory `continues`, needs the folder no more: its own model is taken where the folder
    is gone, and has the same architecture. Raises InputError for a folder that will not do.
    """
    model = data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("from"), str):
        return data
    if model.get("preset") is not None:
        raise InputError(f"got {model['from']!r} beside the preset {model['preset']!r}; expected one of the two")
    folder = Path(os.path.expanduser(model["from"]))
    own = None if continues is None else RunDirectory(Path(continues))
    if own is not None and own.resolved_config.exists() and not folder.exists():
        its = own.resolved()["model"] or {}
    else:
        its = architecture_fields(read_hf_config(folder))
    given = {key: setting for key, setting in model.items() if key != "from"}
    if "n_head" in given and its.get("n_kv_head") == its.get("n_head"):
        given.setdefault("n_kv_head", given["n_head"])
    return data | {"model": its | given}


def base_lineage(config: Config) -> dict[str, Any] | None:
    """The lineage of a run that begins with this config, None where it begins from its seed."""
    section = config.adaptation
    return None if section.init_from is None else find_base(section.init_from).lineage(section.keep_optimizer)


def same_place(one: str | None, other: str | None) -> bool:
    """Whether two values of `init_from` name one place."""
    if one is None or other is None:
        return one is other
    return os.path.abspath(os.path.expanduser(one)) == os.path.abspath(os.path.expanduser(other))


def differences(ours: Mapping[str, Any], its: Mapping[str, Any]) -> str:
    """`n_layer 2 (there 4), d_ff 64 (there 128)`, empty where two architectures are equal."""
    keys = [key for key in {**its, **ours} if ours.get(key) != its.get(key)]
    return ", ".join(f"{key} {ours.get(key)} (there {its.get(key)})" for key in keys)


def with_replay(phases: Sequence[Phase], replay: Mapping[str, float]) -> tuple[Phase, ...]:
    """The phases, each with the replayed sources that its mixture does not name at their shares of the whole.

    What the mixture names keeps its proportions in the rest. To do it twice changes nothing more.
    """
    mixed = []
    for phase in phases:
        shares = {name: share for name, share in replay.items() if name not in phase.mixture}
        rest, total = 1 - math.fsum(shares.values()), math.fsum(phase.mixture.values())
        own = {name: weight / total * rest for name, weight in phase.mixture.items()}
        mixed.append(replace(phase, mixture={**own, **shares}) if shares else phase)
    return tuple(mixed)
