"""What a config changes of a run that goes on: what is trained stands as the ledger has it."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from curriculum.config import Config
from curriculum.errors import InputError
from curriculum.plan_warnings import schedule_warnings
from curriculum.scheduling import Past, Planned, declaration, training_settings
from curriculum.train import ledger
from curriculum.train.ledger import Problem
from curriculum.train.setup import Setup
from phases.clocks import clock_step, resolve_steps
from phases.schedule import Schedule, Segment, cut, segments_from_json

Bounds = tuple[int, int]  # start and end of a phase


@dataclass(frozen=True)
class Edit:
    """What a config changes of what a ledger says: `changes` are {path, was, now}, those of the schedule first.

    `accepted` are the changes among them of what is trained already, as `--accept-past` took them.
    """

    step: int
    changes: tuple[dict[str, Any], ...]
    past: Past
    accepted: tuple[Problem, ...] = ()


def compare(config: Config, saved: Mapping[str, Any], *, at: int | None = None, accept_past: bool = False) -> Edit:
    """A config against the ledger of the checkpoint that the run goes on from; `at`: a later step, of a branch.

    Raises InputError, with the difference and the YAML that undoes it, where the config would change what is trained
    before that step and `accept_past` is not given: phases that are over, with their shapes, seed, replay. What a
    run's blocks are, the longest of its sequences, is never another.
    """
    if problem := _of_blocks(config, ledger.block_tokens(saved)):
        raise config.error([problem])
    theta = saved["model"].get("rope_theta")
    was, now = (_without_theta(declared, theta) for declared in (_declared(saved), declaration(config)))
    step = saved["step"] if at is None else at
    schedule = Schedule(segments_from_json(saved["segments"]))
    changes = tuple(_changes(was, now))
    # A run that was begun before ledgers kept them says nothing of them.
    others = tuple(_changes_of_settings(_settings(saved), training_settings(config)))
    problems = [] if step == 0 else list(_of_past(was, now, schedule, step))
    if problems and not accept_past:
        how = _how_to_mend(config, was, now, problems, schedule, step)
        how.append(_OR_ACCEPT if at is None else "or branch at an earlier step")
        raise InputError(*config.error(dict.fromkeys(problems)).problems, details=how)
    planned = None
    if all(change["path"].startswith("evalsets.") for change in changes):
        epochs = {name: saved["sources"][name]["tokens_per_epoch"] for name in was["sources"]}
        planned = Planned(schedule, ledger.past_of(saved), epochs)
    frozen, going_on = _frozen(saved, was, now, schedule, step)
    past = Past(
        segments=cut(schedule.segments, frozen),
        settled=_settled(saved, was, now, schedule, step),
        planned=planned,
        seed=saved["data_seed"],
        sources=saved["sources"],
        going_on=going_on,
    )
    return Edit(step, changes + others, past, tuple(problems))


def edit_event(
    edit: Edit, saved: Mapping[str, Any], setup: Setup, accepted: Sequence[Problem] = ()
) -> dict[str, Any] | None:
    """What `schedule_edit` records of an edit whose run is built, None where nothing was changed.

    `accepted` are the changes that only the built run showed, of text that was trained on.
    """
    changes = [*edit.changes, *ledger.changed_contents(saved, setup)]
    if not changes:
        return None
    step, before, after = edit.step, Schedule(segments_from_json(saved["segments"])), setup.course.schedule
    phase = after.segment_at(step).phase
    return {
        "kind": "config",
        "phase": phase,
        "mixture_before": before.shares(min(step, before.total_steps - 1)),
        "mixture_after": after.shares(min(step, after.total_steps - 1)),
        "until": next(end for name, _, end in after.phase_bounds if name == phase),
        "reason": "; ".join(map(_in_words, changes)),
        "changes": list(changes),
        "accepted_past": bool(edit.accepted or accepted),
        "warnings": [
            *after.warnings,
            *schedule_warnings(setup.config, after, setup.corpus.tokens_per_epoch),
        ],
    }


def _of_blocks(config: Config, block_tokens: int) -> Problem | None:
    """What is wrong with the longest sequence of a config whose run reads in blocks of so many tokens."""
    longest = config.longest_seq_len
    if longest == block_tokens:
        return None
    at = next((i for i, phase in enumerate(config.phases) if phase.seq_len == longest), None)
    by_phase = at is not None and config.train.seq_len != longest
    fix = f"expected {block_tokens} as the longest, which train.seq_len may stay while phases have shorter ones"
    begun = f"the run's sources are read in blocks of {block_tokens}, its longest sequence when it was begun"
    return f"phases[{at}].seq_len" if by_phase else "train.seq_len", f"got {longest}, but {begun}; {fix}"


def _declared(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a ledger's config says of the schedule; all phases of older ones had the shape that train says."""
    declared = saved["declared"]
    seq_len = declared["train"].get("seq_len", ledger.block_tokens(saved))
    phases = [{**phase, **{key: phase.get(key) for key in _SHAPE}} for phase in declared["phases"]]
    return {
        **declared,
        "train": {**declared["train"], "seq_len": seq_len},
        "optim": {"scale_lr_by_batch": None, **declared["optim"]},
        "phases": phases,
    }


