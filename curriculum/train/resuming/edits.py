"""What a config changes of a run that continues: what is trained stays as the ledger has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from curriculum.config import Config
from curriculum.errors import InputError, shown
from curriculum.record.wording import counted
from curriculum.scheduling import Past, Planned, declaration, training_settings
from curriculum.train.resuming import ledger
from curriculum.train.resuming.ledger import Found, Problem
from curriculum.train.resuming.past_edits import (
    SHAPE,
    Contrast,
    draw_alike,
    field_of,
    how_to_fix,
    of_past,
    phases_by_name,
)
from phases.clocks import resolve_steps
from phases.schedule import Schedule, Segment, cut, segments_from_json

if TYPE_CHECKING:
    from curriculum.train.setup import Setup

_MOST_TOLD = 12  # changes of an edit in its reason
_OR_ACCEPT = "or keep the edit, which is recorded, and continue from what was trained: --accept-past"


@dataclass(frozen=True)
class Edit:
    """What a config changes compared with a ledger: `changes` are {path, was, now}, those of the schedule first.

    `accepted`: (path, message) of the changes to what is already trained, which `--accept-past` accepted.
    """

    step: int
    changes: tuple[dict[str, Any], ...]
    past: Past
    accepted: tuple[Problem, ...] = ()


def find_edit(config: Config, saved: Mapping[str, Any], *, at: int | None = None, accept_past: bool = False) -> Edit:
    """What a config changes compared with the ledger of the checkpoint that the run continues from.

    `at`: the step where a branch begins, in place of the ledger's own step. Raises InputError, with the difference and
    the YAML that undoes it, if the config would change what is trained before that step and `accept_past` is not set:
    finished phases with their shapes, seed, replay. The size of a run's blocks, which is its longest sequence, can
    never change.
    """
    if problem := _of_blocks(config, saved):
        raise config.error([problem])
    contrast = _contrast(config, saved, saved["step"] if at is None else at)
    changes, others, step = tuple(_changes(contrast)), _changes_of_settings(config, saved), contrast.step
    past = _past(contrast, changes)
    problems = list(of_past(contrast)) if step else []
    trained, got = contrast.was["seed"], contrast.now["seed"]
    if step == 0 and at is None and past.segments and got != trained:
        problems = [("seed", f"got {got}, but steps 0 to {past.end} stand as they were planned with {trained}")]
    if problems and not accept_past:
        how = how_to_fix(config, contrast, problems)
        how.append(_OR_ACCEPT if at is None else "or branch at an earlier step")
        raise InputError(*config.error(dict.fromkeys(problems)).problems, details=how)
    if at is None and config.train.rollback is not None:  # only a rollback returns to an earlier plan
        raised = [(b["at"], replace(contrast, saved={**saved, **b})) for b in saved["before_raised"]]
        past = replace(past, before_raised=tuple((at, _past(before, changes)) for at, before in raised))
    return Edit(step, changes + others, past, tuple(problems))


def changes_since(config: Config, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """{path, was, now} of every difference of a config from the one that a ledger was saved with."""
    return [*_changes(_contrast(config, saved, saved["step"])), *_changes_of_settings(config, saved)]


def _contrast(config: Config, saved: Mapping[str, Any], step: int) -> Contrast:
    theta = saved["model"].get("rope_theta")
    was, now = (_spelled_alike(declared, theta) for declared in (saved["declared"], declaration(config)))
    return Contrast(saved, was, now, step)


def edit_event(
    edit: Edit, saved: Mapping[str, Any], found: Found, accepted: Sequence[Problem], warnings: Sequence[str]
) -> dict[str, Any] | None:
    """The `schedule_edit` event of an edit; None if nothing changed.

    `found`: what the config resolves to. `accepted`: changes to text that was trained on, as returned by `check_past`.
    `warnings`: those about the schedule and the data as they are now.
    """
    changes = [*edit.changes, *ledger.changed_contents(saved, found)]
    if not changes:
        return None
    before = Schedule(segments_from_json(saved["segments"]))
    event = _event(edit.step, before, found.schedule, changes, bool(edit.accepted or accepted))
    fixed = min(edit.past.end, found.schedule.total_steps)
    rates_act = edit.past.rates_from == edit.step
    late = [c for c in changes if not (_acts_at_once(c, found.config) or (rates_act and _is_of_rates(c)))]
    if edit.step < fixed and late:
        acts = "act" if len(late) > 1 else "acts"
        paths = ", ".join(change["path"] for change in late)
        event["reason"] += f" (steps {edit.step} to {fixed} read what was planned: {paths} {acts} after them)"
    return event | {"warnings": list(warnings)}


def _event(
    step: int, before: Schedule, after: Schedule, changes: Sequence[Mapping[str, Any]], accepted_past: bool
) -> dict[str, Any]:
    phase = after.segment_at(step).phase
    return {
        "kind": "config",
        "phase": phase,
        "mixture_before": before.shares(min(step, before.total_steps - 1)),
        "mixture_after": after.shares(min(step, after.total_steps - 1)),
        "passed_over": after.passed_over(step),
        "until": after.phase_end(phase),
        "reason": _reason(changes),
        "changes": list(changes),
        "accepted_past": accepted_past,
    }


def gone_back(event: Mapping[str, Any], setup: Setup, step: int) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Split a config's `schedule_edit` in two, for a run that goes back to `step`, before the step of the edit.

    The first part holds the changes to the schedule, which keep their steps. The second holds all others, which have
    no step: what is trained again from `step` on is trained by the current config. A part without changes is None. The
    warnings go with the first part, if there is one.
    """
    at_once = [change for change in event["changes"] if _acts_at_once(change, setup.config)]
    if not at_once:
        return dict(event), None
    schedule, rest = setup.course.schedule, [change for change in event["changes"] if change not in at_once]
    accepted = event["accepted_past"] and any(change["path"].startswith("sources.") for change in at_once)
    of_schedule = {**event, "changes": rest, "reason": _reason(rest)} if rest else None
    warnings = [] if rest else event["warnings"]
    return of_schedule, _event(step, schedule, schedule, at_once, accepted) | {"passed_over": {}, "warnings": warnings}


