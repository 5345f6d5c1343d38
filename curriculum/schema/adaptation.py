"""Begin a run from another run's checkpoint or a Hugging Face folder, and keep what that model knew by replay.

Nothing here imports jax, as a plan needs this module too.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from curriculum.data.chat import ChatConfig, Template
from curriculum.data.tokenizers.hf_files import DEFINITION_NAME
from curriculum.errors import InputError, no_such_path, shown
from curriculum.find_checkpoint import architecture_at, checkpoint_steps, find_checkpoint, read_ledger, undamaged
from curriculum.model.formats.hf import checked_tensors
from curriculum.model.formats.hf_config import HF_CONFIG, hf_model_type, read_hf_config
from curriculum.model.formats.hf_weights import INDEX, stored_tensors, weights_metadata
from curriculum.model.presets import LoraConfig, ModelConfig, resolve_model
from curriculum.parsing.typed import Limits
from curriculum.record.queries import base_directory
from curriculum.run import run_near
from curriculum.run_directory import RunDirectory, step_folders
from phases.clocks import percentage
from phases.schedule import Phase, Schedule, segments_from_json

if TYPE_CHECKING:
    from curriculum.config import Config


@dataclass(frozen=True)
class AdaptationSection:
    """Begin from another run or a pretrained model, and keep what it knew by replay."""

    init_from: str | None = None
    """A run: its gold checkpoint, else its latest; RUN/gold; RUN/{checkpoints,gold,kept}/N; a Hugging Face folder."""
    keep_optimizer: bool = False
    """Take over the optimizer's state as well as the parameters; the step is 0 either way."""
    replay: dict[str, Annotated[float, Limits(gt=0, lt=1)]] = field(default_factory=dict)
    """Share of each source, between 0 and 1 or such as `5%`, mixed into each phase whose mixture does not name it."""
    lora: LoraConfig | None = None
    """Train adapters only, such as `{rank: 16, alpha: 32, targets: [query, value]}`; null: all of the model."""


def resolved_model(config: Config, vocab_size: int) -> ModelConfig:
    """The model that a config trains, adapters included, for a tokenizer of `vocab_size` ids.

    With `train.deterministic` it is not cuDNN's attention, whose backward pass with XLA's flag for deterministic
    kernels ended each run on an H200 (docs/gpu.md). Raises InputError as `resolve_model` does.
    """
    model = replace(resolve_model(config.model, vocab_size), lora=config.adaptation.lora)
    if config.train.deterministic and model.attention == "auto":
        model = replace(model, attention="deterministic")
    return model


@dataclass(frozen=True)
class Base:
    """The checkpoint that a run begins from."""

    init_from: str  # as it was given
    directory: RunDirectory
    step: int
    checkpoint: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        return self.directory.resolved()

    @property
    def architecture(self) -> dict[str, Any]:
        return architecture_at(self.ledger, self.step)

    @cached_property
    def ledger(self) -> dict[str, Any]:
        return read_ledger(self.checkpoint)

    @property
    def started_at(self) -> str:
        """When the base run began, which tells it from one that was trained in its place."""
        return self.ledger["history"]["started_at"]

    def lineage(self, keep_optimizer: bool) -> dict[str, Any]:
        """The lineage of a run that begins here, back to its first ancestor, as its record keeps it."""
        return lineage_at(self.init_from, self.config, self.ledger, self.step, keep_optimizer)

    @property
    def past_runs(self) -> list[PastRun]:
        """The runs in which the checkpoint's parameters were trained, its own first."""
        streams = {name: of["stream"] for name, of in self.ledger["sources"].items() if of["tokens_drawn"]}
        before = past_runs(self.ledger["lineage"], self.directory.path)
        return [PastRun(self.init_from, self.directory, streams), *before]

    @property
    def chat(self) -> Template | None:
        """`chat_of` the checkpoint."""
        return chat_of(self.config, self.ledger, self.step)


