"""What a config changes of what is already trained, and how to undo it."""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any

import yaml

from curriculum.config import Config
from curriculum.errors import shown
from curriculum.schema.adaptation import with_replay
from curriculum.train.resuming.ledger import Problem
from phases.clocks import clock_step, reached, read_clock, resolve_steps
from phases.schedule import NOT_DATA, Phase, Schedule, SourceSupply, segments_from_json

_DEFAULTS = {field.name: field.default for field in fields(Phase)}
# The name identifies a phase, the next five can be spelled in several ways, and micro-steps change no data.
_NOT_SHAPE = ("name", "until", "mixture", "ramp_steps", "ramp_shape", "lr", "grad_accum")
# Every other field of a phase, with its default: compared as it is, or as train's if it is None.
SHAPE = {name: default for name, default in _DEFAULTS.items() if name not in _NOT_SHAPE}


@dataclass(frozen=True)
class Contrast:
    """What a run's config declares now, beside what was declared up to `step` according to its ledger `saved`.

    `was` and `now` are declarations (`curriculum.scheduling.declaration`).
    """

    saved: Mapping[str, Any]
    was: Mapping[str, Any]
    now: Mapping[str, Any]
    step: int

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule that `was` resolved to."""
        return Schedule(segments_from_json(self.saved["segments"]))

    @cached_property
    def epochs(self) -> dict[str, int]:
        """Tokens per epoch by source, from the ledger."""
        return {name: source["tokens_per_epoch"] for name, source in self.saved["sources"].items()}

    @cached_property
    def old(self) -> dict[str, Mapping[str, Any]]:
        """The phases as they were declared, by name."""
        return phases_by_name(self.was)

    @cached_property
    def new(self) -> dict[str, Mapping[str, Any]]:
        """The phases as they are declared now, by name."""
        return phases_by_name(self.now)

    @cached_property
    def current(self) -> str | None:
        """The phase under way at `step`, at the run's end the last; None if `now` lets it end by then."""
        step, total_steps = self.step, self.schedule.total_steps
        for name, start, end in self.schedule.phase_bounds:
            if start < step and (step < end or end == total_steps) and not self._ends(name):
                return name
        return None

    @cached_property
    def over(self) -> dict[str, tuple[int, int]]:
        """Start and end of each phase that is over by `step`, as they were trained."""
        begun = ((name, start, end) for name, start, end in self.schedule.phase_bounds if start < self.step)
        return {name: (start, min(end, self.step)) for name, start, end in begun if name != self.current}

    @property
    def kept(self) -> list[str]:
        """Those of `over` that both declarations contain."""
        return [name for name in self.over if name in self.old and name in self.new]

    def declared_first(self, declared: Mapping[str, Any]) -> list[str]:
        """The phases declared before the one under way, or else up to the last one that is over."""
        names = [phase["name"] for phase in declared["phases"]]
        if self.current in names:
            return names[: names.index(self.current)]
        return names[: max((names.index(name) + 1 for name in self.over if name in names), default=0)]

    def settled_end(self, name: str) -> int | None:
        """The step at which a phase ends whatever its clock counts; None if its `until` is edited or not settled."""
        old, new = self.old.get(name), self.new.get(name)
        return self.saved["settled"].get(f"{name}.until") if old and new and old["until"] == new["until"] else None

    def _ends(self, name: str) -> bool:
        """Whether `now` lets a phase end by `step` with more of the run to follow."""
        phase, total_steps = self.new.get(name), self.now["train"]["steps"]
        if phase is None or total_steps <= self.step:
            return False
        if (end := self.settled_end(name)) is not None:
            return end <= self.step
        return self._passed(phase["until"])

    def _passed(self, until: int | str) -> bool:
        """Whether a clock is reached by `step`, given the run length that `now` declares."""
        supplies = {source: SourceSupply(self.epochs.get(source)) for source in self.now["sources"]}
        try:
            return reached(read_clock(until, supplies, self.now["train"]["steps"], True), self.schedule, self.step)
        except ValueError:  # reported when the config is resolved
            return False

    def declared_end(self, name: str) -> int | str | None:
        """The declared `until` of a phase that `now` lets end by `step`, if that `until` still lies ahead.

        None for the last phase too: it lasted to the end of the run, and others may follow it now.
        """
        bounds, until = self.schedule.phase_bounds, self.old[name]["until"]
        cut_short = any(end > self.step for phase, _, end in bounds[:-1] if phase == name)
        return until if cut_short and not self._passed(until) else None


