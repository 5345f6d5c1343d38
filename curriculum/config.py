"""The config: one YAML file, strictly read, every problem told with its place in the file."""

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from curriculum.data.chat import ChatConfig
from curriculum.data.packing import PackingConfig
from curriculum.data.sources import SourceConfig
from curriculum.data.tokenizers.tokenizer import TokenizerConfig
from curriculum.errors import InputError, no_such
from curriculum.model.presets import ModelSection
from curriculum.parsing.options import apply_options, options_of
from curriculum.parsing.typed import Limits, Problems, annotations, field_key, key_paths, read
from curriculum.parsing.variables import substitute, unused
from curriculum.parsing.yaml12 import Origin, read_yaml
from curriculum.run_directory import RunDirectory, telling_where_started
from curriculum.schema.adaptation import AdaptationSection, with_shares
from curriculum.schema.checks import CHECKS, PATH_CHECKS, TOKENIZER_PATH_CHECKS, TRAIN_CHECKS
from curriculum.schema.heritage import INHERITED, Heritage, heritage, model_from, run_begun_in
from curriculum.schema.misplaced import with_places
from curriculum.schema.sections import (
    AveragesSection,
    CheckpointSection,
    EvalSection,
    EvalSource,
    LoggingSection,
    MeshConfig,
    OptimSection,
    TrainSection,
)
from curriculum.schema.shapes import ROW_CHECKS, with_seq_len
from evalsets.evalset import PRIMARY
from phases.schedule import Phase

_ALL_REPLAYED = (  # of `phases`
    "missing, and everything given with --dataset-dir is replayed (adaptation.replay), which makes no phase; also give "
    "the text to adapt to, or phases"
)

_OF_THE_NAME = re.compile(r"\s*(name|variables)\b")  # an override that the run's name may depend on


@dataclass(frozen=True)
class Config:
    """One run: what to train on and when, what to watch, what model, how."""

    sources: dict[str, SourceConfig]
    phases: tuple[Phase, ...]
    evalsets: EvalSection
    train: TrainSection
    name: str = "run"
    """The run's name, and its folder in runs/."""
    seed: Annotated[int, Limits(ge=0, lt=2**31)] = 1337
    """Seed of the data order, the initial parameters and dropout."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    model: ModelSection | None = field(default_factory=lambda: ModelSection(preset="tiny"))
    """The transformer: a preset (tiny if the section is left out), with single fields to override it, or without a
    preset at least n_layer, n_head, d_model, d_ff and max_seq_len; null if `train(make_model=...)` brings another
    model. In a run begun from another run or a folder, single fields override what that has.
    """
    packing: PackingConfig = field(default_factory=PackingConfig)
    adaptation: AdaptationSection = field(default_factory=AdaptationSection)
    optim: OptimSection = field(default_factory=OptimSection)
    averages: AveragesSection = field(default_factory=AveragesSection)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    logging: LoggingSection = field(default_factory=LoggingSection)
    origin: Origin = field(default_factory=Origin, compare=False, repr=False)

    @property
    def eval_sources(self) -> dict[str, EvalSource]:
        """Every eval set by name, the primary one first, as `primary`."""
        return {PRIMARY: self.evalsets.primary, **self.evalsets.sets}

    @property
    def command_line(self) -> list[str]:
        """The options that changed the file, as a run remembers them: `--set train.steps=100`, phases by name."""
        return [self.origin.by_name.get(path, option) for path, option in self.origin.options.items()]

    @property
    def longest_seq_len(self) -> int:
        """Of train and of every phase; the sources are read, packed and counted in blocks of so many tokens."""
        return max([self.train.seq_len, *(phase.seq_len or 0 for phase in self.phases)])

    @property
    def eval_seq_len(self) -> int:
        return self.evalsets.seq_len or self.longest_seq_len

    def grad_accum_of(self, phase_name: str) -> int:
        """Micro-steps per update in a phase; those of train in one that is declared no more."""
        phase = next((phase for phase in self.phases if phase.name == phase_name), None)
        return self.train.grad_accum if phase is None or phase.grad_accum is None else phase.grad_accum

    def to_json(self) -> dict:
        """The config as plain JSON, every default filled in; `config_from_json` gives an equal config back."""
        return {f.name: _plain(getattr(self, f.name)) for f in sections()}

    def error(self, problems: Iterable[tuple[str, str]]) -> InputError:
        """Problems given as (path, message), each with its place in the file."""
        return InputError(*(self.origin.problem(path, message) for path, message in problems))


def load_config(
    path: str | os.PathLike,
    overrides: Iterable[str] = (),
    *,
    dataset_dirs: Iterable[str] = (),
    eval_dataset_dirs: Iterable[str] = (),
    init_from: str | os.PathLike | None = None,
    keep_optimizer: bool = False,
    remembered: Iterable[str] = (),
    continues: str | os.PathLike | None = None,
    check_paths: bool = True,
) -> Config:
    """Read and check a config file. `overrides` are `a.b=value`; the directories are `[NAME=]DIR`, or {NAME: DIR}.

    A file without phases gets one of the sources in `dataset_dirs`, in equal parts. `init_from` and `keep_optimizer`
    are those of the `adaptation` section. `remembered` are options as `Config.command_line` gives them, applied first;
    `continues` is the directory of the run that goes on, which needs no other run any more. Without `check_paths` the
    data need not be there. Raises InputError with every problem found: file:line:column: path: what, got, expected.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(
            f"load_config: got a {type(path).__name__}, expected the path of a file; build_config takes a mapping"
        )
    data, origin = read_yaml(path)
    options = options_of(overrides, dataset_dirs, eval_dataset_dirs, init_from, keep_optimizer)
    apply_options(options, data, origin, remembered)
    return build_config(data, origin, check_paths=check_paths, continues=continues)


