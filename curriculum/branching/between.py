"""Check that a branch can train the steps between its checkpoint and its branch step again as its trunk did."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from curriculum.config import Config
from curriculum.errors import shown
from curriculum.run import Run
from curriculum.scheduling import training_settings
from phases.schedule import Schedule

Settings = Mapping[str, Any]  # by path, as in the changes of a `schedule_edit`; the path of a named eval set has True

_SETS, _PHASES = "evalsets.sets.", "phases."  # a ledger lists every one that there was
_MICRO_STEPS = "train.grad_accum"


def check_between(
    trunk: Run, config: Config, saved: Mapping[str, Any], schedule: Schedule, at: int, steps: list[int]
) -> None:
    """Raise InputError for each setting of the config that differs from what the trunk used from a checkpoint to `at`.

    `saved` is the checkpoint's ledger. The config's schedule is not compared, as `schedule`, the trunk's, holds up to
    `at`. `steps` are those of all the trunk's checkpoints.
    """
    step, now = saved["step"], _settings(config)
    stretches = list(_in_force(trunk, saved, at))
    found: dict[str, list[tuple[int, int, str, str]]] = {}
    for start, end, were in stretches:
        phases = {segment.phase for segment in schedule.segments if segment.start < end and start < segment.end}
        for path, got, was in [*_differing(were, now), *_other_micro_steps(were, now, config, phases)]:
            found.setdefault(path, []).append((start, end, got, was))
    problems, there = [], f"branch at the step of a checkpoint: {', '.join(map(str, steps))}"
    for path, told in found.items():
        start, end, got, was = told[0]
        fix = f", which was changed in between; {there}"
        if len(told) == len(stretches) and len({was for *_, was in told}) == 1:
            start, end, fix = step, at, f"; restore it, or {there}"
        as_trunk = f"but the branch must repeat steps {start} to {end} as its trunk trained them, with {was}"
        problems.append((path, f"got {got}, {as_trunk}{fix}"))
    if rows := _other_rows(trunk, config, step, at):
        problems.append(("logging.every", f"{rows}; restore it, or {there}"))
    if problems:
        raise config.error(problems)


def _settings(config: Config) -> dict[str, Any]:
    """By path, what an update depends on besides its batch and learning rate, and what evals and verdicts depend on."""
    return _mesh(config) | _flat(training_settings(config))


def _mesh(config: Config) -> dict[str, Any]:
    """The settings that no ledger keeps."""
    return {f"mesh.{key}": value for key, value in config.to_json()["mesh"].items()}


def _flat(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Settings by path, from settings by section as a ledger keeps them."""
    sets = {section: True for section in settings if section.startswith(_SETS)}
    return sets | {f"{section}.{key}": value for section, own in settings.items() for key, value in own.items()}


def _in_force(trunk: Run, saved: Mapping[str, Any], at: int) -> Iterator[tuple[int, int, Settings]]:
    """(start, end, settings) of each stretch from the ledger's step to `at`, by the settings that the trunk used."""
    start, settings = saved["step"], _mesh(trunk.config) | _flat(saved["settings"])
    edits = [
        (event["step"], {change["path"]: change["now"] for change in event["changes"]})
        for event in trunk.events
        if event["event"] == "schedule_edit" and event["kind"] == "config" and event["step"] >= start
    ]
    if trunk.branched_from is not None and trunk.branched_from["step"] > start:
        # What a branch changed at its branch step is all that no edit accounts for: the event of the branching leaves
        # out the settings of a set that it added.
        last = settings | {path: value for _, changed in edits for path, value in changed.items()}
        now = _settings(trunk.config)
        gone = dict.fromkeys(_sets(last) - _sets(now))
        left = gone | {path: value for path, value in now.items() if last.get(path) != value}
        edits = sorted([*edits, (trunk.branched_from["step"], left)], key=lambda edit: edit[0])
    for step, changed in edits:
        if step < at:
            if step > start:
                yield start, step, settings
            start, settings = step, settings | changed
    yield start, at, settings


def _sets(settings: Settings) -> set[str]:
    return {path for path, there in settings.items() if path.startswith(_SETS) and there is True}


def _differing(were: Settings, now: Settings) -> Iterator[tuple[str, str, str]]:
    """(path, got, was) of each setting that differs, except the micro-steps of phases."""
    for path in sorted(_sets(were) ^ _sets(now)):
        yield path, *(("a set", "none of that name") if path in now else ("no such set", "one"))
    for path, got in now.items():
        was = were.get(path, got)  # the settings of a set that was added later are not known
        if was == got or path.startswith(_PHASES):
            continue
        if isinstance(was, dict) and isinstance(got, dict):
            yield from (
                (f"{path}.{key}", shown(value), shown(was.get(key)))
                for key, value in got.items()
                if value != was.get(key)
            )
        else:
            yield path, shown(got), shown(was)


def _other_micro_steps(
    were: Settings, now: Settings, config: Config, phases: Collection[str]
) -> Iterator[tuple[str, str, str]]:
    """The same for these phases' micro-steps; none if train.grad_accum differs, which `_differing` reports."""
    if were[_MICRO_STEPS] != now[_MICRO_STEPS]:
        return
    for i, phase in enumerate(config.phases):
        got = config.grad_accum_of(phase.name)
        was = were.get(f"{_PHASES}{phase.name}.grad_accum") or were[_MICRO_STEPS]
        if phase.name in phases and was != got:
            yield f"phases[{i}].grad_accum", str(got), str(was)


def _other_rows(trunk: Run, config: Config, step: int, at: int) -> str | None:
    """What is wrong with `logging.every`, None if it gives the trunk's metrics rows, as no ledger keeps its value."""
    every, end = config.logging.every, trunk.plan["total_steps"]  # the last step always has a row
    due = [s for s in range(step + 1, at + 1) if s % every == 0 and s != end]
    rows = [row["step"] for row in trunk.metrics if step < row["step"] <= at and row["step"] != end]
    if rows == due:
        return None
    had = (
        f"rows at {', '.join(map(str, rows[:3]))}{', ...' if len(rows) > 3 else ''}" if rows else "no metrics row there"
    )
    return f"got {every}, but the branch must repeat steps {step} to {at} as its trunk trained them, with {had}"
