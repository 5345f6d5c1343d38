"""What a config inherits from the run or the folder that it begins from, instead of giving it itself."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from curriculum.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer
from curriculum.errors import InputError
from curriculum.model.formats.hf_config import HF_CONFIG, architecture_fields, read_hf_config
from curriculum.model.presets import HOW, ModelSection, model_problems, resolve_model
from curriculum.run_directory import RunDirectory
from curriculum.schema.adaptation import HfBase, differences, find_base, same_place

INHERITED = ("model", "tokenizer")  # sections that a config may leave out if it begins from a run or folder
_FIX = "leave the section out to use the same"


@dataclass(frozen=True)
class Heritage:
    """The `model` and `tokenizer` sections that a config inherits from a run or a folder, and must not contradict.

    The config may pad the vocabulary of a folder's model, and with rope have another `max_seq_len`. `sections` has
    `chat` too if a run, or the one that a folder was exported from, was trained on conversations; the config may have
    another.
    """

    run: str  # as messages name it
    sections: dict[str, Any]
    tokenizer: Tokenizer
    architecture: dict[str, Any]
    is_hf: bool = False

    def under(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The data of a config with what it leaves out filled in: whole sections, fields of `model`, roles of `chat`.

        A `model` with a preset is complete and inherits nothing.
        """
        merged, model, its = self.sections | data, data.get("model"), self.sections["model"]
        if isinstance(model, dict) and its is not None and model.get("preset") is None:
            merged["model"] = its | model
        if isinstance(data.get("chat"), dict):
            merged["chat"] = self.sections.get("chat", {}) | data["chat"]
        return merged

    def problems(self, model: ModelSection | None, tokenizer: TokenizerConfig) -> Iterator[tuple[str, str]]:
        """(path, message) for each setting of a config's sections that contradicts the inherited ones."""
        yield from self._tokenizer_problems(tokenizer)
        if model is None:
            return
        if self.is_hf and model.vocab_size is not None:
            rows = self.sections["model"]["num_ids"] or self.sections["model"]["vocab_size"]
            if model.vocab_size < rows:
                got = f"got {model.vocab_size}, but {self.run} has {rows} rows"
                yield "model.vocab_size", f"{got}; expected as many, or more as padding"
        if model_problems(model, self.tokenizer.vocab_size):
            return  # which are told elsewhere
        resolved = resolve_model(model, self.tokenizer.vocab_size)
        if self.is_hf:
            resolved = replace(resolved, vocab_size=resolved.num_ids or resolved.vocab_size, num_ids=None)
        if different := differences(resolved.architecture, self.architecture):
            may = [*HOW, *(["max_seq_len"] if resolved.pos_encoding == "rope" else [])]
            may += ["vocab_size as padding"] if self.is_hf else []
            only = f"or give no preset and only what may differ ({', '.join(may)})"
            yield "model", f"the architecture is not that of {self.run}: {different}; {_FIX}, {only}"

    def _tokenizer_problems(self, tokenizer: TokenizerConfig) -> Iterator[tuple[str, str]]:
        if tokenizer.kind not in (self.tokenizer.kind, self.sections["tokenizer"]["kind"]):
            yield "tokenizer.kind", f"got {tokenizer.kind}, but {self.run} has {self.tokenizer.kind}; {_FIX}"
        for key, its in (("vocab_size", self.tokenizer.vocab_size), ("name", self.tokenizer.name)):
            if getattr(tokenizer, key) not in (None, its):
                yield f"tokenizer.{key}", f"got {getattr(tokenizer, key)}, but {self.run} has {its}; {_FIX}"
        if tokenizer.path in (None, self.sections["tokenizer"]["path"]):
            return
        try:
            found = load_tokenizer(os.path.expanduser(tokenizer.path))
        except InputError as error:
            yield "tokenizer.path", str(error)
            return
        if found.fingerprint != self.tokenizer.fingerprint:
            yield "tokenizer.path", f"{tokenizer.path} holds another tokenizer than {self.run}; {_FIX}"


