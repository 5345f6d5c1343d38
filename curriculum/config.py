"""The config: one YAML file, strictly read, every problem told with its place in the file."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import os
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter, ValidationError

from curriculum.data.documents import SourceConfig
from curriculum.data.split import parse_share
from curriculum.data.tokenizer import TokenizerConfig
from curriculum.errors import InputError
from curriculum.model.presets import ModelSection, model_problems, resolve_model
from curriculum.train.optimizer import OptimConfig
from curriculum.variables import substitute
from curriculum.yaml12 import Origin, read_override, read_yaml
from phases.lr import LrSchedule, check_rates
from phases.resolve import check_phases
from phases.schedule import Phase

PositiveInt = Annotated[int, Field(ge=1, le=10**9)]
_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class EvalSource:
    """Where an eval set's documents come from: exactly one of `held_out_of`, `path` and `hf`."""

    __pydantic_config__: ClassVar = _STRICT

    held_out_of: str | None = None
    """A source; the documents that its `held_out` keeps out of training."""
    path: str | None = None
    """File or directory of text, JSONL, parquet or arrow, or a prepared folder."""
    hf: str | None = None
    """Name of a data set on the hub (its train split)."""
    text_key: str = "text"
    """Field or column of the text in JSONL, parquet and arrow."""
    glob: str = "**/*"
    """Which files of a directory are read."""
    max_sequences: PositiveInt | None = None
    """Whole documents in hash order, up to this many windows; all of them by default."""
    every: PositiveInt | None = None
    """Evaluate less often than `evalsets.every`: a multiple of it. Boundaries, step 0 and the end always count."""


@dataclass(frozen=True)
class EvalSection:
    """The eval sets: the primary one is the same for the whole run, and any number of named ones watch beside it."""

    __pydantic_config__: ClassVar = _STRICT

    primary: EvalSource
    """The set whose loss is the run's validation loss."""
    every: PositiveInt = 100
    """Steps between evals; also at step 0, at every phase boundary and at the end."""
    seq_len: PositiveInt | None = None
    """Tokens of an eval window; by default train.seq_len."""
    sets: dict[str, EvalSource] = field(default_factory=dict)
    """Named eval sets."""


@dataclass(frozen=True)
class TrainSection:
    """How long and how wide."""

    __pydantic_config__: ClassVar = _STRICT

    steps: PositiveInt
    """Updates of the whole run."""
    batch_size: Annotated[int, Field(ge=1, le=2**20)] = 32
    """Sequences per update, over all micro-steps and devices."""
    grad_accum: PositiveInt = 1
    """Micro-steps per update: trades time for memory, changes no data."""
    seq_len: Annotated[int, Field(ge=2, le=2**24)] = 256
    """Tokens per sequence."""


@dataclass(frozen=True)
class OptimSection(OptimConfig, LrSchedule):
    """The optimizer and the global learning rate."""

    __pydantic_config__: ClassVar = _STRICT


@dataclass(frozen=True)
class CheckpointSection:
    """When to save, and how many checkpoints stay."""

    __pydantic_config__: ClassVar = _STRICT

    every: PositiveInt = 200
    """Steps between checkpoints; the last step is always saved."""
    keep: PositiveInt = 3
    """How many of the newest checkpoints are kept."""


@dataclass(frozen=True)
class LoggingSection:
    """What is written beside the record of events."""

    __pydantic_config__: ClassVar = _STRICT

    every: PositiveInt = 10
    """Steps between rows of metrics.jsonl."""
    tensorboard: bool = True
    """Write TensorBoard files into the run directory."""


