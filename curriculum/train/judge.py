"""What follows from an eval: who got worse or recovered, what is done about it, and which checkpoint is the gold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from curriculum.record.events import number
from curriculum.train.gate import run_gate
from curriculum.train.running import Running
from curriculum.train.watch import record_name
from evalsets import gold
from evalsets.gold import Candidate, Measured, Regressed, accepted, kept_steps, vetoed
from evalsets.metrics import Summary
from evalsets.regressions import Comparison
from phases.replay import ReplayRefused


def judge(
    run: Running, done: int, summaries: Mapping[str, Summary], comparisons: Mapping[str, Comparison]
) -> list[str]:
    """Record the verdicts of the eval after `done` updates and act on them; the sets that newly got worse."""
    setup, action = run.setup, run.setup.config.evalsets.regression.action
    phase = setup.schedule.segment_at(max(done - 1, 0)).phase
    watch, recovered, worse = run.history.watch.with_verdicts(setup, done, comparisons)
    if recovered:
        run.record.event("eval_recovered", done, phase=phase, offenders=recovered)
    edits: list[dict[str, Any]] = []
    if worse:
        edits, told = _act(run, done, worse)
        offenders = [pair for pairs in watch.standing.values() for pair in pairs]
        run.record.event("eval_regression", done, phase=phase, offenders=offenders, action=told)
    gold_regressed = {name: _worst(pairs) for name, pairs in watch.standing.items()}
    if done in setup.schedule.phase_ends and done < setup.schedule.total_steps:
        watch = watch.without_phase_start()
    run.history = replace(run.history, watch=watch)
    for edit in edits:
        run.record.event("schedule_edit", done, **edit)
    _keep_best(run, done, summaries, gold_regressed)
    if worse and action == "checkpoint":
        with run.clock.paused(run.state):
            run.save_in(run.best.kept, done, run.record.offsets())
    return worse


def _act(run: Running, done: int, worse: Sequence[str]) -> tuple[list[dict[str, Any]], str | None]:
    """(the schedule's edits, what is done in words), as `regression.action` asks for where sets got worse."""
    setup, regression = run.setup, run.setup.config.evalsets.regression
    if regression.action == "checkpoint":
        return [], f"kept as kept/{done}"
    if done == setup.schedule.total_steps or regression.action == "log":
        return [], None
    if regression.action == "stop":
        return [], "the run stops here"
    if done in setup.schedule.phase_ends:
        return [], "nothing is replayed more: the phase is over"
    edits, told = [], []
    for name in worse:
        source = setup.config.eval_sources[name].held_out_of
        if source is None:
            told.append(f"{record_name(name)} is held out of no source: nothing to replay")
            continue
        try:
            edit = setup.raise_share(done, source, regression.replay_factor, regression.replay_max_share)
        except ReplayRefused as refusal:
            told.append(str(refusal))
        else:
            edits.append({**edit, "reason": f"replay of {source}, as {record_name(name)} got worse"})
            told.append(f"{source} is replayed more")
    return edits, "; ".join(told)


def _worst(pairs: Sequence[Mapping[str, Any]]) -> Regressed:
    """A set's largest rise over the baselines that it stands regressed against; one that is not finite is larger."""
    worst = max(pairs, key=lambda pair: (not math.isfinite(pair["delta"]), pair["delta"]))
    half_interval = (worst["interval"][1] - worst["interval"][0]) / 2
    return Regressed(worst["baseline_loss"], worst["loss"], worst["delta"], half_interval)


def _keep_best(run: Running, done: int, summaries: Mapping[str, Summary], regressed: Mapping[str, Regressed]) -> None:
    """Decide whether this eval's parameters, or those that waited for it, are the gold; save what may become it."""
    setup, config, best = run.setup, run.setup.config.evalsets.gold, run.best
    measured = Measured(
        step=done,
        summaries=summaries,
        train_loss=number(run.history.train_loss),
        regressed=regressed,
        is_last=done == setup.schedule.total_steps,
        is_candidate=done > 0 or setup.lineage is not None,
        limits_from_start=setup.lineage is not None,
    )
    before = kept_steps(run.history.gold)
    state, decisions = gold.judge(config, run.history.gold, measured)
    run.history = replace(run.history, gold=state)
    waiting = list(decisions)
    while waiting:
        decision = waiting.pop(0)
        if not isinstance(decision, Candidate):
            run.record.event(decision.event, decision.step, **decision.fields())
            continue
        with run.clock.paused(run.state):
            if decision.step == done:
                run.save_in(best.gold, done, run.record.offsets())
            best.gold.wait()
            answer = run_gate(config.gate, best.gold_folder(decision.step), config.gate_timeout_seconds)
            if decision.step == done:
                best.gold.delete(done)  # its ledger knows nothing of the answer
        state, then = (
            accepted(state, decision, answer.score) if answer.accept else vetoed(state, decision, answer.reason)
        )
        run.history = replace(run.history, gold=state)
        waiting = [*then, *waiting]
    kept = kept_steps(state)
    if kept != before:
        best.drop_all_but(kept | before)
    if done in kept:
        with run.clock.paused(run.state):
            if done in best.gold.steps():  # of this very step, before a set was added
                best.gold.delete(done)
            run.save_in(best.gold, done, run.record.offsets())