@dataclass(frozen=True)
class HfBase:
    """The Hugging Face folder that a run begins from; its weights fit its config.json.

    exported_from: the lineage of a run that began from what `export` made the folder of; None if the weights are not
    those that it wrote.
    """

    init_from: str  # as it was given
    folder: Path
    model_type: str
    model: ModelConfig
    exported_from: dict[str, Any] | None = None

    def lineage(self, keep_optimizer: bool) -> dict[str, Any]:
        """The lineage of a run that begins here; `start_of` adds the fingerprint, for which it reads all weights."""
        return {
            "init_from": self.init_from,
            "kind": "hf",
            "model_type": self.model_type,
            "keep_optimizer": keep_optimizer,
            **{key: value for key, value in (self.exported_from or {}).items() if key in ("mixture", "chat")},
            "lineage": self.exported_from,
        }

    @property
    def past_runs(self) -> list[PastRun]:
        """The runs in which the parameters were trained, the latest first, as far as the folder tells."""
        return past_runs(self.exported_from, self.folder)

    @property
    def chat(self) -> Template | None:
        """The template of the conversations that they were trained on in these runs; None: of none."""
        chat = (self.exported_from or {}).get("chat")
        return None if chat is None else Template.from_json(chat)


def lineage_at(
    init_from: str, resolved: Mapping[str, Any], ledger: Mapping[str, Any], step: int, keep_optimizer: bool = False
) -> dict[str, Any]:
    """The lineage of a run that begins with a run's parameters after `step` updates.

    `init_from`: that run, as it is given. `resolved`: its config. `ledger`: of any of its checkpoints that reaches that
    step. `mixture`: the shares of its sources in the last update before; None if there was none.
    """
    segments, last = segments_from_json(ledger["segments"]), step - 1
    mixtures = (segment.mixture_at(last) for segment in segments if segment.start <= last < segment.end)
    chat = chat_of(resolved, ledger, step)
    return {
        "init_from": init_from,
        "run": resolved["name"],
        "started_at": ledger["history"]["started_at"],
        "step": step,
        "mixture": next(mixtures, None),
        "keep_optimizer": keep_optimizer,
        **({} if chat is None else {"chat": chat.to_json()}),
        "lineage": ledger["lineage"],
    }


@dataclass(frozen=True)
class PastRun:
    """A run in which a model was trained before, and what it had read by then.

    name: its directory, as it was given. streams: the `stream` in `Corpus.details` of each source that it had read.
    Both `directory` and `streams` are None if nothing tells: the run is gone, or another one is in its place.
    """

    name: str
    directory: RunDirectory | None
    streams: dict[str, str] | None


def past_runs(lineage: Mapping[str, Any] | None, near: Path) -> list[PastRun]:
    """The runs of the lineage of a run or a folder at `near`, the latest first.

    Nothing tells what a Hugging Face folder was trained on: it is none.
    """
    found = []
    while lineage is not None:
        if lineage.get("kind") != "hf":
            found.append(_past_run(lineage, near))
        lineage = lineage["lineage"]
    return found


def _past_run(lineage: Mapping[str, Any], near: Path) -> PastRun:
    given, step = base_directory(lineage), lineage["step"]
    run = run_near(given, near)
    with suppress(InputError, KeyError, TypeError, ValueError):  # of one that is damaged nothing is known
        there = {} if run is None else {later: place for place in run.places for later in checkpoint_steps(place)}
        for later in sorted(there):  # the ledger of any step from there on tells what was read until then
            ledger = read_ledger(there[later] / str(later)) if later >= step else None
            if ledger is not None and ledger["history"]["started_at"] == lineage.get("started_at"):
                return PastRun(given, run, _streams_read(ledger, step))
    return PastRun(given, None, None)


def _streams_read(ledger: Mapping[str, Any], step: int) -> dict[str, str]:
    """By source, the `stream` of what the first `step` updates of a run read of it."""
    cursors = Schedule(segments_from_json(ledger["segments"])).cursors_at(step)
    return {name: of["stream"] for name, of in ledger["sources"].items() if cursors.get(name)}