@dataclass(frozen=True)
class Config:
    """One run: what to train on and when, what to watch, what model, how."""

    sources: dict[str, SourceConfig]
    phases: tuple[Phase, ...]
    evalsets: EvalSection
    train: TrainSection
    name: Annotated[str, Field(description="The run's name, and its folder below runs/.")] = "run"
    seed: Annotated[int, Field(ge=0, lt=2**31, description="Of the data order and of the first parameters.")] = 1337
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    model: ModelSection = field(default_factory=lambda: ModelSection(preset="tiny"))
    optim: OptimSection = field(default_factory=OptimSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    origin: Origin = field(default_factory=Origin, compare=False, repr=False)

    @property
    def eval_sources(self) -> dict[str, EvalSource]:
        """Every eval set by name, the primary one first, as `primary`."""
        return {PRIMARY: self.evalsets.primary, **self.evalsets.sets}

    @property
    def command_line(self) -> list[str]:
        """The options that changed the file, as a run remembers them: `--set train.steps=100`."""
        return list(self.origin.options.values())

    @property
    def eval_seq_len(self) -> int:
        return self.evalsets.seq_len or self.train.seq_len

    def to_json(self) -> dict:
        """The config as plain JSON, every default filled in; `config_from_json` gives an equal config back."""
        return {f.name: _plain(getattr(self, f.name)) for f in _sections()}

    def error(self, problems: Iterable[tuple[str, str]]) -> InputError:
        """Problems given as (path, message), each with its place in the file."""
        return InputError(*(self.origin.problem(path, message) for path, message in problems))


PRIMARY = "primary"


def load_config(
    path: str | os.PathLike,
    overrides: Iterable[str] = (),
    *,
    dataset_dirs: Iterable[str] = (),
    eval_dataset_dirs: Iterable[str] = (),
    remembered: Iterable[str] = (),
    check_paths: bool = True,
) -> Config:
    """Read and check a config file. `overrides` are `a.b=value`; the directories are `[NAME=]DIR`.

    `remembered` are options as `Config.command_line` gives them, applied first. Without `check_paths` the data need
    not be there. Raises InputError with every problem found: file:line:column: path: what, got, expected.
    """
    data, origin = read_yaml(path)
    options = [option.partition(" ")[::2] for option in remembered]
    options += [("--dataset-dir", value) for value in dataset_dirs]
    options += [("--eval-dataset-dir", value) for value in eval_dataset_dirs]
    options += [("--set", value) for value in overrides]
    for flag, value in options:
        if flag == "--set":
            read_override(data, origin, value)
            continue
        name, directory = _named_directory(flag, value)
        inside = _table(data, "sources") if flag == "--dataset-dir" else _table(_table(data, "evalsets"), "sets")
        inside[name] = {"path": directory}
        where = "sources" if flag == "--dataset-dir" else "evalsets.sets"
        origin.given_by(f"{where}.{name}", f"{flag} {name}={directory}")
    return build_config(data, origin, check_paths=check_paths)


def config_name(path: str | os.PathLike) -> str:
    """The name of the run in a config file, without checking anything else."""
    name = read_yaml(path)[0]
    name = name.get("name") if isinstance(name, dict) else None
    return name if isinstance(name, str) and name else Config.name


def config_from_json(data: Mapping) -> Config:
    """The config of `Config.to_json`, as a run directory keeps it; the data need not be there any more."""
    return build_config(dict(data), Origin("config.resolved.json"), check_paths=False)


def build_config(data: dict, origin: Origin | None = None, *, check_paths: bool = True) -> Config:
    """A checked Config from plain data (for library use: the same keys as the YAML)."""
    origin = origin or Origin()
    if not isinstance(data, dict):
        raise InputError(origin.problem("", f"got {type(data).__name__}, expected a mapping of sections"))
    data, problems = substitute(data)
    known = {f.name: f for f in _sections()}
    for key in data:
        if key not in known:
            problems.append((str(key), _no_such("key", str(key), known)))
    values: dict[str, Any] = {}
    for name, section in known.items():
        if name in data:
            try:
                values[name] = _adapter(name).validate_json(json.dumps(data[name]), strict=True)
            except ValidationError as error:
                problems += _translate(name, data[name], error)
        elif section.default is not dataclasses.MISSING:
            values[name] = section.default
        elif section.default_factory is not dataclasses.MISSING:
            values[name] = section.default_factory()
        else:
            problems.append((name, "missing; this section is needed"))
    checks = [*_CHECKS, *(_PATH_CHECKS if check_paths else [])]
    problems += [p for needs, check in checks if needs <= values.keys() for p in check(values)]
    if problems:
        raise InputError(*sorted({origin.problem(*p): None for p in problems}, key=origin.sort_key))
    return Config(**values, origin=origin)


def json_schema() -> dict:
    """The JSON schema of a config file, for editors."""
    adapters = [(f.name, "validation", _adapter(f.name)) for f in _sections()]
    schemas, definitions = TypeAdapter.json_schemas(adapters)
    for f in _sections():
        if isinstance(f.default, str | int):
            schemas[f.name, "validation"]["default"] = f.default
    sections = {t.__name__: t for t in _dataclasses_below(Config)}
    for title, schema in definitions["$defs"].items():
        for name, text in _meanings(sections[title]).items():
            schema["properties"][name]["description"] = text
    required = [
        f.name for f in _sections() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "curriculum config",
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": {
            "variables": {"type": "object", "description": "Values used elsewhere as $variables.NAME."},
            **{name: schema for (name, _), schema in schemas.items()},
        },
        **definitions,
    }