def phases_by_name(declared: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {phase["name"]: phase for phase in declared["phases"]}


def field_of(declared: Mapping[str, Any], phase: Mapping[str, Any], key: str) -> Any:
    """A field of a phase as declared; train's if the phase has none of its own."""
    return declared["train"].get(key) if phase[key] is None else phase[key]


def draw_alike(was: Mapping[str, Any], now: Mapping[str, Any], name: str, settled: Mapping[str, int]) -> bool:
    """Whether two declarations agree on what the updates of a phase draw, however they spell it.

    If neither gives the phase a shape of its own, train's may differ. `settled`: the step counts that percentages of
    the run resolved to by the first declaration, as in `Curriculum.settled`.
    """
    old, new = (phases_by_name(declared).get(name) for declared in (was, now))
    if old is None or new is None:
        return False
    steps_then, steps_now = (declared["train"]["steps"] for declared in (was, now))
    ramp_steps = settled.get(f"{name}.ramp_steps", old["ramp_steps"])
    if new["ramp_steps"] == old["ramp_steps"]:  # an unchanged percentage stays as it was resolved
        new, steps_now = {**new, "ramp_steps": ramp_steps}, steps_then
    old = {**old, "ramp_steps": ramp_steps}
    own = [key for key in SHAPE if key not in NOT_DATA and (old[key], new[key]) != (None, None)]
    return _drawn(was, old, steps_then, own) == _drawn(now, new, steps_now, own)


def _drawn(declared: Mapping[str, Any], phase: Mapping[str, Any], total_steps: int, shape: Sequence[str]) -> list[Any]:
    """What a phase draws, replay included, in canonical form; `shape`: the fields of its shape that count."""
    (mixed,) = with_replay([Phase(phase["name"], "end", phase["mixture"])], declared["adaptation"]["replay"])
    drawn = _resolved({**phase, "mixture": mixed.mixture, "lr": None}, total_steps)
    return [drawn, *(field_of(declared, phase, key) for key in shape)]


def of_past(contrast: Contrast) -> Iterator[Problem]:
    """The ways in which the current declaration contradicts what was trained before the contrast's step."""
    trained, got = contrast.was["seed"], contrast.now["seed"]
    if got != trained:
        yield "seed", f"got {got}, but steps 0 to {contrast.step} were trained with {trained}"
    yield from _train_changed(contrast)
    yield from _order_changed(contrast)
    yield from _phases_changed(contrast)
    yield from _replay_changed(contrast)


def _train_changed(contrast: Contrast) -> Iterator[Problem]:
    for key in ("batch_size", "seq_len"):
        trained, got = (declared["train"][key] for declared in (contrast.was, contrast.now))
        of_train = [n for n in contrast.kept if contrast.old[n][key] is None and contrast.new[n][key] is None]
        if got != trained and of_train:
            start, end = contrast.over[of_train[0]][0], contrast.over[of_train[-1]][1]
            fix = f"leave it as it was, and set {key} on the phases still to come"
            yield f"train.{key}", f"got {got}, but steps {start} to {end} were trained with {trained}; {fix}"


def _order_changed(contrast: Contrast) -> Iterator[Problem]:
    stood, stand = (contrast.declared_first(declared) for declared in (contrast.was, contrast.now))
    for i, name in enumerate(stand):
        if name in contrast.over and name not in contrast.old:
            end = contrast.over[name][1]
            after = next((f", then {other} began" for other, at, _ in contrast.schedule.phase_bounds if at == end), "")
            yield "phases", f"got phase {name}, which lasted up to step {end}{after}: it cannot come back"
        elif name not in stood:
            got = f"new phase {name} comes before phases already trained up to step {contrast.step}; move it after them"
            yield f"phases[{i}].name", got
    kept = contrast.kept
    if [name for name in stood if name in kept] != [name for name in stand if name in kept]:
        got, trained = ", ".join(contrast.new), ", ".join(stood)
        yield "phases", f"got the order {got}, but the run has trained {trained} first, in this order"


def _phases_changed(contrast: Contrast) -> Iterator[Problem]:
    place = {name: i for i, name in enumerate(contrast.new)}
    for name, (start, end) in contrast.over.items():
        if name not in contrast.old:
            continue
        if name not in contrast.new:
            yield "phases", f"phase {name} is gone, but steps {start} to {end} were trained in it; put it back"
            continue
        for key in _fields_changed(contrast, name):
            got = shown(field_of(contrast.now, contrast.new[name], key))
            trained = shown(field_of(contrast.was, contrast.old[name], key))
            how = f"with {trained}"
            if key == "until":
                or_later = "" if contrast.declared_end(name) is None else f" or later, as {trained} does"
                how = f"in this phase: let it end at {end}{or_later}"
            yield f"phases[{place[name]}].{key}", f"got {got}, but steps {start} to {end} were trained {how}"


def _fields_changed(contrast: Contrast, name: str) -> Iterator[str]:
    """The fields in which a finished phase has changed; another spelling of the same value is no change.

    If neither declaration gives the phase a shape of its own, a changed shape is train's change.
    """
    old, new, (_, end) = contrast.old[name], contrast.new[name], contrast.over[name]
    steps_then, steps_now = (declared["train"]["steps"] for declared in (contrast.was, contrast.now))
    ends = {clock_step(new["until"], steps, contrast.schedule.segments) for steps in (steps_then, steps_now)}
    if old["until"] != new["until"] and end not in ends:
        yield "until"
    before, after = (_resolved(phase, steps_then) for phase in (old, new))
    # Without steps a ramp has no shape, so that of one that is added or taken away differs though nobody changed it.
    yield from (key for key in before if before[key] != after[key] and old[key] != new[key])
    for key in SHAPE:
        shape, shape_now = field_of(contrast.was, old, key), field_of(contrast.now, new, key)
        if shape != shape_now and (old[key], new[key]) != (None, None):
            yield key


def _replay_changed(contrast: Contrast) -> Iterator[Problem]:
    before, after = (declared["adaptation"]["replay"] for declared in (contrast.was, contrast.now))
    for source in {**before, **after}:
        share, trained = after.get(source), before.get(source)
        if share != trained and any(source not in contrast.old[name]["mixture"] for name in contrast.kept):
            got = f"got {shown(share)}, but steps 0 to {contrast.step} were trained with {shown(trained)}"
            yield (
                f"adaptation.replay.{source}",
                f"{got}; name the source in the mixtures of the phases still to come instead",
            )


def _resolved(phase: Mapping[str, Any], total_steps: int) -> dict[str, Any]:
    """The fields of a phase that can be spelled in several ways, except its end, in canonical form."""

    def steps(value):
        try:
            return resolve_steps(value, total_steps)
        except ValueError:  # reported when the config is resolved
            return value

    mixture, lr, ramp_steps = phase["mixture"], phase["lr"], steps(phase["ramp_steps"])
    total = math.fsum(mixture.values()) or 1.0
    return {
        "mixture": {name: round(weight / total, 12) for name, weight in mixture.items() if weight},
        "ramp_steps": ramp_steps,
        "ramp_shape": phase["ramp_shape"] if ramp_steps else None,
        "lr": lr and {**lr, **{key: steps(lr[key]) for key in ("rewarm_steps", "decay_steps")}},
    }


def how_to_fix(config: Config, contrast: Contrast, problems: Sequence[Problem]) -> list[str]:
    """What was trained against what the config says, as a diff of YAML, and what to put back."""
    over, step, bounds = contrast.over, contrast.step, contrast.schedule.phase_bounds
    ended = {n for n, _, end in bounds if n in over and (end > step or n == bounds[-1][0])}  # by the current config
    phases = [
        {**phase, "until": _end_to_put_back(contrast, phase["name"])} if phase["name"] in ended else phase
        for phase in contrast.was["phases"]
    ]
    was = {**contrast.was, "phases": phases}
    micro_steps = {phase.name: phase.grad_accum for phase in config.phases}

    def spelled_out(declared, phase):
        """With what it has from train, if that is changed and is not to be put back, and with its own micro-steps."""
        put_back = {path.removeprefix("train.") for path, _ in problems}
        changed = [key for key, value in contrast.was["train"].items() if contrast.now["train"][key] != value]
        shape = {key: field_of(declared, phase, key) for key in changed if key in phase and key not in put_back}
        own = micro_steps.get(phase["name"])
        return {**phase, **shape, **({} if own is None else {"grad_accum": own})}

    def as_yaml(declared):
        concerned = {*contrast.declared_first(declared), *over}
        if any(path == "phases" for path, _ in problems):  # the order changed, or a phase is gone
            concerned.add(contrast.current)
        of_train = [path.removeprefix("train.") for path, _ in problems if path.startswith("train.")]
        sections = {**declared, "train": {key: declared["train"][key] for key in of_train}}
        phases = [phase for phase in declared["phases"] if phase["name"] in concerned] or declared["phases"]
        sections["phases"] = [
            {key: v for key, v in spelled_out(declared, phase).items() if v != _DEFAULTS.get(key, MISSING)}
            for phase in phases
        ]
        named = {path.partition(".")[0].partition("[")[0] for path, _ in problems}
        return _yaml({key: section for key, section in sections.items() if key in named}).splitlines()

    now = " ".join([config.origin.file, *config.command_line])
    difference = difflib.unified_diff(as_yaml(was), as_yaml(contrast.now), "trained", now, n=1, lineterm="")
    told = ["what is already trained is fixed; the difference:", *difference, "put this back into the config:"]
    return [*told, *as_yaml(was)]


def _end_to_put_back(contrast: Contrast, name: str) -> int | str:
    """The `until` to put back for a phase that the config lets end by the contrast's step.

    That is the config's own if it fits what was trained, else the declared one if it lies ahead, else the contrast's
    step.
    """
    if "until" not in _fields_changed(contrast, name):
        return contrast.new[name]["until"]
    declared = contrast.declared_end(name)
    return contrast.step if declared is None else declared


def _yaml(sections: Mapping[str, Any]) -> str:
    """The YAML of each section by its key, with nested values on one line."""
    return "".join(
        yaml.safe_dump(
            {key: section},
            default_flow_style=None if isinstance(section, dict | list) else False,  # a lone scalar as in a file
            sort_keys=False,
            width=1000,
            allow_unicode=True,
        )
        for key, section in sections.items()
    )