def _acts_at_once(change: Mapping[str, Any], config: Config) -> bool:
    """Whether a change is not about the schedule, and so applies to every update and eval from the resume on."""
    section, _, key = change["path"].partition(".")
    match section:
        case "train" | "optim":
            return key not in declaration(config)[section]
        case "phases":
            return key.endswith(".grad_accum")
        case "sources":  # a change of its text; changes of its epochs are the schedule's
            return isinstance(change["now"], Mapping) and change["now"].keys() == {"stream"}
        case "seed" | "adaptation":
            return False
    return True


def _past(contrast: Contrast, changes: Sequence[Mapping[str, Any]]) -> Past:
    """What of a ledger's schedule stands at the contrast's step: all of it if `changes` to it are only of eval sets."""
    saved, planned = contrast.saved, None
    if all(change["path"].startswith("evalsets.") for change in changes):
        epochs = {name: contrast.epochs[name] for name in contrast.was["sources"]}
        planned = Planned(contrast.schedule, ledger.past_of(saved), epochs)
    acts_from, frozen, going_on = _frozen(contrast)
    return Past(
        segments=cut(contrast.schedule.segments, frozen),
        settled=_settled(contrast),
        planned=planned,
        seed=saved["data_seed"] if frozen else None,
        sources=saved["sources"],
        going_on=going_on,
        rates_from=acts_from if any(map(_is_of_rates, changes)) else None,
    )


def _is_of_rates(change: Mapping[str, Any]) -> bool:
    """Whether a change of the schedule is of learning rates alone."""
    section, _, key = change["path"].partition(".")
    return section == "optim" or (section == "phases" and key.endswith(".lr"))


def _of_blocks(config: Config, saved: Mapping[str, Any]) -> Problem | None:
    """The problem with the longest sequence of a config, if any: a run reads in blocks of the size that it began with.

    It is told of where the longest sequence is, or was if that became shorter.
    """
    longest, block_tokens, was = config.longest_seq_len, saved["block_tokens"], saved["declared"]
    if longest == block_tokens:
        return None
    decides, old = max(longest, block_tokens), phases_by_name(was)
    lengths = [(phase.seq_len, old.get(phase.name, {}).get("seq_len")) for phase in config.phases]
    at = next((i for i, of_phase in enumerate(lengths) if decides in of_phase), None)
    by_phase = at is not None and decides not in (config.train.seq_len, was["train"]["seq_len"])
    fix = f"expected {block_tokens} as the longest (train.seq_len may stay so while phases have shorter ones)"
    begun = f"the run's sources are read in blocks of {block_tokens}, its longest sequence at the start"
    return f"phases[{at}].seq_len" if by_phase else "train.seq_len", f"got {longest}, but {begun}; {fix}"


def _spelled_alike(declared: Mapping[str, Any], theta: float | None) -> dict[str, Any]:
    """A declaration with all fields of a phase, of which a ledger from before one was added lacks it.

    No phase spells out `theta`, the model's own rope theta and thus the default.
    """
    phases = [{**SHAPE, **phase} for phase in declared["phases"]]
    return {**declared, "phases": [p if p["rope_theta"] != theta else {**p, "rope_theta": None} for p in phases]}


def _changes(contrast: Contrast) -> Iterator[dict[str, Any]]:
    """Every difference of the two declarations; phases, sources and eval sets are matched by name."""
    was, now, old, new = contrast.was, contrast.now, contrast.old, contrast.new
    yield from _differing("", {"seed": was["seed"]}, {"seed": now["seed"]})
    for section in ("train", "optim", "adaptation"):
        yield from _differing(section, was[section], now[section])
    if [name for name in old if name in new] != [name for name in new if name in old]:
        yield {"path": "phases", "was": list(old), "now": list(new)}
    for section, its, others in (("sources", was["sources"], now["sources"]), ("phases", old, new)):
        for name in dict.fromkeys([*others, *its]):
            if name in its and name in others:
                yield from _differing(f"{section}.{name}", its[name], others[name])
            else:
                yield {"path": f"{section}.{name}", "was": its.get(name), "now": others.get(name)}
    sets = (dict.fromkeys(declared["evalsets"]["sets"], True) for declared in (was, now))
    yield from _differing("evalsets.sets", *sets)