def _dataclasses_below(kind: Any) -> Iterable[type]:
    """Every dataclass that a type of the config is made of."""
    if dataclasses.is_dataclass(kind):
        yield kind
        for inner in typing.get_type_hints(kind, include_extras=True).values():
            yield from _dataclasses_below(inner)
    for inner in typing.get_args(kind):
        yield from _dataclasses_below(inner)


def _meanings(section: type) -> dict[str, str]:
    """The text below each field of a dataclass and of its bases. Read from the source, and only for the schema."""
    meanings: dict[str, str] = {}
    for base in section.__bases__:
        meanings |= _meanings(base) if dataclasses.is_dataclass(base) else {}
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0].body
    for statement, text in zip(body, body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            meanings[statement.target.id] = text.value.value
    return meanings


# ---------------------------------------------------------------- checks across sections

_SET_NAME = re.compile(r"[A-Za-z0-9_-]+")


def _check_name(v):
    if not _SET_NAME.fullmatch(v["name"]):
        yield "name", f"got {v['name']!r}, expected letters, digits, '_' and '-'"


def _check_sources(v):
    if not v["sources"]:
        yield "sources", "got none, expected at least one source"
    for name, source in v["sources"].items():
        path = f"sources.{name}"
        if not _SET_NAME.fullmatch(name):
            yield path, f"got the name {name!r}, expected letters, digits, '_' and '-'"
        if source.max_epochs is not None and not source.max_epochs > 0:
            yield f"{path}.max_epochs", f"got {source.max_epochs}, expected more than 0"


def _check_source_paths(v):
    for name, source in v["sources"].items():
        yield from _check_readable(f"sources.{name}.path", source.path)


def _check_eval_paths(v):
    for path, source in _eval_sources(v):
        yield from _check_readable(f"{path}.path", source.path)


def _check_tokenizer_path(v):
    yield from _check_readable("tokenizer.path", v["tokenizer"].path)


def _eval_sources(v):
    """(path in the config, eval set) of the primary set and of the named ones."""
    section = v["evalsets"]
    return [("evalsets.primary", section.primary)] + [(f"evalsets.sets.{n}", s) for n, s in section.sets.items()]


def _check_readable(path, location):
    if location is None:
        return
    where = Path(location).expanduser()
    try:
        exists = where.exists()
    except (OSError, ValueError) as error:
        yield path, f"{location!r} cannot be looked at: {error}"
        return
    if not exists:
        parent = next((p for p in where.parents if p.exists()), Path("."))
        listable = parent == where.parent and os.access(parent, os.R_OK | os.X_OK)
        near = difflib.get_close_matches(where.name, os.listdir(parent), 1) if listable else []
        hint = f"; did you mean {str(parent / near[0])!r}?" if near else ""
        yield path, f"{location!r} does not exist{hint} (paths are relative to the working folder)"
    elif not os.access(where, os.R_OK | (os.X_OK if where.is_dir() else 0)):
        yield path, f"{location!r} cannot be read; check its permissions"


def _check_schedule(v):
    yield from check_phases(v["phases"], list(v["sources"]))


def _check_evalsets(v):
    section = v["evalsets"]
    for name, source in section.sets.items():
        path = f"evalsets.sets.{name}"
        if not _SET_NAME.fullmatch(name):
            yield path, f"got the name {name!r}, expected letters, digits, '_' and '-'"
        elif name in (PRIMARY, "val", "duration_s") or name.endswith(("_bpb", "_sem")):
            yield path, f"the name {name!r} is taken by the record; expected another one"
        if source.every is not None and source.every % section.every:
            got = f"got {source.every}, expected a multiple of evalsets.every ({section.every})"
            yield f"{path}.every", got
    if section.primary.every is not None:
        yield "evalsets.primary.every", "the primary set is measured at every eval; use evalsets.every"
    for path, source in _eval_sources(v):
        given = [key for key in ("held_out_of", "path", "hf") if getattr(source, key) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            yield path, f"got {got}, expected exactly one of 'held_out_of', 'path' and 'hf'"
        if source.held_out_of is not None and (source.text_key, source.glob) != (EvalSource.text_key, EvalSource.glob):
            yield path, "text_key and glob are read with 'path' or 'hf' only; held-out text comes from its source"


def _check_held_out(v):
    for path, source in _eval_sources(v):
        if source.held_out_of is None:
            continue
        if source.held_out_of not in v["sources"]:
            yield f"{path}.held_out_of", _no_such("source", source.held_out_of, v["sources"])
            continue
        if parse_share(v["sources"][source.held_out_of].held_out) == 0:
            fix = f"give sources.{source.held_out_of} a 'held_out' share such as 1%"
            yield f"{path}.held_out_of", f"source {source.held_out_of} holds nothing out; {fix}"


def _check_train(v):
    train = v["train"]
    if train.batch_size % train.grad_accum:
        got = f"got {train.grad_accum}, expected a divisor of train.batch_size ({train.batch_size})"
        yield "train.grad_accum", got


def _check_optim(v):
    yield from ((f"optim.{key}", message) for key, message in check_rates(v["optim"]))
    yield from ((f"optim.{key}", message) for key, message in v["optim"].problems())


def _check_model(v):
    yield from ((f"model.{key}" if key else "model", message) for key, message in model_problems(v["model"], _vocab(v)))


def _vocab(v) -> int | None:
    """The tokenizer's vocabulary where the config alone tells it."""
    tokenizer = v["tokenizer"]
    return {"byte": 257, "bpe": tokenizer.vocab_size}.get(tokenizer.kind)


def _check_lengths(v):
    vocab_size = _vocab(v) or v["model"].vocab_size or 2**20
    if model_problems(v["model"], vocab_size):
        return
    longest = resolve_model(v["model"], vocab_size).max_seq_len
    for path, length in (("train.seq_len", v["train"].seq_len), ("evalsets.seq_len", v["evalsets"].seq_len)):
        if length is not None and length > longest:
            yield path, f"got {length}, expected at most the model's max_seq_len ({longest})"


_CHECKS = [
    ({"name"}, _check_name),
    ({"sources"}, _check_sources),
    ({"phases", "sources"}, _check_schedule),
    ({"evalsets"}, _check_evalsets),
    ({"evalsets", "sources"}, _check_held_out),
    ({"train"}, _check_train),
    ({"optim"}, _check_optim),
    ({"model", "tokenizer"}, _check_model),
    ({"model", "tokenizer", "train", "evalsets"}, _check_lengths),
]
_PATH_CHECKS = [
    ({"sources"}, _check_source_paths),
    ({"evalsets"}, _check_eval_paths),
    ({"tokenizer"}, _check_tokenizer_path),
]


# ---------------------------------------------------------------- from pydantic's errors to ours


def _sections() -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(Config) if f.name != "origin"]


def _adapter(section: str) -> TypeAdapter:
    return TypeAdapter(typing.get_type_hints(Config, include_extras=True)[section])


def _translate(section: str, data: Any, error: ValidationError) -> list[tuple[str, str]]:
    """One (path, message) a place: pydantic gives one error a union member, with the member's tag in its path."""
    grouped: dict[str, list[dict]] = {}
    for detail in error.errors(include_url=False):
        path, here, here_type = section, data, typing.get_type_hints(Config)[section]
        for part in detail["loc"]:
            inside = isinstance(here, dict) and part in here or isinstance(here, list) and isinstance(part, int)
            if not inside and detail["type"] not in ("missing", "missing_argument"):
                continue
            path += f"[{part}]" if isinstance(part, int) else f".{part}"
            here_type = _member_type(here_type, part)
            here = here[part] if inside else None
        detail["parent_type"] = here_type
        grouped.setdefault(path, []).append(detail)
    return [(path, _message(path, details)) for path, details in grouped.items()]


def _message(path: str, details: list[dict]) -> str:
    first = details[0]
    if first["type"] == "unexpected_keyword_argument":
        parent = first["parent_type"]
        keys = [f.name for f in dataclasses.fields(parent)] if dataclasses.is_dataclass(parent) else []
        return _no_such("key", path.rpartition(".")[2], keys)
    if first["type"] in ("missing", "missing_argument"):
        return "missing; this key is needed"
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    expected = " or ".join(dict.fromkeys(_expected(d) for d in details))
    return f"got {json.dumps(first['input'], default=str)[:80]}, expected {expected}"


def _expected(detail: dict) -> str:
    message = detail["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    context = detail.get("ctx", {})
    if detail["type"] == "literal_error":
        near = difflib.get_close_matches(str(detail["input"]), re.findall(r"'([^']+)'", context["expected"]), 1)
        return context["expected"] + (f" (did you mean {near[0]!r}?)" if near else "")
    if "ctx" in detail and detail["type"].startswith(("greater", "less")):
        sign = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
        return " and ".join(f"{sign[key]} {limit}" for key, limit in context.items())
    words = {"dictionary": "a mapping", "integer": "an integer", "string": "text", "number": "a number"}
    words |= {"array": "a list", "an object": "a mapping", "a boolean": "true or false", "boolean": "true or false"}
    return words.get(message, message)


def _member_type(parent, part):
    """The type a key or index leads to; the same dataclass for an unknown key, so that its keys can be listed."""
    options = typing.get_args(parent) if typing.get_origin(parent) in (typing.Union, types.UnionType) else (parent,)
    for option in options:
        option = typing.get_args(option)[0] if typing.get_origin(option) is Annotated else option
        if dataclasses.is_dataclass(option):
            return typing.get_type_hints(option).get(part, option)
        if typing.get_origin(option) is dict:
            return typing.get_args(option)[1]
        if typing.get_origin(option) is tuple:
            return typing.get_args(option)[0]
    return parent


def _no_such(what: str, name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"no such {what}{hint} ({what}s: {', '.join(sorted(known))})"


def _plain(value):
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _named_directory(flag: str, item: str) -> tuple[str, str]:
    name, equals, directory = item.partition("=")
    if not equals:
        name, directory = os.path.basename(os.path.abspath(item)), item
    if not name or not directory:
        raise InputError(f"{flag} {item}: expected DIR or NAME=DIR")
    return name, directory


def _table(data: dict, key: str) -> dict:
    """data[key] as a mapping to add to; a wrong kind is left for the validation to name."""
    if not isinstance(data, dict):
        return {}
    table = data.setdefault(key, {})
    return table if isinstance(table, dict) else {}