def check_is_config(given: Any) -> None:
    """Raise InputError for what is no Config, or one changed by `replace` into what could not be read back."""
    if not isinstance(given, Config):
        got, call = f"a {type(given).__name__}", "load_config(PATH)"
        if isinstance(given, str | os.PathLike):
            got, call = repr(str(given)), f"load_config({str(given)!r})"
        elif isinstance(given, Mapping):
            call = "build_config({...})"
        raise InputError(f"config: got {got}, expected a Config, as {call} gives it")
    read_back = config_from_json(as_json := given.to_json(), "config")
    try:
        json.dumps(as_json)
    except TypeError as error:  # a number of numpy, or a Path
        raise InputError(f"config: {error}: give numbers and text of Python") from None
    if changed := [f.name for f in sections() if getattr(given, f.name) != getattr(read_back, f.name)]:
        got = {name: f"got a {type(getattr(given, name)).__name__}" for name in changed}
        as_made = "expected what load_config or build_config makes of it"
        raise InputError(*(f"config: {name}: {what}, {as_made}" for name, what in got.items()))


def run_name_of(path: str | os.PathLike, overrides: Iterable[str] = ()) -> str:
    """The name of the run of a config file with `overrides` as of `load_config`, without checking anything else."""
    data, origin = read_yaml(path)
    apply_options([("--set", value) for value in overrides if _OF_THE_NAME.match(value)], data, origin)
    name = substitute({key: data[key] for key in ("name", "variables") if key in data}, origin.numbers)[0].get("name")
    return name if isinstance(name, str) and name else Config.name


def config_from_json(data: Mapping, file: str | os.PathLike = "config.resolved.json") -> Config:
    """The config of `Config.to_json`, as a run directory keeps it in `file`; the data need not be there any more."""
    return build_config(dict(data), Origin(os.fspath(file)), check_paths=False, trains=False)


def changed_config(
    config: Config,
    overrides: Iterable[str] = (),
    *,
    dataset_dirs: Iterable[str] = (),
    eval_dataset_dirs: Iterable[str] = (),
    continues: str | os.PathLike | None = None,
    check_paths: bool = True,
) -> Config:
    """A config of no file with options as of `load_config`; it remembers those of its own.

    Without `check_paths` it is to be read, not trained, as `build_config` has it.
    """
    data, origin = config.to_json(), Origin(config.origin.file)
    apply_options(options_of(overrides, dataset_dirs, eval_dataset_dirs), data, origin)
    return build_config(data, origin, check_paths=check_paths, trains=check_paths, continues=continues)


