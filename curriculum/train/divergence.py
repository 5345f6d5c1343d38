"""Divergence: how it is found, how far the run goes back, and what is reported if it cannot go on."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from curriculum.errors import InputError
from curriculum.record.commands import branch_command
from curriculum.record.events import Record, number, read_events, read_metrics, unstamped
from curriculum.record.queries import acts_of
from curriculum.record.wording import counted
from curriculum.run_directory import RunDirectory
from curriculum.schema.shapes import row_problems
from curriculum.train.bases import base_again
from curriculum.train.checkpoints.finite import NonFiniteState, check_finite
from curriculum.train.mesh import row_shards
from curriculum.train.processes.together import from_first
from curriculum.train.resuming.edits import gone_back
from curriculum.train.resuming.going_back import Rollback
from curriculum.train.resuming.resumed import Resumed, newest_resumed, resumed_by_first
from curriculum.train.running import Running
from curriculum.train.setup import Setup
from phases.rollback import RollbackRefused

_SHOWN = 5  # bad values, or metrics rows before them, that a summary uses


class Diverged(Exception):
    """Training diverged beyond recovery; the message is a summary of several lines. The run's checkpoints are kept."""

    in_every_process = True


class GoingBack(Exception):
    """Training diverged, and the run goes back to `good`, None: to its start. Its schedule leaves out the bad data."""

    def __init__(self, rollback: Rollback, good: Resumed | None):
        self.rollback, self.good = rollback, good
        super().__init__(rollback.event["reason"])


class _Divergence(NamedTuple):
    reason: str
    first_bad_step: int  # data are passed over from here on
    good: Resumed | None  # the checkpoint to go back to; None if there is none
    found_step: int  # the first update that looked bad

    @property
    def good_step(self) -> int | None:
        return self.good and self.good.step


def check_diverged(run: Running, done: int, *, whole_state: bool = False) -> None:
    """Raise if training has diverged in the first `done` updates: GoingBack, or Diverged if the run cannot go back.

    It has diverged after `train.diverged_after` bad updates in a row, at its end also after fewer if they are most of
    the run, and, with `whole_state`, if parameters, optimizer state or moving average are not finite. This waits for
    the updates under way: call it where the host waits anyway, before anything relies on the state. Raises InputError
    if the run's directory was moved away: a resume then finds the divergence again.
    """
    divergence = _find(run, done, whole_state)
    if divergence is None:
        return
    run.check_there()  # where the run was moved away there is no checkpoint to go back to
    config, rollbacks = run.setup.config.train.rollback, run.history.rollbacks
    why = None
    if config is not None and len(rollbacks) < config.max:
        good = divergence.good_step or 0
        if why := _rows_not_divided(run.setup, good):
            why = f"the run cannot go back to step {good} on this mesh: {why}"
        else:
            try:
                run.setup.course.pass_over(divergence.first_bad_step, config.skip_steps, back_to=good)
            except RollbackRefused as refused:
                why = f"the data of {counted(config.skip_steps, 'step')} cannot be passed over: {refused}"
            else:
                raise GoingBack(_rollback(run, done, divergence), divergence.good)
    first, good = divergence.first_bad_step, divergence.good_step
    _record_diverged(run.record, done, divergence.reason, first, rollbacks, good)
    raise Diverged(_summary(run, done, divergence, why))


def _rows_not_divided(setup: Setup, step: int) -> str | None:
    """What is wrong with the rows of phases from `step` on; only those ahead were checked when the run was taken up."""
    phases, shards = setup.course.schedule.phases_after(step), row_shards(setup.mesh)
    problems = row_problems(setup.config.train, setup.config.phases, shards, phases)
    return next((f"{path}: {message}" for path, message in problems), None)


def _rollback(run: Running, done: int, divergence: _Divergence) -> Rollback:
    config, before = run.setup.config.train.rollback, run.history.rollbacks
    good, first = divergence.good_step or 0, divergence.first_bad_step
    # What was done up to the first bad update is repeated; of what came after, only the config's edits stand.
    done_again, edits = [], []
    for event in from_first(lambda: read_events(run.directory.path)):
        if event["step"] < good:
            continue
        if event.get("kind") != "config":
            done_again += [event] if good < event["step"] <= first else []
        elif event["step"] == good:
            edits.append(unstamped(event))
        else:
            of_schedule, at_once = gone_back(event, run.setup, good)
            done_again += [of_schedule] if of_schedule else []
            edits += [at_once] if at_once else []
    acts = acts_of(done_again)
    now = {"step": good, "first_bad_step": first, "skip_steps": config.skip_steps, **({"acts": acts} if acts else {})}
    event = {
        "told_at_step": done,
        "first_bad_step": divergence.first_bad_step,
        "skip_steps": config.skip_steps,
        "number": len(before) + 1,
        "max": config.max,
        "reason": divergence.reason,
    }
    return Rollback(event, [*before, now], edits)


def begin_anew(setup: Setup, directory: RunDirectory, record: Record, rollback: Rollback) -> None:
    """Find again the parameters that a run first began with. Raises Diverged if they are gone."""
    if setup.lineage is not None and setup.states.frozen is None:
        try:
            setup.states.base = base_again(setup.config, setup.model, setup.lineage)
        except InputError as error:
            done, reason, first = (rollback.event[key] for key in ("told_at_step", "reason", "first_bad_step"))
            _record_diverged(record, done, reason, first, rollback.rollbacks[:-1], None)
            raise Diverged(
                f"training diverged at step {done}: {reason}\n"
                f"  last good    none: no checkpoint of {directory.path} up to step {first} verifies\n"
                "  to start over, the run needs what it began from (adaptation.init_from), which is gone:\n"
                + "\n".join(f"               {problem}" for problem in error.problems)
                + "\n  what to try  restore it from a copy, and continue with --resume latest"
            ) from None