def chat_of(resolved: Mapping[str, Any], ledger: Mapping[str, Any], step: int) -> Template | None:
    """The template of the conversations that a run's parameters after `step` updates were trained on; None: of none.

    If the run itself read none, that of those that the runs read from which it began. A source of format completion
    does not count: nothing tells whether its rows are conversations. The ledger of older code says nothing of special
    tokens: whatever its template spelled was text.
    """
    read = {name for segment in ledger["segments"] if segment["start"] < step for name in segment["mixture"]}
    if any(resolved["sources"].get(name, {}).get("format") == "messages" for name in read):
        return Template(ChatConfig(**resolved["chat"]), tuple(ledger.get("chat_special_tokens", ())))
    inherited = (ledger["lineage"] or {}).get("chat")
    return None if inherited is None else Template.from_json(inherited)


def find_base(init_from: str | os.PathLike, part: str | tuple[str, ...] = "ledger/") -> Base | HfBase:
    """The checkpoint or folder that `adaptation.init_from` names. Of a checkpoint `part` is verified, as by `damage`.

    Raises InputError if there is nothing to begin from, and for a run that trained adapters alone.
    """
    base = _find_base(init_from, part)
    if isinstance(base, Base) and base.config["adaptation"]["lora"] is not None:
        raise InputError(
            f"{base.init_from!r} trained adapters only (adaptation.lora), which need the model that it began from; "
            "export it with --format hf --merge, and begin from that folder"
        )
    return base


def _find_base(init_from: str | os.PathLike, part: str | tuple[str, ...]) -> Base | HfBase:
    given = str(init_from)
    if not given:
        raise InputError(f"got an empty path, expected {_EXPECTED}")
    path = Path(os.path.abspath(os.path.expanduser(given)))
    if path.parent.name in _PLACES and (run := _run_at(path.parents[1], given)) is not None:
        steps = step_folders(path.parent)
        if path.name in map(str, steps):
            return Base(given, run, int(path.name), undamaged(run.path / path.parent.name / path.name, part=part))
        raise InputError(f"{given!r} is not a checkpoint of the run; available: {', '.join(map(str, steps)) or 'none'}")
    if not os.path.exists(path):
        message = f"{given!r} {no_such_path(Path(os.path.expanduser(given)))}"
        if re.fullmatch(r"[\w.-]+/[\w.-]+", given) and not path.parent.exists():  # such as a hub's OWNER/NAME
            message += f"; if it is a model of the hub, download it first: hf download {given} --local-dir DIR"
        raise InputError(message)
    if (run := _run_at(path, given)) is not None:
        return Base(given, run, *find_checkpoint(run, part=part))
    if path.name == "gold" and (run := _run_at(path.parent, given)) is not None:
        return Base(given, run, *find_checkpoint(run, "gold", option=f"{given}:", part=part))
    if (path / "model.json").is_file() and not (path / HF_CONFIG).is_file():
        raise InputError(
            f"{given!r} is an export with --format safetensors, which is not read; export with --format hf"
        )
    if (path / "adapter_config.json").is_file() and not (path / HF_CONFIG).is_file():
        raise InputError(
            f"{given!r} holds adapters alone, which are not read; export the run with --merge, and begin from "
            "that folder"
        )
    if any((path / name).is_file() for name in (HF_CONFIG, INDEX)) or any(path.glob("*.safetensors")):
        return _hf_base(_as_given(path, given), given)
    if any(path.glob("*.gguf")):
        raise InputError(f"{given!r} holds a model for llama.cpp, which is not read; export the run with --format hf")
    raise InputError(f"{given!r} is neither a run nor a checkpoint of one; expected {_EXPECTED}")


LINEAGE = "curriculum.lineage"  # in the metadata of exported weights, which other programs do not write again
_EXPECTED = "a run, RUN/checkpoints/STEP, RUN/gold, RUN/gold/STEP, RUN/kept/STEP or a Hugging Face folder"
_PLACES = ("checkpoints", "gold", "kept")


