"""All parts of a run, built from its config before anything is written to its directory."""

import json
import os
import platform
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import xxhash
from jax.sharding import Mesh

from curriculum.config import Config
from curriculum.data.corpus import Corpus, load_corpus
from curriculum.data.tokenizers.tokenizer import Tokenizer
from curriculum.errors import InputError, shown
from curriculum.model.lora import frozen_of
from curriculum.model.model import Model, abstract_params, check_model
from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import transformer
from curriculum.plan_warnings import all_warnings, known_to_base
from curriculum.record.events import plain
from curriculum.scheduling import NO_PAST, Past
from curriculum.schema.adaptation import resolved_model
from curriculum.schema.checks import NO_ADAPTERS
from curriculum.schema.shapes import row_problems
from curriculum.train.bases import check_base, load_frozen
from curriculum.train.compiled import Compiled, micro_steps
from curriculum.train.course import Course
from curriculum.train.device import (
    cache_compiled,
    cache_folder,
    check_platform,
    check_settings,
    device_lines,
    tune_device,
)
from curriculum.train.mesh import abstract_on_mesh, introduce, make_mesh, row_shards
from curriculum.train.processes.together import check_same, count, first_then_all, from_first, share_folder
from curriculum.train.programs import SETTINGS
from curriculum.train.resuming.start import Start
from curriculum.train.samples import Samples
from curriculum.train.states import States
from curriculum.train.step import TrainState
from evalsets.suite import Suite
from phases.schedule import Schedule, segments_to_json

_ROOT = Path(__file__).parents[2]
# Packages of which all processes must have one version, as they must have the same of jax's SETTINGS.
_COMPARED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_NO_ROPE = "is not supported with make_model; leave it out"


@dataclass(frozen=True)
class Setup:
    """The parts of one run."""

    config: Config
    mesh: Mesh
    corpus: Corpus
    model: Model
    course: Course  # what is trained on, step by step
    states: States  # how a state begins, or is restored
    compiled: Compiled
    lineage: dict[str, Any] | None  # what this run began from, back to the first run; None: its seed
    device_lines: list[str]  # for the console
    store_dir: str  # as the caller gave it

    @property
    def from_scratch(self) -> bool:
        """Whether the run began with random parameters. Those of a custom model may be trained."""
        return self.lineage is None and self.config.model is not None

    def update_at(self, step: int) -> Callable[..., TrainState]:
        """Update `step`, compiled: (state, batch, *knobs) -> state. The state passed in is donated."""
        return self.compiled.updates[self.course.shape_at(step)]

    def suite_at(self, step: int) -> Suite:
        """The suite for the parameters after `step` updates, with the rope theta of the phase that trained them."""
        return self.compiled.suites[self.course.schedule.rope_theta_at(step)]

    def samples_at(self, step: int) -> Samples:
        """The samples for the parameters after `step` updates; only if `logging.generate_every` is set."""
        return self.compiled.samples[self.course.schedule.rope_theta_at(step)]

    def warnings(self, known: Collection[str] = ()) -> list[str]:
        """Warnings about the schedule as currently planned, and those about the data that are not in `known`."""
        schedule, corpus = self.course.schedule, self.corpus
        return [
            *schedule.warnings,
            *(warning for warning in corpus.warnings if warning not in known),
            *all_warnings(
                self.config,
                schedule,
                corpus.tokens_per_epoch,
                corpus.details,
                self.states.architecture,
                self.course.past.end,
            ),
        ]

    def make_ready(self, step: int, state: TrainState) -> TrainState:
        """The state as it is. Where programs cannot be compiled beside a run, all that it needs are made here."""
        if self.compiled.in_background:
            return state
        return self.compiled.make_ready(self.course.shapes_from(step), state)

    def close(self) -> None:
        """Stop making batches and programs in the background."""
        self.course.close()
        self.compiled.close()