def _record_diverged(
    record: Record, done: int, reason: str, first: int, rollbacks: Sequence[Mapping[str, Any]], good: int | None
) -> None:
    told = [{key: value for key, value in rollback.items() if key != "acts"} for rollback in rollbacks]
    record.event("diverged", done, reason=reason, first_bad_step=first, rollbacks=told, last_good_step=good)


def _bad_updates(first: int, num: int) -> str:
    return f"{num} updates in a row were bad, from update {first} on" if num > 1 else f"update {first} was bad"


def _find(run: Running, done: int, whole_state: bool) -> _Divergence | None:
    guard = run.state.guard
    first, num_bad = int(guard.diverged_at), run.setup.config.train.diverged_after
    if first < 0 and done == run.setup.course.total_steps and 2 * int(guard.bad_in_a_row) > done:
        first, num_bad = int(guard.row_began), int(guard.bad_in_a_row)
    if first >= 0:
        run.settle(done)
        return _Divergence(_bad_updates(first, num_bad), first, _newest(run.directory, first), first)
    if whole_state:
        try:
            check_finite(run.state)
        except NonFiniteState as error:
            run.settle(done)
            good = _newest(run.directory, done)
            return _Divergence(str(error), good.step if good else 0, good, done - 1)
    return None


def _newest(directory: RunDirectory, at_or_before: int) -> Resumed | None:
    """The newest checkpoint up to a step that verifies; None if there is none."""
    resumed, _ = resumed_by_first(lambda: (newest_resumed(directory, at_or_before), None))
    return resumed


def _summary(run: Running, done: int, divergence: _Divergence, why: str | None) -> str:
    course, state = run.setup.course, run.state
    config, guard = run.setup.config.train, jax.device_get(state.guard)
    first, path = divergence.found_step, run.directory.path
    rows = [row for row in from_first(lambda: read_metrics(path)) if row["step"] <= first][-_SHOWN:]
    lines = [
        f"training diverged at step {done} of {course.total_steps} (phase {course.phase_at(done)}, learning rate "
        f"{course.rate_at(done):.3g}): {divergence.reason}",
        f"  skipped      {counted(int(state.skipped_updates), 'update')} in all: {int(guard.num_nonfinite)} not "
        f"finite, {int(guard.num_outliers)} beyond the window",
        f"  loss         {_course(guard.losses_W, first, done, [row['loss'] for row in rows])}",
        f"  grad norm    {_course(guard.grad_norms_W, first, done, [row['grad_norm'] for row in rows])}",
    ]
    if config.rollback is None:
        lines.append("  rollbacks    none (train.rollback is not set)")
    else:
        told = ", ".join(f"to step {r['step']} (bad from {r['first_bad_step']})" for r in run.history.rollbacks)
        lines.append(f"  rollbacks    {len(run.history.rollbacks)} of {config.rollback.max}" + (told and f": {told}"))
    if why is not None:
        lines.append(f"               {why}")
    good = divergence.good_step
    lines.append(f"  last good    {'none' if good is None else f'step {good} of {path}'}")
    lines.append("  what to try  a lower optim.lr (or the phase's lr.peak), a longer warm-up, optim.grad_clip;")
    data = f"look at the data from step {divergence.first_bad_step} on"
    if config.rollback is None:
        data += ", and let the run pass over such data (train.rollback)"
    lines.append(f"               {data}")
    if good:
        changes, whole = ["KEY=VALUE", "optim.allow_jump=true"], run.setup.config
        own = {"own_model": whole.model is None, "own_optimizer": whole.optim.users_own}
        command = branch_command(path, run.setup.store_dir, good, changes, **own)
        lines.append(f"               from the last good step on: {command}")
        lines.append("               (allow_jump: lets the learning rate fall to less than half at once)")
    return "\n".join(lines)


def _course(values_W: np.ndarray, first_bad: int, done: int, rows: Sequence[float | str | None]) -> str:
    """A loss or norm in words: its mean in the guard's window, or else in `rows`, then the first bad values."""
    size = len(values_W)
    before = [float(values_W[s % size]) for s in range(max(0, done - size), first_bad)]
    bad = [float(values_W[s % size]) for s in range(max(first_bad, done - size), done)]
    logged = [value for value in map(number, rows) if value is not None]
    told = _mean(before, "update") or _mean(logged, "metrics row")
    return f"{told or 'none before'}; then {_listed(bad)}"


def _mean(values: Sequence[float], of: str) -> str | None:
    """Mean and standard deviation of the finite values; None if there are none."""
    finite = [value for value in values if np.isfinite(value)]
    return f"{np.mean(finite):.4g} ± {np.std(finite):.2g} over {counted(len(finite), of)} before" if finite else None


def _listed(values: Sequence[float]) -> str:
    if not np.isfinite(values).any():
        return "not finite in any"
    shown = [f"{value:.4g}" if np.isfinite(value) else "not finite" for value in values[:_SHOWN]]
    return ", ".join(shown) + (f", ... ({len(values)} updates)" if len(values) > _SHOWN else "")