def _without_theta(declared: Mapping[str, Any], theta: float | None) -> dict[str, Any]:
    """A declaration in which no phase writes out `theta`, the model's own rope theta: without one it has the same."""
    own = {"rope_theta": None}
    return {**declared, "phases": [p if p["rope_theta"] != theta else {**p, **own} for p in declared["phases"]]}


def _settings(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What a ledger says of the settings beside the schedule, which the length of sequences is of now."""
    settings = dict(saved.get("settings", {}))
    if "train" in settings:
        settings["train"] = {key: value for key, value in settings["train"].items() if key != "seq_len"}
    return settings


def _changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every difference of two declarations; phases, sources and eval sets by name."""
    yield from _differing("", {"seed": was["seed"]}, {"seed": now["seed"]})
    for section in ("train", "optim", "adaptation"):
        yield from _differing(section, was[section], now[section])
    old, new = _phases_by_name(was), _phases_by_name(now)
    if [name for name in old if name in new] != [name for name in new if name in old]:
        yield {"path": "phases", "was": list(old), "now": list(new)}
    for section, its, others in (("sources", was["sources"], now["sources"]), ("phases", old, new)):
        for name in dict.fromkeys([*others, *its]):
            if name in its and name in others:
                yield from _differing(f"{section}.{name}", its[name], others[name])
            else:
                yield {"path": f"{section}.{name}", "was": its.get(name), "now": others.get(name)}
    sets = ({name: True for name in declared["evalsets"]["sets"]} for declared in (was, now))
    yield from _differing("evalsets.sets", *sets)


def _changes_of_settings(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for section in was:
        yield from _differing(section, was[section], now[section])


def _differing(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in dict.fromkeys([*new, *old]):
        if old.get(key) != new.get(key):
            yield {"path": f"{path}.{key}" if path else key, "was": old.get(key), "now": new.get(key)}


def _in_words(change: Mapping[str, Any]) -> str:
    path, was, now = (change[key] for key in ("path", "was", "now"))
    if path.count(".") == 1 and path.startswith(("sources.", "phases.")) or path.startswith("evalsets."):
        if was is None or now is None:
            return f"{path} {'added' if was is None else 'gone'}"
    return f"{path} {json.dumps(was)} → {json.dumps(now)}"


def _of_past(was: Mapping[str, Any], now: Mapping[str, Any], schedule: Schedule, step: int) -> Iterator[Problem]:
    """What the declaration `now` changes of what the one `was` trained before `step`."""
    if now["seed"] != was["seed"]:
        yield "seed", f"got {now['seed']}, but steps 0 to {step} were trained with {was['seed']}"
    over, current = _phases_before(schedule, step)
    yield from _train_changed(was, now, over)
    yield from _order_changed(was, now, over, current, step)
    yield from _phases_changed(was, now, over, schedule)
    yield from _replay_changed(was, now, over, step)


def _train_changed(was: Mapping[str, Any], now: Mapping[str, Any], over: Mapping[str, Bounds]) -> Iterator[Problem]:
    """Of train's shape, where phases that are `over` have none of their own."""
    old, new = _phases_by_name(was), _phases_by_name(now)
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
    old, new = _phases_by_name(was), _phases_by_name(now)
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
    old, new = _phases_by_name(was), _phases_by_name(now)
    place = {name: i for i, name in enumerate(new)}
    for name, (start, end) in over.items():
        if name not in old:
            continue
        if name not in new:
            yield "phases", f"{name} is gone, but steps {start} to {end} were trained as it; put it back"
            continue
        changed = [*_fields_changed(old[name], new[name], was["train"]["steps"], end, schedule)]
        changed += _shape_changed(old[name], new[name], was["train"], now["train"])
        for key in changed:
            got, trained = (
                json.dumps(train.get(key) if phase[key] is None else phase[key])
                for phase, train in ((new[name], now["train"]), (old[name], was["train"]))
            )
            then = f"but steps {start} to {end} were trained with {trained}"
            yield f"phases[{place[name]}].{key}", f"got {got}, {then}"


def _replay_changed(
    was: Mapping[str, Any], now: Mapping[str, Any], over: Mapping[str, Bounds], step: int
) -> Iterator[Problem]:
    """Shares of replay that a phase has which is `over`."""
    old, new = _phases_by_name(was), _phases_by_name(now)
    before, after = was["adaptation"]["replay"], now["adaptation"]["replay"]
    kept = [name for name in over if name in old and name in new]
    for source in {**before, **after}:
        share, trained = after.get(source), before.get(source)
        if share != trained and any(source not in old[name]["mixture"] for name in kept):
            got = f"got {json.dumps(share)}, but steps 0 to {step} were trained with {json.dumps(trained)}"
            yield f"adaptation.replay.{source}", f"{got}; name the source in the mixtures of what lies ahead instead"


def _phases_by_name(declared: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {phase["name"]: phase for phase in declared["phases"]}


def _phases_before(schedule: Schedule, step: int) -> tuple[dict[str, Bounds], str | None]:
    """(start and end of each phase that is over by `step`, the one under way): the last one of a run may go on."""
    over, current = {}, None
    for name, start, end in schedule.phase_bounds:
        if start < step and (step < end or end == schedule.total_steps):
            current = name
        elif end <= step:
            over[name] = (start, end)
    return over, current


def _ahead(names: Sequence[str], over: Mapping[str, Any], current: str | None) -> Sequence[str]:
    """The phases, by name, that are declared before the one under way, or up to the last one that is over."""
    if current in names:
        return names[: names.index(current)]
    return names[: max((names.index(name) + 1 for name in over if name in names), default=0)]


def _fields_changed(
    old: Mapping[str, Any], new: Mapping[str, Any], total_steps: int, end: int, schedule: Schedule
) -> Iterator[str]:
    """The fields in which a phase that ended at `end` is another one now: other words for the same are the same."""
    if old["until"] != new["until"] and clock_step(new["until"], total_steps, schedule.segments) != end:
        yield "until"
    before, after = (_resolved(phase, total_steps) for phase in (old, new))
    yield from (key for key in before if before[key] != after[key])


def _shape_changed(
    old: Mapping[str, Any], new: Mapping[str, Any], was: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    """The fields of a phase that give its updates another shape; `was` and `now` are what train says.

    Where neither has one of its own, it is train's that changed.
    """
    for key in ("batch_size", "seq_len", "rope_theta"):
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


def _frozen(
    saved: Mapping[str, Any], was: Mapping[str, Any], now: Mapping[str, Any], schedule: Schedule, step: int
) -> tuple[int, Segment | None]:
    """(up to where the schedule stands, the segment that goes on there where the config alone does not say which).

    Something else than the config decided it, such as a raised share or a rollback. It lasts to its phase's end, unless
    the phase is edited now; rates, batches and the end itself are what the config says.
    """
    until = saved["past_end"]
    if until <= step:
        return step, None
    trunks = (saved["branched_from"] or {"step": 0})["step"]
    step = max([step, trunks, *(r["first_bad_step"] + 1 for r in saved["history"].get("rollbacks", []))])
    name, segment = schedule.segment_at(until - 1).phase, schedule.segment_at(step)
    before, after = (_phase_of(declared, name) for declared in (was, now))
    read = {*segment.mixture, *(segment.ramp.from_mixture if segment.ramp else ())}
    if step >= until or after is None or before != after or segment.phase != name or read - now["sources"].keys():
        return step, None
    shape = {key: now["train"][key] if after[0][key] is None else after[0][key] for key in ("batch_size", "seq_len")}
    if shape == {key: getattr(segment, key) for key in shape}:
        return step, segment.going_on(step)
    return step, replace(segment.rest(step), **shape).aligned()


def _phase_of(declared: Mapping[str, Any], name: str) -> tuple[Any, ...] | None:
    """What a declaration says of a phase, None where it has none."""
    phase = _phases_by_name(declared).get(name)
    return phase and (phase, declared["adaptation"]["replay"])


def _settled(
    saved: Mapping[str, Any], was: Mapping[str, Any], now: Mapping[str, Any], schedule: Schedule, step: int
) -> dict[str, int]:
    """What shares of the run came to in steps, as `resolve` takes it: of what has begun and is declared as it was."""
    texts = [("optim.warmup_steps", was["optim"]["warmup_steps"], now["optim"]["warmup_steps"])] if step else []
    for name, start, _ in schedule.phase_bounds:
        old, new = (_phase_of(declared, name) for declared in (was, now))
        if start < step and old and new:
            texts.append((f"{name}.ramp_steps", old[0]["ramp_steps"], new[0]["ramp_steps"]))
            if old[0]["lr"] and new[0]["lr"]:
                texts.append((f"{name}.lr.rewarm_steps", old[0]["lr"]["rewarm_steps"], new[0]["lr"]["rewarm_steps"]))
    return {
        key: saved["settled"].get(key, resolve_steps(before, was["train"]["steps"]))
        for key, before, after in texts
        if before == after and isinstance(before, str)
    }


def _how_to_mend(
    config: Config,
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    problems: Sequence[Problem],
    schedule: Schedule,
    step: int,
) -> list[str]:
    """What was trained and what the config says instead, as a difference of YAML, and what to put back."""
    over, current = _phases_before(schedule, step)

    def shown(declared):
        names = [phase["name"] for phase in declared["phases"]]
        concerned = {*_ahead(names, over, current), *over}
        if any(path == "phases" for path, _ in problems):  # of the order, or of one that is gone
            concerned.add(current)
        defaults = {"ramp_steps": 0, "ramp_shape": "linear", **dict.fromkeys(["lr", *_SHAPE])}
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


_SHAPE = ("seq_len", "batch_size", "rope_theta")  # of a declared phase, None where it has none of its own
_OR_ACCEPT = "or keep the edit, in the record too, and go on from what was trained: --accept-past"


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