def build(
    config: Config,
    store_dir: str | Path,
    tokenizer: Tokenizer | None = None,
    make_model: Callable[[int], Model] | None = None,
    start: Start | None = None,
    past: Past = NO_PAST,
    branched_from: Mapping[str, Any] | None = None,
    trained: int = 0,
) -> Setup:
    """Prepare the data that is not prepared yet, and build the other parts of a run.

    `tokenizer`: that of a run that continues. `make_model(vocab_size)` returns a custom model in place of the config's
    `model`, which becomes null. `start`: what the run begins from, by default its seed. `past`: the part of the
    schedule that the config does not decide. `branched_from`: what a branch remembers of its trunk. `trained`: the
    step that the run goes on from. Raises InputError, also if the processes of the run do not agree.
    """
    config = _with_model(config, make_model, continues=bool(trained))
    start = start or Start()
    check_settings()
    added_flags = tune_device(config.train.deterministic)
    check_platform()
    mesh = _mesh_of(config)
    if not trained:  # before the text is prepared
        _check_rows(config, mesh)
    corpus = first_then_all(lambda: load_corpus(config, store_dir, tokenizer))
    if start.base is not None:
        known = known_to_base(config, store_dir, corpus.tokenizer)
        corpus = replace(corpus, warnings=(*corpus.warnings, *known))
    not_kept = _keep_programs(store_dir)
    course = Course(config, corpus, mesh, past, branched_from)
    if trained:
        _check_rows(config, mesh, course.schedule.phases_after(trained))
    architecture, model = _model(config, corpus.tokenizer.vocab_size, make_model)
    if start.base is not None:
        check_base(start.base, config, model if start.frozen is None else transformer(replace(architecture, lora=None)))
    frozen, lineage = None, start.lineage
    if start.frozen is not None:
        like = abstract_on_mesh(mesh, frozen_of(abstract_params(model)))
        frozen, lineage = load_frozen(config, architecture, start.frozen, lineage, like)
    states = States(config, mesh, model, architecture, frozen, start.base, course.plan.sources)
    compiled = Compiled(states, corpus)
    check_same(lambda: _agreed(corpus, course.schedule, lineage))
    if count() > 1 and jax.default_backend() == "cpu":  # by gloo
        introduce(mesh)
    about_devices = device_lines(added_flags, None if architecture is None else architecture.compute_dtype)
    num_shapes = len(course.shapes_from(trained))
    if num_shapes and not compiled.in_background:
        updates = "1 update" if num_shapes == 1 else f"{num_shapes} updates"
        about_devices.append(f"  compiling  {updates} and what else is needed, before training")
    if not_kept is not None:
        about_devices.append(f"             compiled anew at each start: {not_kept}")
    return Setup(config, mesh, corpus, model, course, states, compiled, lineage, about_devices, str(store_dir))


def _keep_programs(store_dir: str | Path) -> str | None:
    """Keep compiled programs on the disk for later starts; the reason if that is not possible.

    Process 0 alone writes to the cache. One that finds nothing there compiles, and on GPUs it then waits for kernels
    that process 0, which found the program, does not choose with it. So all see the same folder, or none uses it.
    """
    programs = cache_folder(store_dir)
    if from_first(lambda: "://" in programs) or share_folder(Path(programs)):
        cache_compiled(store_dir)
        return None
    jax.config.update("jax_enable_compilation_cache", False)
    return f"process 0 cannot write to {programs}, or not all see it"


def _model(
    config: Config, vocab_size: int, make_model: Callable[[int], Model] | None
) -> tuple[ModelConfig | None, Model]:
    """(the architecture of the config's model, None for a custom one; the model, checked)."""
    if make_model is None:
        architecture = resolved_model(config, vocab_size)
        return architecture, transformer(architecture)
    model = make_model(vocab_size)
    for micro_step in micro_steps(config):
        check_model(model, vocab_size, *micro_step)
    _check_architecture(model)
    return None, model