def heritage(init_from: str, own: RunDirectory | None) -> Heritage:
    """What a config that begins from `init_from` inherits.

    `own` is the run that is resumed, if any. If that run began from `init_from` it has its own copy of everything, and
    nothing else is looked at. Raises InputError if there is nothing to begin from.
    """
    if own is not None:
        resolved = own.resolved()
        if same_place(resolved["adaptation"]["init_from"], init_from) and own.tokenizer.exists():
            sections = {name: resolved[name] for name in (*INHERITED, "chat")}
            # How the model computes is not what the config last said of it. A base with a model of its own has no such
            # section.
            inherited = resolved["derived"].get("inherited_model")
            if inherited is not None and sections["model"] is not None:
                sections["model"] = sections["model"] | {name: inherited.get(name) for name in HOW}
            return _heritage_of(own, sections, own.architecture())
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
    if base.chat is not None:
        sections["chat"] = asdict(base.chat.chat)
    return _heritage_of(base.directory, sections, architecture)


def run_begun_in(continues: str | os.PathLike | None) -> RunDirectory | None:
    """The run in the directory `continues`, None if none was begun there or no directory is given."""
    own = None if continues is None else RunDirectory(Path(continues))
    return own if own is not None and own.has_config else None


def _heritage_of(directory: RunDirectory, sections: dict[str, Any], architecture: dict[str, Any]) -> Heritage:
    tokenizer, model = load_tokenizer(directory.tokenizer), sections["model"]
    # A resumed run's architecture lists its adapters, which no `model` section does.
    architecture = {key: setting for key, setting in architecture.items() if key != "lora"}
    if model is not None and model.get("vocab_size") is not None:
        # Rows that only pad the vocabulary there only pad it here too.
        num_ids = architecture.get("num_ids", architecture["vocab_size"])
        sections = sections | {"model": model | {"num_ids": num_ids}}
    return Heritage(str(directory.path), sections, tokenizer, architecture)


def _hf_heritage(base: HfBase) -> Heritage:
    """What a folder gives. Every row of its embedding is an id, in its tokenizer or not, as the model predicts it."""
    tokenizer, num_ids = load_tokenizer(base.folder), base.model.vocab_size
    if num_ids < tokenizer.vocab_size:
        got = f"got {num_ids}, but its tokenizer.json has {tokenizer.vocab_size} ids"
        raise InputError(f"{base.folder / HF_CONFIG}: vocab_size: {got}; expected a row for each")
    sections = {
        "model": architecture_fields(base.model) | {"vocab_size": num_ids, "num_ids": num_ids},
        "tokenizer": asdict(TokenizerConfig("hf", path=str(base.folder))),
    }
    if base.chat is not None:
        sections["chat"] = asdict(base.chat.chat)
    return Heritage(str(base.folder), sections, tokenizer, base.model.architecture, is_hf=True)


def model_from(data: dict[str, Any], own: RunDirectory | None) -> dict[str, Any]:
    """The data of a config with `model.from` replaced by the fields of the folder that it names.

    The section's own fields override these. If the folder is gone, a resumed run, `own`, uses its own model section,
    which has the same architecture. Raises InputError if the folder cannot be used, or is given beside a preset.
    """
    model = data.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("from"), str):
        return data
    if model.get("preset") is not None:
        raise InputError(f"got {model['from']!r} beside the preset {model['preset']!r}; expected one of the two")
    folder = Path(os.path.expanduser(model["from"]))
    if own is not None and not folder.exists():
        its = {key: value for key, value in (own.resolved()["model"] or {}).items() if key not in HOW}
    else:
        try:
            its = architecture_fields(read_hf_config(folder))
        except InputError as error:
            way_on = f"; or move {folder} away: the run then goes on with the model that it has" if own else ""
            raise InputError(*(problem + way_on for problem in error.problems)) from None
    given = {key: setting for key, setting in model.items() if key != "from"}
    if "n_head" in given and its.get("n_kv_head") == its.get("n_head"):
        given.setdefault("n_kv_head", given["n_head"])
    return data | {"model": its | given}
