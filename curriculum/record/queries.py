"""Queries on the record of a run, for every view: its evals, its sets, its standing alarms, what it read.

Imports neither jax nor numpy, so that looking at a run is quick.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from curriculum.errors import InputError
from curriculum.record.curves import all_sets
from curriculum.record.events import TAKEN_UP, eval_sets, number, record_name, unstamped
from curriculum.run import Run
from curriculum.run_directory import read_json
from evalsets.summary import Recorded

STOPS_HERE = "the run stops here"  # the `action` of an `eval_regression` that ends its run

_Mark = tuple[str, int, Mapping[str, int], Mapping[str, int]]  # phase, step, tokens read and consumed by then


@dataclass(frozen=True, kw_only=True)
class EvalPoint(Recorded):
    """One set at one eval. NaN and infinities are floats here; a metric is None if there is none."""

    step: int
    tokens: int
    phase: str


def beginning(lineage: Mapping[str, Any]) -> str:
    """A line on where a run's first parameters come from, according to its `lineage`."""
    if lineage.get("kind") == "hf":
        return f"begins with the parameters of a {lineage['model_type']} model ({lineage['init_from']})"
    kept = "parameters and optimizer state" if lineage["keep_optimizer"] else "the parameters"
    untrained = "" if lineage["step"] else ", that run's initial parameters"
    return f"begins with {kept} of {lineage['run']}, step {lineage['step']:,} ({lineage['init_from']}){untrained}"


def base_directory(lineage: Mapping[str, Any]) -> str:
    """The directory of the run that a lineage's `init_from` names, without the checkpoint that it names in it."""
    return re.sub(r"/(checkpoints|gold|kept)(/\d+)?/?$", "", lineage["init_from"])


def eval_points(events: Iterable[Mapping[str, Any]]) -> dict[str, list[EvalPoint]]:
    """Every eval of every set, `val` the primary one; those with an average of the parameters as `<set>@<average>`."""
    points: dict[str, list[EvalPoint]] = {}
    for event in events:
        if event["event"] == "eval":
            for name, point in points_of(event).items():
                points.setdefault(name, []).append(point)
    return points


def points_of(event: Mapping[str, Any]) -> dict[str, EvalPoint]:
    """Each set at one `eval` event, named as in `eval_points`."""
    at = {"step": event["step"], "tokens": event["tokens_processed"], "phase": event["phase"]}
    return {
        name: EvalPoint(**at, **{metric: number(value) for metric, value in vars(measured).items()})
        for name, measured in all_sets(event).items()
    }