def build_config(
    data: Mapping[str, Any],
    origin: Origin | None = None,
    *,
    check_paths: bool = True,
    trains: bool = True,
    continues: str | os.PathLike | None = None,
) -> Config:
    """A checked Config from data with the keys of the YAML, for library use.

    Paths, tuples and numpy's numbers become what YAML has for them. One that `trains` needs its optimizer, and a mesh
    that divides the rows of each phase; of a run that goes on training checks those to come. The rest as in
    `load_config`.
    """
    origin = origin or Origin()
    if not isinstance(data, Mapping):
        raise InputError(origin.problem("", f"got {type(data).__name__}, expected a mapping of sections"))
    data, problems = _plain_data(data, origin)
    not_substituted = {path for path, _ in problems}
    known = [f.name for f in sections()]
    problems += [(str(key), no_such("key", str(key), [*known, "variables"])) for key in data if key not in known]
    own = run_begun_in(continues)
    try:
        data = model_from(data, own)
    except InputError as error:
        problems += [("model.from", problem) for problem in error.problems]
        data = {key: section for key, section in data.items() if key != "model"}
    inherited = None
    if check_paths or not set(INHERITED) <= data.keys():
        inherited, wrong = _inherited(data, own)
        problems += wrong
        if wrong and inherited is None:  # what its sections leave out is its own
            data = {key: section for key, section in data.items() if key not in INHERITED}
    if inherited is not None:
        data = inherited.under(data)
    values, wrong = _read_sections(with_shares(with_seq_len(data)), origin)
    problems += [problem for problem in wrong if problem[0] not in not_substituted]
    if problems:
        paths = [path for section in sections() for path in key_paths(annotations(Config)[section.name], section.name)]
        problems = [(path, with_places(path, message, paths)) for path, message in problems]
    if inherited is not None and set(INHERITED) <= values.keys():
        problems += inherited.problems(values["model"], values["tokenizer"])
        values["tokenizer"] = TokenizerConfig(**inherited.sections["tokenizer"])
    checks = [*CHECKS, *(PATH_CHECKS if check_paths else [])]
    if trains:
        checks += TRAIN_CHECKS
    if trains and continues is None:
        checks += ROW_CHECKS
    if check_paths and not (own and "tokenizer" in values and own.keeps_tokenizer(_plain(values["tokenizer"]))):
        checks += TOKENIZER_PATH_CHECKS
    looked_at = {name for name, section in values.items() if section is not None}
    problems += [p for needs, check in checks if needs <= looked_at for p in check({**values, "origin": origin})]
    if problems:
        problems.sort(key=lambda problem: origin.sort_key(problem[0]))
        with telling_where_started(own):
            raise InputError(*dict.fromkeys(origin.problem(*problem) for problem in problems))
    if inherited is not None:
        origin = dataclasses.replace(origin, inherited_model=inherited.sections["model"])
    return Config(**values, origin=origin)


def _plain_data(data: Mapping[str, Any], origin: Origin) -> tuple[dict, Problems]:
    """(data as YAML has it, variables replaced; problems of variables). Raises InputError for what YAML has not."""
    problems: Problems = []
    data = _as_yaml(data, "", problems)
    if problems:
        raise InputError(*(origin.problem(*problem) for problem in problems))
    given = [path for path, option in origin.options.items() if option not in origin.remembered]
    replaced, problems = substitute(data, origin.numbers)
    return replaced, problems + unused(data, given)


def _as_yaml(given: Any, path: str, problems: Problems) -> Any:
    """A copy of `given` as YAML has it; what YAML has not is added to `problems`."""
    if given is None or type(given) in (str, bool, int, float):
        return given
    if isinstance(given, Mapping):
        keys = {
            str.__str__(key) if isinstance(key, str) else json.dumps(key, default=str): item
            for key, item in given.items()
        }
        return {key: _as_yaml(item, f"{path}.{key}" if path else key, problems) for key, item in keys.items()}
    if isinstance(given, list | tuple):
        return [_as_yaml(item, f"{path}[{i}]", problems) for i, item in enumerate(given)]
    if isinstance(given, str):
        return str.__str__(given)  # of an Enum's member its text, where str() gives its name
    if isinstance(given, os.PathLike):
        return os.fspath(given)
    if callable(item := getattr(given, "item", None)) and getattr(given, "shape", None) == ():
        return _as_yaml(item(), path, problems)
    expected = "expected a YAML value: text, a number, a list or a mapping"
    problems.append((path, f"got a {type(given).__name__}, {expected}"))
    return None


def _read_sections(data: Mapping[str, Any], origin: Origin) -> tuple[dict[str, Any], Problems]:
    """(the sections by name, those left out by their defaults; what is wrong with those that are not among them)."""
    values: dict[str, Any] = {}
    problems: Problems = []
    for section in sections():
        name = section.name
        if name in data:
            wrong: Problems = []
            value = read(annotations(Config)[name], data[name], name, wrong)
            problems += wrong
            if not wrong:
                values[name] = value
        elif section.default is not dataclasses.MISSING:
            values[name] = section.default
        elif section.default_factory is not dataclasses.MISSING:
            values[name] = section.default_factory()
        else:
            problems.append((name, _ALL_REPLAYED if name in origin.made_of else "missing; this section is needed"))
    return values, problems


def _inherited(data: dict, own: RunDirectory | None) -> tuple[Heritage | None, list[tuple[str, str]]]:
    """What the config takes from the run it begins from, if it does, and what is wrong with that run."""
    section = data.get("adaptation")
    init_from = section.get("init_from") if isinstance(section, dict) else None
    if not isinstance(init_from, str):
        return None, []
    try:
        found = heritage(init_from, own)
    except InputError as error:
        return None, [("adaptation.init_from", problem) for problem in error.problems]
    if found.is_hf and section.get("keep_optimizer") is True:
        message = f"got true, but {found.run} is a Hugging Face folder, which holds no optimizer state; leave it out"
        return found, [("adaptation.keep_optimizer", message)]
    return found, []


def sections() -> list[dataclasses.Field]:
    """The fields of Config that a file may have."""
    return [f for f in dataclasses.fields(Config) if f.name != "origin"]


def _plain(value):
    if dataclasses.is_dataclass(value):
        return {field_key(f.name): _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
