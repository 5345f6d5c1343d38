"""What follows from an eval: which sets got worse or recovered, how the run reacts, and which checkpoint is gold."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from curriculum.disk.append import tell
from curriculum.disk.manifest import damage
from curriculum.record.events import number, plain, record_name
from curriculum.record.queries import STOPS_HERE
from curriculum.train.checkpoints.best import kept_as
from curriculum.train.checkpoints.folder import Checkpoints
from curriculum.train.gate import run_gate
from curriculum.train.processes.together import from_first, is_first
from curriculum.train.running import Running
from curriculum.train.signals import Stopped
from curriculum.train.watch import Evaluated, Pair
from evalsets import gold
from evalsets.gold import Candidate, Gold, Measured, Regressed, accepted, kept_steps, vetoed
from evalsets.metrics import summarise
from evalsets.summary import Summary
from phases.replay import ReplayRefused


class Verdict(NamedTuple):
    """What follows from an eval: the sets that raised an alarm, and the folders to keep its step's checkpoint in.

    stopped_by: the signal that ended the eval, which a resume does again, or that stopped the gate before it answered,
        which `decide_gold` asks again on resume.
    """

    worse: Sequence[str] = ()
    keep: tuple[Checkpoints, ...] = ()
    stopped_by: int | None = None


def judge(run: Running, done: int, evaluated: Evaluated) -> Verdict:
    """Record the verdicts of the eval after `done` updates, and act on them."""
    setup, worse = run.setup, evaluated.worse
    phase = setup.course.phase_at(done)
    if evaluated.recovered:
        run.record.event("eval_recovered", done, phase=phase, offenders=evaluated.recovered)
    if worse:
        edits, action = _act(run, done, evaluated)
        offenders = [pair for pairs in evaluated.standing.values() for pair in pairs]
        run.record.event("eval_regression", done, phase=phase, offenders=offenders, action=action)
        for edit in edits:
            run.record.event("schedule_edit", done, **edit)
    keep: list[Checkpoints] = []
    if worse and setup.config.evalsets.regression.action == "checkpoint":
        keep.append(run.best.kept)
    regressed = {name: _worst(pairs) for name, pairs in evaluated.standing.items()}
    kept, stopped_by = _judge_gold(run, done, evaluated.summaries, regressed)
    if kept:
        keep.append(run.best.gold)
    return Verdict(worse, tuple(keep), stopped_by)


def decide_gold(run: Running, step: int) -> None:
    """Make the decision about the gold that a signal interrupted, for a run that continues from `step`.

    The run then continues as if it had not been interrupted. Raises Stopped if a signal stops the gate again.
    """
    undecided, run.history = run.history.gold_undecided, replace(run.history, gold_undecided=None)
    if undecided is None:
        return
    regressed = {
        # Older versions have no step of the alarm, but half an interval.
        name: Regressed(*map(number, nats), since if isinstance(since, int) else step)
        for name, (*nats, since) in undecided.items()
    }
    summaries = {name: summarise(result) for name, result in run.results.read(step).items()}
    if not summaries and is_first():
        tell(f"the gold of step {step} is not decided on, which a signal had interrupted: the results are gone")
    kept, stopped_by = _judge_gold(run, step, summaries, regressed)
    if stopped_by is not None:
        raise Stopped(stopped_by, step)
    if step % run.setup.config.checkpoint.every == 0 or step == run.setup.course.total_steps:
        run.record.event("checkpoint", step, path=f"checkpoints/{step}")  # the checkpoint was saved without this event
    if kept:
        run.keep(step, (run.best.gold,))


def _act(run: Running, done: int, evaluated: Evaluated) -> tuple[list[dict[str, Any]], str | None]:
    """React to an alarm as `regression.action` says; returns (edits of the schedule, the action in words)."""
    course, action = run.setup.course, run.setup.config.evalsets.regression.action
    acts = course.of_trunk(done) or run.history.done_before(done)
    if acts:  # the schedule already has their edits
        return [edit for edit in acts["edits"] if edit["kind"] == "replay"], acts["action"]
    if action == "checkpoint":
        return [], kept_as(done)
    if done == course.total_steps or action == "log":
        return [], None
    if action == "stop":
        return [], STOPS_HERE
    if action != "replay":
        raise ValueError(f"no such action: {action!r}")
    if done in course.phase_ends:
        return [], "no share is raised: the phase is over"
    return _replay(run, done, evaluated)


def _replay(run: Running, done: int, evaluated: Evaluated) -> tuple[list[dict[str, Any]], str | None]:
    """Raise, once each, the shares of the sources that newly worse sets are held out of; returns as `_act` does."""
    setup, regression = run.setup, run.setup.config.evalsets.regression
    edits, told, sets_of = [], [], {}
    for name in evaluated.newly:
        source, shown = setup.config.eval_sources[name].held_out_of, record_name(name)
        if not math.isfinite(evaluated.summaries[name].loss):
            told.append(f"{shown}: its loss is not finite, so replay cannot help")
        elif source is None:
            told.append(f"{shown} is held out of no source: nothing to replay")
        else:
            sets_of.setdefault(source, []).append(shown)
    evalsets = setup.config.eval_sources
    worse = {evalsets[name].held_out_of for name in evaluated.standing} - {None}
    for source, names in sets_of.items():
        raised = (done, source, regression.replay_factor, regression.replay_max_share)
        try:
            edit = setup.course.raise_share(*raised, spared=worse - {source})
        except ReplayRefused as refusal:
            told.append(f"{source} is not replayed more: {refusal}")
        else:
            edits.append({**edit, "reason": f"replay of {source}, as {' and '.join(names)} got worse"})
            told.append(f"{source} is replayed more")
    return edits, "; ".join(told) or None


def _judge_gold(
    run: Running, done: int, summaries: Mapping[str, Summary], regressed: Mapping[str, Regressed]
) -> tuple[bool, int | None]:
    """Decide whether the parameters of this eval, or those pending from an earlier one, become the gold.

    Returns (whether this eval's checkpoint must be kept, as the gold or as pending; the signal that stopped the gate,
    in which case nothing is decided).
    """
    setup, config = run.setup, run.setup.config.evalsets.gold
    run.settle(done, run.best.gold)  # a gold whose save failed does not count
    run.gold_before = run.history.gold
    measured = Measured(
        step=done,
        summaries=summaries,
        train_loss=number(run.history.train_loss),
        regressed=regressed,
        is_last=done == setup.course.total_steps,
        is_candidate=done > 0 or setup.lineage is not None,
        limits_from_start=setup.lineage is not None,
    )
    state, decisions = gold.decide(config, run.history.gold, measured)
    waiting, decided = list(decisions), []
    while waiting:
        decision = waiting.pop(0)
        if isinstance(decision, Candidate):
            reason, score, stopped_by = _ask_gate(run, done, decision.step)
            if stopped_by is not None:
                undecided = plain({name: list(numbers) for name, numbers in regressed.items()})
                run.history = replace(run.history, gold_undecided=undecided)
                return False, stopped_by
            state, then = accepted(state, decision, score) if reason is None else vetoed(state, decision, reason)
            waiting = [*then, *waiting]
        else:
            decided.append(decision)
    for decision in decided:
        where = {"path": f"gold/{decision.step}"} if isinstance(decision, Gold) else {}
        run.record.event(decision.event, decision.step, **decision.fields(), **where)
    run.history = replace(run.history, gold=state)
    if (kept := kept_steps(state)) != kept_steps(run.gold_before):
        run.drop_golds()
    return done in kept, None


def _ask_gate(run: Running, done: int, step: int) -> tuple[str | None, float | None, int | None]:
    """Ask the gate about the candidate of `step`, whose checkpoint must be whole; one that was not saved is vetoed.

    Returns (the reason of a veto or None; the score; the signal that stopped the gate before it answered).
    """
    config, golds, stop = run.setup.config.evalsets.gold, run.best.gold, run.stop
    with run.clock.paused(run.state):
        if step == done:
            run.keep(done, (golds,))
        run.settle(done, golds)
        if step not in from_first(golds.steps):
            return f"its checkpoint was not saved: {run.why_not_saved}", None, None

        def answered() -> tuple[str | None, float | None, int | None, bool]:
            folder, stopped = run.directory.gold / str(step), lambda: stop.anywhere is not None
            answer = run_gate(config.gate, folder, config.gate_timeout_seconds, stopped)
            if why := damage(folder):
                if folder.exists():
                    golds.set_aside(step)  # else it would still be listed as whole
                return f"it damaged the checkpoint gold/{step}: {why}", None, None, False
            if answer is None:
                return None, None, stop.anywhere, True
            return answer.reason, answer.score, None, True

        reason, score, stopped_by, whole = from_first(answered, lambda: stop.received)
        if whole and step == done:
            golds.drop(done)  # its ledger lacks the gate's answer; if the checkpoint is kept, it is saved again
    return reason, score, stopped_by


def _worst(pairs: Sequence[Pair]) -> Regressed:
    """A set's largest rise over the baselines it stands regressed against; a rise that is not finite is the largest."""
    found = [Regressed(*(number(p[key]) for key in ("baseline_loss", "loss", "delta")), p["first_step"]) for p in pairs]
    return max(found, key=lambda r: (not math.isfinite(r.delta), r.delta))