def evalset_facts(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Documents, windows, tokens, bytes and content hash of each set, by its name in the record.

    From `training_start`, and for sets that were added later from the `resume` events.
    """
    facts = {}
    for event in events:
        facts |= {record_name(name): of_set for name, of_set in event.get("evalsets", {}).items()}
    return facts


def documents_are_few(facts: Mapping[str, Any]) -> bool:
    """Whether a set has so few distinct documents that its standard errors are over blocks of their windows."""
    if "clustered_by" in facts:
        return facts["clustered_by"] == "blocks"
    return facts["documents"] < facts["clusters"]  # an older record; true only without copies


def content_hashes(events: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, str | None]:
    """The content hash of each of these sets, averages left out; None if the record has none."""
    facts = evalset_facts(events)
    return {name: facts.get(name, {}).get("content_hash") for name in names if "@" not in name}


def measured_sets(events: Iterable[Mapping[str, Any]]) -> set[str]:
    """The sets that the run has measured since it last started or resumed, by their names in the record."""
    names: set[str] = set()
    for event in events:
        if "evalsets" in event:
            names = {record_name(name) for name in event["evalsets"]}
    return names


def source_facts(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The `details` of each source of a run's corpus, by name: its training text when the run last started or resumed.

    A source that was removed keeps its last ones.
    """
    facts = {}
    for event in events:
        facts |= event.get("sources", {})
    return facts


def standing_regressions(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The offenders of `eval_regression` events, and what `eval` events say joined them, that have not recovered.

    As last recorded. Each has the `phase` of that event, the `step` at which it was measured, and as `now` the {step,
    loss} of its set's last eval. Alarms against a phase's start end with the phase, those of a set when the run goes on
    without the set.
    """
    standing: dict[tuple[str, str], dict[str, Any]] = {}
    phase, evals = None, []
    for event in events:
        worse = event["offenders"] if event["event"] == "eval_regression" else event.get("joined", [])
        for o in worse:
            standing[o["set"], o["baseline"]] = {"step": event["step"], **o, "phase": event["phase"]}
        match event["event"]:
            case "eval":
                phase = event["phase"] if phase is None else phase
                evals.append(event)
            case "phase_switch":
                phase = event["new_phase"]
            case "eval_recovered":
                for o in event["offenders"]:
                    standing.pop((o["set"], o["baseline"]), None)
            case "resume" | "rollback":
                measured = measured_sets([event])
                standing = {key: o for key, o in standing.items() if o["set"] in measured}
    last = _last_losses(evals, {o["set"] for o in standing.values()})
    return [
        {**o, "now": last.get(o["set"])}
        for o in standing.values()
        if o["baseline"] != "phase_start" or o["phase"] == phase
    ]


def _last_losses(evals: Sequence[Mapping[str, Any]], names: Set[str]) -> dict[str, dict[str, Any]]:
    """{step, loss} of the last of these `eval` events that measured each of the sets; the newest tell most of them."""
    last: dict[str, dict[str, Any]] = {}
    for event in reversed(evals):
        if not names - last.keys():
            break
        for name, found in eval_sets(event).items():
            last.setdefault(name, {"step": event["step"], "loss": found.loss})
    return last


def planned_tokens(plan: Mapping[str, Any], step: int) -> int:
    """Token slots of the first `step` updates, by the `plan` of a run's record."""
    return sum(max(min(s["end"], step) - s["start"], 0) * s["tokens_per_step"] for s in plan["step_sizes"])


def longer_from(plan: Mapping[str, Any], steps: Iterable[int]) -> int | None:
    """The checkpoint from which to train a run for longer: the newest of `steps` before its final decay, or None.

    After the decay, going on would make the learning rate jump up again.
    """
    last = plan["learning_rate"][-1]["piece"]
    falls = last["last"] < last["first"] and last.get("shape") != "inverse_sqrt"  # which goes on as it was
    return max((step for step in steps if not falls or step <= last["start"]), default=None)


def shapes_of(phases: Iterable[Mapping[str, Any]]) -> list[str]:
    """The shapes of each phase's updates in words; empty if the run has a single shape."""
    words = []
    for phase in phases:
        turns = [f"from step {turn['step']:,} {_shape_text(turn)}" for turn in phase.get("reshaped", ())]
        words.append([_shape_text(phase), *turns])
    several = len({shape for shapes in words for shape in shapes}) > 1
    return [", ".join(shapes) if several else "" for shapes in words]


def _shape_text(shape: Mapping[str, Any]) -> str:
    theta = shape["rope_theta"]
    turned = "" if theta is None else f", rope theta {theta:,.10g}"
    return f"{shape['batch_size']:,} x {shape['seq_len']:,}{turned}"


def acts_of(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What a run did after evals, by step: {action: that of its `eval_regression`, edits: its `schedule_edit`s}."""
    acts: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["event"] in ("eval_regression", "schedule_edit"):
            of_step = acts.setdefault(str(event["step"]), {"action": None, "edits": []})
            if event["event"] == "eval_regression":
                of_step["action"] = event["action"]
            else:
                of_step["edits"].append(unstamped(event))
    return acts


def stopping_alarm(events: Sequence[Mapping[str, Any]], step: int) -> Mapping[str, Any] | None:
    """The `eval_regression` that ended a run trained up to `step`; None if none did, or the run went on since.

    An alarm of the eval where a run is taken up ends it one update later.
    """
    for event in reversed(events):
        if event["event"] in TAKEN_UP or event["step"] < step - 1:
            return None
        if event["event"] == "eval_regression" and event["action"] == STOPS_HERE:
            return event
    return None


def warned_sets(events: Iterable[Mapping[str, Any]]) -> set[str]:
    """The sets without an alarm that had risen, when last measured, by more than chance alone often does."""
    warned: set[str] = set()
    for event in events:
        if event["event"] == "eval":
            measured = eval_sets(event).keys() if warned else ()
            warned = warned.difference(measured) | set(event.get("warned", []))
    return warned


def last_detectable(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """The smallest rise in nats per token that each set can detect, from the last eval that has it."""
    found: dict[str, float] = {}
    for event in events:
        known = event.get("detectable", {})
        found |= {name: nats for name, value in known.items() if (nats := number(value)) is not None}
    return found


def consumption(run: Run, at: tuple[str, int, Mapping[str, int]] | None = None) -> list[dict[str, Any]]:
    """What each phase that has begun has read: {phase, start, step, tokens, epochs}, in order.

    `tokens` are those that the phase's updates up to `step` read, by source. `epochs` are how far each source is used
    up since the run's start, as `max_epochs` counts, including what a rollback or a change of length passed over. Both
    come from the phase switches, and for the running phase from `training_state.json`, whose `step` is that of the last
    checkpoint.

    With `at`, the (phase, step, tokens drawn by then) of a checkpoint's ledger, only what was read up to that step; the
    last row then has no `epochs`. Raises InputError if `training_state.json` is damaged.
    """
    sizes = {name: source["tokens_per_epoch"] for name, source in source_facts(run.events).items()}
    starts = {phase["name"]: phase["start"] for phase in run.plan["phases"]}
    switches = [event for event in run.events if event["event"] == "phase_switch"]
    marks = [(e["from_phase"], e["step"], e["tokens_drawn"], e["consumed"]) for e in switches]
    last_step = max(event["step"] for event in run.events)  # a dip confirmed later has its own step
    path = run.directory.training_state
    if at is not None:
        marks = [*(mark for mark in marks if mark[1] < at[1]), (*at, {})]
    elif path.exists():
        state = read_json(path)
        if missing := [key for key in ("step", "phase", "tokens_drawn", "consumed") if key not in state]:
            raise InputError(f"{path}: has no {', '.join(missing)}; the next checkpoint writes it again")
        # After a resume from an older step the file may be of a later step that was superseded.
        if (marks[-1][1] if marks else 0) < state["step"] <= last_step:
            marks.append((state["phase"], state["step"], state["tokens_drawn"], state["consumed"]))
    rows, before = [], {}
    for phase, step, drawn, consumed in _trained(marks):
        tokens = {name: num for name, n in drawn.items() if (num := n - before.get(name, 0)) > 0}
        epochs = {name: n / sizes[name] for name, n in consumed.items() if n and sizes.get(name)}
        rows.append({"phase": phase, "start": starts.get(phase), "step": step, "tokens": tokens, "epochs": epochs})
        before = drawn
    return rows


def _trained(marks: Iterable[_Mark]) -> list[_Mark]:
    """The last mark of each stretch of updates of one phase.

    Of several marks at one step only the first counts: the run was resumed there with another phase ahead, and made no
    update in between.
    """
    last: list[_Mark] = []
    for mark in marks:
        if last and mark[1] == last[-1][1]:
            continue
        if last and mark[0] == last[-1][0]:
            last.pop()
        last.append(mark)
    return last