def _with_model(config: Config, make_model: Callable[[int], Model] | None, continues: bool) -> Config:
    """The config with the section of the model trained, null for a custom one. Raises InputError if they conflict."""
    if make_model is None:
        if config.model is None:
            message = "got null and no other model; name a preset, or call train(make_model=...)"
            if continues:
                message = "got null: only a run with a custom model goes on so, from Python, with make_model=..."
            raise config.error([("model", message)])
        return config
    if config.adaptation.lora is not None:
        raise config.error([("adaptation.lora", NO_ADAPTERS)])
    if given := [f"phases[{i}].rope_theta" for i, p in enumerate(config.phases) if p.rope_theta is not None]:
        raise config.error((path, _NO_ROPE) for path in given)
    return replace(config, model=None)


def _check_architecture(model: Model) -> None:
    """Raise InputError if what a custom model says of its architecture cannot be kept, and compared, as JSON."""
    try:
        kept = plain(dict(model.architecture))
        if json.loads(json.dumps(kept)) != kept:
            raise ValueError("has keys that are not text")
    except (TypeError, ValueError) as error:
        raise InputError(f"make_model: architecture: {error}; expected a mapping of plain JSON") from None


def _mesh_of(config: Config) -> Mesh:
    try:
        return make_mesh(config.mesh)
    except InputError as error:
        raise config.error(("mesh", problem) for problem in error.problems) from None


def _check_rows(config: Config, mesh: Mesh, ahead: Collection[str] | None = None) -> None:
    """Raise InputError if the mesh does not divide the rows of a micro-step, in the phases `ahead` or in any."""
    if problems := list(row_problems(config.train, config.phases, row_shards(mesh), ahead)):
        raise config.error(problems)


def check_same_config(config: Config, **asked: Any) -> None:
    """Raise InputError in every process if one has another config than process 0, or `asked` for something else.

    To come before all that the processes do together: what that is, the config decides.
    """
    keys = {f"the config's {path}": shown(value) for path, value in _keys(config.to_json())}
    options = {f"--{name.replace('_', '-')}": shown(value) for name, value in asked.items()}
    check_same(lambda: keys | options)


def _keys(sections: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, value in sections.items():
        if isinstance(value, Mapping):
            yield from ((f"{section}.{key}", part) for key, part in value.items())
        elif isinstance(value, list):
            yield from ((f"{section}[{i}]", part) for i, part in enumerate(value))
        else:
            yield section, value


def _agreed(corpus: Corpus, schedule: Schedule, lineage: Mapping[str, Any] | None) -> dict[str, str]:
    """What all processes of a run must have in common, by name: versions and digests."""
    found = {
        "the tokenizer": corpus.tokenizer.fingerprint,
        "the training text": {name: details["stream"] for name, details in corpus.details.items()},
        "the eval sets": {name: evalset.content_hash for name, evalset in corpus.evalsets.items()},
        "the schedule": segments_to_json(schedule.segments),
        "what the run begins from": lineage,
    }
    texts = {name: json.dumps(value, sort_keys=True).encode() for name, value in found.items()}
    return _program(_ROOT) | {n: xxhash.xxh3_64_hexdigest(text) for n, text in texts.items()}


def _program(root: Path) -> dict[str, str]:
    """Versions, settings and a digest of the code: with different programs processes may wait forever."""
    return {
        "the version of Python": ".".join(platform.python_version_tuple()[:2]),
        **{f"the version of {package}": version(package) for package in _COMPARED},
        **{f"jax's setting {name}": str(getattr(jax.config, name)) for name in SETTINGS},
        "the code of curriculum": _code(root),
    }


def _code(root: Path) -> str:
    code = xxhash.xxh3_64()
    for path in sorted(path for name in ("curriculum", "evalsets", "phases") for path in (root / name).rglob("*.py")):
        code.update(path.read_bytes())
    return code.hexdigest()


def software() -> dict[str, str]:
    """What the bits of a run depend on besides its config, text and devices."""
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in _COMPARED},
        **{name: str(getattr(jax.config, name)) for name in SETTINGS},
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "code": _code(_ROOT),
    }
