"""What a config changes of what is trained already, and how that is undone."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from curriculum.config import Config
from curriculum.train.ledger import Problem
from phases.clocks import clock_step, reached, read_clock, resolve_steps
from phases.schedule import Schedule, SourceSupply

SHAPE = ("seq_len", "batch_size", "rope_theta")  # of a declared phase, None where it has none of its own
Bounds = tuple[int, int]  # start and end of a phase


def of_past(
    was: Mapping[str, Any], now: Mapping[str, Any], schedule: Schedule, step: int, epochs: Mapping[str, int]
) -> Iterator[Problem]:
    """The ways in which the declaration `now` contradicts what `was`, the one before, trained before `step`.

    `epochs` are the tokens of one by source.
    """
    if now["seed"] != was["seed"]:
        yield "seed", f"got {now['seed']}, but steps 0 to {step} were trained with {was['seed']}"
    over, current = _phases_before(now, schedule, step, epochs)
    yield from _train_changed(was, now, over)
    yield from _order_changed(was, now, over, current, step)
    yield from _phases_changed(was, now, over, schedule)
    yield from _replay_changed(was, now, over, step)


def _train_changed(was: Mapping[str, Any], now: Mapping[str, Any], over: Mapping[str, Bounds]) -> Iterator[Problem]:
    """Of train's shape, where phases that are `over` have none of their own."""
    old, new = phases_by_name(was), phases_by_name(now)
    for key in ("batch_size", "seq_len"):
        got, trained = now["train"][key], was["train"][key]
        of_train = [n for n in over if n in old and n in new and old[n][key] is None and new[n][key] is None]
        if got != trained and of_train:
            start, end = over[of_train[0]][0], over[of_train[-1]][1]
            fix = f"let it be, and give what lies ahead a {key} of its own"
            yield f"train.{key}", f"got {got}, but steps {start} to {end} were trained with {trained}; {fix}"


def _order_changed(
    was: Mapping[str, Any], now: Mapping[str, Any], over: Mapping[str, Bounds], current: str | None, step: int
) -> Iterator[Problem]:
    """Phases that are new among those trained, and another order of these."""
    old, new = phases_by_name(was), phases_by_name(now)
    stood, stand = (_ahead(list(declared), over, current) for declared in (old, new))
    for i, name in enumerate(stand):
        if name not in stood:
            got = f"got {name}, which stands before what was trained up to step {step}; let it follow"
            yield f"phases[{i}].name", got
    kept = [name for name in over if name in old and name in new]
    if [name for name in stood if name in kept] != [name for name in stand if name in kept]:
        yield "phases", f"got the order {', '.join(new)}, but {', '.join(stood)} were trained first, in this order"


def _phases_changed(
    was: Mapping[str, Any], now: Mapping[str, Any], over: Mapping[str, Bounds], schedule: Schedule
) -> Iterator[Problem]:
    """Phases that are `over` and gone by now, or other ones."""
    old, new = phases_by_name(was), phases_by_name(now)
    place = {name: i for i, name in enumerate(new)}
    for name, (start, end) in over.items():
        if name not in old:
            continue
        if name not in new:
            yield "phases", f"{name} is gone, but steps {start} to {end} were trained as it; put it back"
            continue
        changed = [*_fields_changed(old[name], new[name], was["train"]["steps"], now["train"]["steps"], end, schedule)]
        changed += _shape_changed(old[name], new[name], was["train"], now["train"])
        for key in changed:
            got, trained = (
                json.dumps(train.get(key) if phase[key] is None else phase[key])
                for phase, train in ((new[name], now["train"]), (old[name], was["train"]))
            )
            how = f"as it: let it end at {end}" if key == "until" else f"with {trained}"
            then = f"but steps {start} to {end} were trained {how}"
            yield f"phases[{place[name]}].{key}", f"got {got}, {then}"


def _replay_changed(
    was: Mapping[str, Any], now: Mapping[str, Any], over: Mapping[str, Bounds], step: int
) -> Iterator[Problem]:
    """Shares of replay that a phase has which is `over`."""
    old, new = phases_by_name(was), phases_by_name(now)
    before, after = was["adaptation"]["replay"], now["adaptation"]["replay"]
    kept = [name for name in over if name in old and name in new]
    for source in {**before, **after}:
        share, trained = after.get(source), before.get(source)
        if share != trained and any(source not in old[name]["mixture"] for name in kept):
            got = f"got {json.dumps(share)}, but steps 0 to {step} were trained with {json.dumps(trained)}"
            yield f"adaptation.replay.{source}", f"{got}; name the source in the mixtures of what lies ahead instead"