def _changes_of_settings(config: Config, saved: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Of sections on both sides only, since eval sets come and go."""
    was, now = saved["settings"], training_settings(config)
    return tuple(
        change for section in was if section in now for change in _differing(section, was[section], now[section])
    )


def _differing(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for key in dict.fromkeys([*new, *old]):
        if old.get(key) != new.get(key):
            yield {"path": f"{path}.{key}" if path else key, "was": old.get(key), "now": new.get(key)}


def _reason(changes: Sequence[Mapping[str, Any]]) -> str:
    """The changes in words; of many the first, as the event has all of them."""
    told = [_in_words(change) for change in changes[:_MOST_TOLD]]
    if more := len(changes[_MOST_TOLD:]):
        told.append(f"and {counted(more, 'more change')}")
    return "; ".join(told)


def _in_words(change: Mapping[str, Any]) -> str:
    """One change in words; of a mapping that changed in part, only the keys that changed."""
    path, was, now = (change[key] for key in ("path", "was", "now"))
    if path.rpartition(".")[0] in ("sources", "phases", "evalsets.sets") and (was is None or now is None):
        return f"{path} {'added' if was is None else 'removed'}"
    if isinstance(was, Mapping) and was.keys() == {"stream"}:
        return f"{path}: its text has changed"
    if isinstance(was, Mapping) and isinstance(now, Mapping) and any(now.get(key, ...) == was[key] for key in was):
        return _reason(list(_differing(path, was, now)))
    return f"{path} {shown(was)} → {shown(now)}"


def _frozen(contrast: Contrast) -> tuple[int, int, Segment | None]:
    """What is kept of the schedule: (up to which step all of it, up to which the data, the segment that continues).

    Up to the first bad update of a rollback the data are kept: what is passed over there follows them. There is a
    segment if something other than the config decided it, such as a raised share or a rollback. It lasts to its
    phase's end, unless this edit changes what the phase draws. The rates and the phase's end are what the config says,
    so that the last phase of a run that ended goes on as it was if the run is made longer.
    """
    saved, schedule, now, step = contrast.saved, contrast.schedule, contrast.now, contrast.step
    until = saved["past_end"]
    last = until - 1 if until < schedule.total_steps else until
    if last < step:
        return step, step, None
    step = max(step, (saved["branched_from"] or {"step": 0})["step"])
    data = max([step, *(rollback["first_bad_step"] + 1 for rollback in saved["history"]["rollbacks"])])
    segment = schedule.segment_at(data)
    if data > last or segment.phase != schedule.segment_at(last).phase:
        return step, data, None
    return step, data, gone_on(segment, data, contrast.was, now, saved["settled"])


def gone_on(
    segment: Segment, step: int, was: Mapping[str, Any], now: Mapping[str, Any], settled: Mapping[str, int]
) -> Segment | None:
    """A segment with data of its own as it continues at `step`; `settled` as in `draw_alike`.

    None if what its phase draws is edited, or if it reads a source that is gone. If the shape of train, which the
    phase uses, has changed, its quotas begin anew.
    """
    read = {*segment.mixture, *(segment.ramp.from_mixture if segment.ramp else ())}
    if read - now["sources"].keys() or not draw_alike(was, now, segment.phase, settled):
        return None
    phase = phases_by_name(now)[segment.phase]
    shape = {key: field_of(now, phase, key) for key in ("batch_size", "seq_len")}
    if shape == {key: getattr(segment, key) for key in shape}:
        return segment.continued(step)
    return replace(segment.rest(step), **shape)


def _settled(contrast: Contrast) -> dict[str, int]:
    """The step counts that stay as resolved (`Curriculum.settled`): of what has begun and is declared unchanged."""
    warmup, warmup_now = (declared["optim"]["warmup_steps"] for declared in (contrast.was, contrast.now))
    texts = [("optim.warmup_steps", warmup, warmup_now)] if contrast.step else []
    for name, start, _ in contrast.schedule.phase_bounds:
        old, new = contrast.old.get(name), contrast.new.get(name)
        if start < contrast.step and old and new:
            texts.append((f"{name}.ramp_steps", old["ramp_steps"], new["ramp_steps"]))
            if old["lr"] and new["lr"]:
                texts.append((f"{name}.lr.rewarm_steps", old["lr"]["rewarm_steps"], new["lr"]["rewarm_steps"]))
    shares = {
        key: contrast.saved["settled"].get(key, resolve_steps(before, contrast.was["train"]["steps"]))
        for key, before, after in texts
        if before == after and isinstance(before, str)
    }
    ends = {f"{name}.until": contrast.settled_end(name) for name in contrast.new}
    return shares | {key: end for key, end in ends.items() if end is not None}