def _run_at(path: Path, given: str) -> RunDirectory | None:
    """The run in a folder, None if there is none. Its path is relative if `given` is."""
    directory = RunDirectory(_as_given(path, given))
    return directory if directory.has_config else None


def _hf_base(folder: Path, given: str) -> HfBase:
    """The base in a folder. Raises InputError with all its problems that the config and the weights' headers show."""
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
        fix = "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes it"
        problems.append(f"{folder / DEFINITION_NAME}: is missing (the tokenizer in the format of `tokenizers`); {fix}")
    if problems:
        raise InputError(*problems)
    return HfBase(given, folder, hf_model_type(folder), model, _noted_lineage(weights_metadata(folder)))


def _noted_lineage(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """The lineage in the metadata of weights, which anybody may have written; None if not in the form of `export`."""
    try:
        noted = lineage = json.loads(metadata.get(LINEAGE, "null"))
        while lineage is not None:
            texts = [lineage["init_from"], lineage["model_type" if lineage.get("kind") == "hf" else "run"]]
            if lineage.get("kind") != "hf":
                datetime.fromisoformat(lineage["started_at"])
                if type(lineage["step"]) is not int or lineage["step"] < 0:
                    return None
            if not all(isinstance(text, str) and text.isprintable() for text in texts):
                return None
            if "chat" in lineage:
                Template.from_json(lineage["chat"])
            if (mixture := lineage.get("mixture")) is not None and not all(
                0 <= share <= 1 for share in mixture.values()
            ):
                return None
            lineage = lineage["lineage"]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None
    return noted


def _as_given(path: Path, given: str) -> Path:
    return path if os.path.isabs(os.path.expanduser(given)) else Path(os.path.relpath(path))


def base_lineage(config: Config) -> dict[str, Any] | None:
    """The lineage of a run that begins with this config, None if it begins from its seed."""
    section = config.adaptation
    return None if section.init_from is None else find_base(section.init_from).lineage(section.keep_optimizer)


def same_place(one: str | None, other: str | None) -> bool:
    """Whether two values of `init_from` name the same path."""
    if one is None or other is None:
        return one is other
    return os.path.abspath(os.path.expanduser(one)) == os.path.abspath(os.path.expanduser(other))


def differences(ours: Mapping[str, Any], its: Mapping[str, Any]) -> str:
    """`n_layer 2 (there 4), d_ff 64 (there 128)`; empty if a model can take the parameters and compute the same.

    With rope `max_seq_len` may differ: no parameter depends on it.
    """
    keys = [key for key in {**its, **ours} if ours.get(key) != its.get(key)]
    passed_over = {"num_ids"} if "vocab_size" in keys else set()  # which follows from it
    if ours.get("pos_encoding") == its.get("pos_encoding") == "rope":
        passed_over |= {"max_seq_len"}
    told = [key for key in keys if key not in passed_over]
    return ", ".join(f"{key} {shown(ours.get(key))} (there {shown(its.get(key))})" for key in told)


def with_shares(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of a config, with replay shares such as `5%` turned into numbers."""
    section = data.get("adaptation")
    if not isinstance(section, dict) or not isinstance(section.get("replay"), dict):
        return dict(data)
    return {**data, "adaptation": {**section, "replay": {name: _share(s) for name, s in section["replay"].items()}}}


def _share(given: Any) -> Any:
    share = percentage(given) if isinstance(given, str) else None
    return given if share is None else float(share)


def with_replay(phases: Sequence[Phase], replay: Mapping[str, float]) -> tuple[Phase, ...]:
    """Add to each phase's mixture the replayed sources that it does not name, at their shares of the whole.

    The sources that it names keep their proportions in the rest. Applying it twice is the same as once.
    """
    mixed = []
    for phase in phases:
        shares = {name: share for name, share in replay.items() if name not in phase.mixture}
        rest, total = 1 - math.fsum(shares.values()), math.fsum(phase.mixture.values())
        own = {name: weight / total * rest for name, weight in phase.mixture.items()}
        mixed.append(replace(phase, mixture={**own, **shares}) if shares else phase)
    return tuple(mixed)