def phases_by_name(declared: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {phase["name"]: phase for phase in declared["phases"]}


def _phases_before(
    now: Mapping[str, Any], schedule: Schedule, step: int, epochs: Mapping[str, int]
) -> tuple[dict[str, Bounds], str | None]:
    """(start and end of each phase that is over by `step`, the one under way): the last one of a run may go on.

    A phase that would go on, but that `now` lets end by `step`, is over.
    """
    over, current = {}, None
    for name, start, end in schedule.phase_bounds:
        if start < step and (step < end or end == schedule.total_steps):
            if _ends_by(now, name, schedule, step, epochs):
                over[name] = (start, step)
            else:
                current = name
        elif end <= step:
            over[name] = (start, end)
    return over, current


def _ends_by(now: Mapping[str, Any], name: str, schedule: Schedule, step: int, epochs: Mapping[str, int]) -> bool:
    """Whether a phase is declared to end by `step`, with more of the run behind it."""
    phase, total_steps = phases_by_name(now).get(name), now["train"]["steps"]
    if phase is None or total_steps <= step:
        return False
    supplies = {source: SourceSupply(epochs.get(source)) for source in now["sources"]}
    try:
        return reached(read_clock(phase["until"], supplies, total_steps, True), schedule, step)
    except ValueError:  # told where the config is resolved
        return False


def _ahead(names: Sequence[str], over: Mapping[str, Any], current: str | None) -> Sequence[str]:
    """The phases, by name, that are declared before the one under way, or up to the last one that is over."""
    if current in names:
        return names[: names.index(current)]
    return names[: max((names.index(name) + 1 for name in over if name in names), default=0)]


def _fields_changed(
    old: Mapping[str, Any], new: Mapping[str, Any], total_steps: int, steps_now: int, end: int, schedule: Schedule
) -> Iterator[str]:
    """The fields in which a phase that ended at `end` is another one now: other words for the same are the same.

    `total_steps` were those of the run by which the phase was trained, `steps_now` are those that it is to have.
    """
    ends = {clock_step(new["until"], steps, schedule.segments) for steps in (total_steps, steps_now)}
    if old["until"] != new["until"] and end not in ends:
        yield "until"
    before, after = (_resolved(phase, total_steps) for phase in (old, new))
    yield from (key for key in before if before[key] != after[key])


def _shape_changed(
    old: Mapping[str, Any], new: Mapping[str, Any], was: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    """The fields of a phase that give its updates another shape; `was` and `now` are what train says.

    Where neither has one of its own, it is train's that changed.
    """
    for key in SHAPE:
        before, after = (p[key] if p[key] is not None else train.get(key) for p, train in ((old, was), (new, now)))
        if before != after and (old[key], new[key]) != (None, None):
            yield key


def _resolved(phase: Mapping[str, Any], total_steps: int) -> dict[str, Any]:
    """The fields of a phase, beside its end, in one way of saying them."""

    def steps(value):
        try:
            return resolve_steps(value, total_steps)
        except ValueError:  # told where the config is resolved
            return value

    mixture, lr, ramp_steps = phase["mixture"], phase["lr"], steps(phase["ramp_steps"])
    total = math.fsum(mixture.values()) or 1.0
    return {
        "mixture": {name: round(weight / total, 12) for name, weight in mixture.items() if weight},
        "ramp_steps": ramp_steps,
        "ramp_shape": phase["ramp_shape"] if ramp_steps else None,
        "lr": lr and {**lr, **{key: steps(lr[key]) for key in ("rewarm_steps", "decay_steps")}},
    }


def how_to_mend(
    config: Config,
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    problems: Sequence[Problem],
    schedule: Schedule,
    step: int,
    epochs: Mapping[str, int],
) -> list[str]:
    """What was trained and what the config says instead, as a difference of YAML, and what to put back."""
    over, current = _phases_before(now, schedule, step, epochs)
    last = schedule.phase_bounds[-1][0]
    ended = {n for n, _, end in schedule.phase_bounds if n in over and (end > step or n == last)}  # by `now`
    was = {**was, "phases": [{**p, "until": step} if p["name"] in ended else p for p in was["phases"]]}

    def shown(declared):
        names = [phase["name"] for phase in declared["phases"]]
        concerned = {*_ahead(names, over, current), *over}
        if any(path == "phases" for path, _ in problems):  # of the order, or of one that is gone
            concerned.add(current)
        defaults = {"ramp_steps": 0, "ramp_shape": "linear", **dict.fromkeys(["lr", *SHAPE])}
        of_train = [path.removeprefix("train.") for path, _ in problems if path.startswith("train.")]
        sections = {**declared, "train": {key: declared["train"][key] for key in of_train}}
        sections["phases"] = [
            {key: value for key, value in phase.items() if key not in defaults or value != defaults[key]}
            for phase in declared["phases"]
            if phase["name"] in concerned
        ]
        named = {path.partition(".")[0].partition("[")[0] for path, _ in problems}
        return _yaml({key: section for key, section in sections.items() if key in named}).splitlines()

    difference = difflib.unified_diff(shown(was), shown(now), "trained", config.origin.file, n=1, lineterm="")
    told = ["what is trained already stands; the difference:", *difference, "put this back into the config:"]
    return [*told, *shown(was)]


def _yaml(sections: Mapping[str, Any]) -> str:
    """Each section by its key, what is deep in it on one line."""
    flow = {True: None, False: False}  # a lone scalar in the style of a file
    return "".join(
        yaml.safe_dump(
            {key: section},
            default_flow_style=flow[isinstance(section, dict | list)],
            sort_keys=False,
            width=1000,
            allow_unicode=True,
        )
        for key, section in sections.items()
    )
