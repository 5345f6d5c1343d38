"""A run, from its config to its last checkpoint. Read `_loop` first: it is what happens at every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from curriculum.config import Config, check_is_config
from curriculum.data.progress import WINDOWS, ConsoleProgress
from curriculum.disk.append import how_to_make_room
from curriculum.disk.lock import RunLock
from curriculum.errors import InputError, check_folder
from curriculum.model.model import Model
from curriculum.record.events import View, check_views
from curriculum.record.wandb_log import check_wandb
from curriculum.run import DEFAULT_STORE_DIR
from curriculum.run_directory import RunDirectory
from curriculum.train import fields, taking_up
from curriculum.train.averages import averages_at
from curriculum.train.bases import keep_base
from curriculum.train.checkpoints.folder import Checkpoints, import_ahead
from curriculum.train.device import own_settings
from curriculum.train.divergence import GoingBack, begin_anew, check_diverged
from curriculum.train.judge import Verdict, decide_gold, judge
from curriculum.train.processes.together import count, first_then_all, from_first, is_first, leaving_on_error
from curriculum.train.resuming import going_back, ledger, opening
from curriculum.train.resuming.edits import edit_event, find_edit
from curriculum.train.resuming.going_back import Rollback
from curriculum.train.resuming.resumed import Resumed, resumed_by_first
from curriculum.train.resuming.start import start_of
from curriculum.train.running import Running
from curriculum.train.setup import Setup, build, check_same_config
from curriculum.train.signals import StopSignals
from curriculum.train.watch import Evaluated, RegressionStop, transfer_matrix
from evalsets.metrics import WindowResults
from evalsets.suite import Suite


class _EvalLeft(Exception):
    """A signal ended an eval between two micro-batches."""


@own_settings()
def train(
    config: Config,
    run_dir: str | Path | None = None,
    *,
    resume: str | int | None = None,
    accept_past: bool = False,
    store_dir: str | Path = DEFAULT_STORE_DIR,
    make_model: Callable[[int], Model] | None = None,
    views: Sequence[View] = (),
) -> dict[str, Any]:
    """Train a run, or continue it, and return its `training_complete` event.

    `run_dir` defaults to `runs/<name>`. `resume` is None for a new run, "latest", "gold" or a checkpoint's step. On
    resume, changes of the config are recorded as `schedule_edit`. A change to what was already trained is refused,
    unless `accept_past` is set: the run then continues from what was trained. `make_model(vocab_size)` returns a
    custom model for the tokenizer's ids; the `model` section is then ignored, and saved as null. `views` get every line
    of the record as it is written, in process 0, and are closed as the run ends, if it had begun.

    Raises InputError, before anything is created, for what the user can fix; also as the run ends, if the disk refused
    its last checkpoint or the end of its record. Raises Stopped after a signal, and RegressionStop if
    `regression.action` is stop: both once the run is saved, to be resumed (Stopped says so if the disk refuses that, or
    if nothing was trained yet).
    Raises Diverged if training diverged and a rollback is not configured or not possible.
    """
    check_is_config(config)
    if run_dir is not None:
        check_folder("run_dir", run_dir)
    check_views(views)
    directory = RunDirectory(Path("runs") / config.name if run_dir is None else Path(run_dir))
    check_same_config(config, resume=resume, accept_past=accept_past)
    with RunLock(directory.path) as lock:
        resumed, under_way = resumed_by_first(lambda: opening.claim(directory, lock, resume))
        saved = going_back.ledger_of(under_way, resumed)
        if saved is None:
            opening.check(config)
            opening.check_apart(config, directory)
            tokenizer = opening.kept_tokenizer(directory, config) if resume is not None else None
            setup = build(config, store_dir, tokenizer, make_model, start_of(config))
            return train_built(setup, directory, None, lock, views=views)
        from_first(lambda: opening.tell_new_name(config, directory))
        edit = find_edit(config, saved, accept_past=accept_past)
        opening.check_ahead(config, directory, saved["step"], edit.past)
        check_wandb(config.logging.wandb)
        tokenizer = first_then_all(lambda: opening.tokenizer_to_go_on(directory, config, store_dir, saved))
        start = start_of(config, None if resumed is None else saved, directory)
        setup = build(config, store_dir, tokenizer, make_model, start, edit.past, saved["branched_from"], saved["step"])
        found = ledger.found_in(setup)
        accepted = ledger.check_past(saved, found, accept_past=accept_past)
        changed = edit_event(edit, saved, found, accepted, setup.warnings(saved["data_warnings"]))
        rollback = None if under_way is None else Rollback(**under_way["rollback"])
        return train_built(setup, directory, resumed, lock, edit=changed, rollback=rollback, views=views)


def train_built(
    setup: Setup,
    directory: RunDirectory,
    resumed: Resumed | None,
    lock: RunLock,
    *,
    edit: Mapping[str, Any] | None = None,
    rollback: Rollback | None = None,
    begins_branch: bool = False,
    views: Sequence[View] = (),
) -> dict[str, Any]:
    """Train a run whose parts are built: begin it, or continue it from `resumed`, rolling back if it diverges.

    Returns its `training_complete` event, and closes `setup`.

    `lock` is already held if the directory holds a run; otherwise it is taken here. `edit`: the `schedule_edit` event
    of what the config changed on resume. `rollback`: the one that was under way when the run was ended.
    `begins_branch`: the run continues from a checkpoint of its trunk for the first time.
    """
    config = setup.config
    mean_of = config.averages.phase_mean
    keep_planned = None if mean_of is None else (config.checkpoint.every, mean_of)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep, keep_planned)
    with ExitStack() as at_end:
        at_end.callback(checkpoints.close)
        at_end.callback(setup.close)
        if resumed is not None:
            if complete := from_first(lambda: taking_up.finished(setup, directory, checkpoints, resumed, edit)):
                return complete
        stop = at_end.enter_context(StopSignals())
        record, damaged, before = None, None, fields.Before()
        edits = [*(() if rollback is None else rollback.edits), *([] if edit is None else [edit])]
        while True:
            step = None if resumed is None else resumed.step
            state, history, bad = taking_up.state_as_of(setup, directory, resumed)
            if rollback is not None:
                history = replace(history, rollbacks=tuple(rollback.rollbacks))
            with taking_up.writable(directory):
                if record is None:  # at first
                    before = taking_up.before(directory)
                    damaged = taking_up.take_up(directory, lock, checkpoints, resumed, rollback)
                    if config.adaptation.lora is not None:
                        from_first(lambda: keep_base(directory, setup.lineage))
                best = taking_up.directory_as_of(setup, directory, checkpoints, resumed, history, bad)
                record = taking_up.record_as_of(setup, directory, resumed, record, at_end, views)
            with best, leaving_on_error():
                run = Running(setup, directory, record, checkpoints, best, state, history, stop)
                on = fields.resumption(setup, state, step, rollback, damaged, bad, edits, begins_branch, before)
                try:
                    worse = _begin(run, step, on)
                    decide_gold(run, step or 0)
                    return _loop(run, step or 0, worse)
                except _EvalLeft:  # in `_begin`
                    raise run.stopped(stop.received, step or 0) from None
                except GoingBack as going:
                    resumed, rollback, edits = going.good, going.rollback, going.rollback.edits
            del run, state  # frees the memory before another state is restored
            if resumed is None:
                begin_anew(setup, directory, record, rollback)
            with taking_up.writable(directory):
                from_first(partial(going_back.write, setup, directory, resumed, rollback))


def _begin(run: Running, resumed_step: int | None, resumption: Sequence[tuple[str, dict[str, Any]]]) -> Sequence[str]:
    """Record and measure what is due before the first update, or before the first one after `resumed_step`.

    `resumption`: (name, event) pairs that record how the run continues. Returns the sets that raised an alarm here.
    Raises _EvalLeft or Stopped if a signal ends an eval or the gate: nothing is saved, as a resume does all of this
    again.
    """
    setup = run.setup
    if resumed_step is None:
        run.record.event("training_start", 0, **fields.training_start(setup))
        _make_ready(run, 0)
        evaluated = evaluate(run, 0, list(setup.corpus.evalsets))
        if setup.lineage is not None and setup.config.logging.generate_every:
            generate(run, 0)  # what the model it begins from writes
        _judge_at_first(run, 0, evaluated)
    for name, event in resumption:
        run.record.event(name, resumed_step or 0, **event)
    if resumed_step is None:
        return ()
    _make_ready(run, resumed_step)
    return _catch_up(run, resumed_step)


def _catch_up(run: Running, step: int) -> Sequence[str]:
    """Record and measure what the record lacks of the step that the run continues from; return the sets that got worse.

    That is the switch, if the run had ended at this step or an edited config begins a phase here; the last row and
    eval, if the config now ends the run here; and the first eval of new sets.
    """
    setup, schedule = run.setup, run.setup.course.schedule
    ends = step == schedule.total_steps
    switches = not ends and run.history.phase != schedule.segment_at(step).phase
    if ends and run.history.row_step < step:  # the config now ends the run between two rows
        log(run, step)
    if run.history.eval_left:  # all that follows the update of this step is done again, in `_loop`
        return ()
    measured = run.results.read(step) if switches or ends else None
    there = run.history.watch.sets if measured is None else measured
    missing = [name for name in setup.corpus.evalsets if name not in there]
    evaluated = evaluate(run, step, missing) if missing else None
    if switches:
        switch_phase(run, step)
    return () if evaluated is None else _judge_at_first(run, step, evaluated)


def _judge_at_first(run: Running, step: int, evaluated: Evaluated) -> Sequence[str]:
    """Judge an eval of `_begin` or `_catch_up`, and keep what follows; return the sets that got worse."""
    verdict = judge(run, step, evaluated)
    if verdict.stopped_by is not None:
        raise run.stopped(verdict.stopped_by, step)
    run.keep(step, verdict.keep)
    return verdict.worse


def _make_ready(run: Running, step: int) -> None:
    with run.clock.compiling():
        run.state = run.setup.make_ready(step, run.state)


def _loop(run: Running, first: int, worse: Sequence[str]) -> dict[str, Any]:
    """Train from update `first` to the end.

    `worse`: sets that raised an alarm as the run was taken up. The checkpoint it continues from does not know that
    alarm, so `action: stop` ends the run after its first update, which is saved.
    """
    setup, config, clock = run.setup, run.setup.config, run.clock
    course = setup.course
    done = first
    if run.history.eval_left:
        _finish_step(run, done, ())
    while done < course.total_steps:
        step = done
        with clock.update():
            run.state = setup.update_at(step)(run.state, course.feed[step], *course.knobs(step))
        if step == first:
            setup.compiled.ahead(course.shapes_from(step))
            import_ahead()
        done = step + 1
        run.settle(done, wait=False)
        at_end = done == course.total_steps
        if done % config.logging.every == 0 or at_end:
            log(run, done)  # an ordinary step's only host sync
            check_diverged(run, done)
        _finish_step(run, done, worse if step == first else ())
    return _complete(run)


def _finish_step(run: Running, done: int, worse: Sequence[str]) -> None:
    """Do what is due after `done` updates and their row: eval, samples, switch, verdicts, checkpoint, or the stop.

    A signal that arrives during the eval ends it. The step is saved as it was before the eval, and a resume does all of
    this again; that checkpoint is then replaced by the one that an undisturbed run saves. `worse` as in `_loop`.
    """
    config, course, record = run.setup.config, run.setup.course, run.record
    again, run.history = run.history.eval_left, replace(run.history, eval_left=False)
    at_end = done == course.total_steps
    names = _sets_due(config, done, course.phase_ends)
    if again:  # sets that the config has since
        names = [name for name in config.eval_sources if name in names or name not in run.history.watch.sets]
    try:
        evaluated = evaluate(run, done, names) if names else None
    except _EvalLeft:
        run.history = replace(run.history, eval_left=True)
        verdict = Verdict(stopped_by=run.stop.received)
    else:
        if config.logging.generate_every and (done % config.logging.generate_every == 0 or at_end):
            generate(run, done)
        if done in course.phase_ends and not at_end:
            switch_phase(run, done)
        verdict = judge(run, done, evaluated) if evaluated else Verdict()
        for edit in fields.edits_again(run.setup, run.history, done):
            record.event("schedule_edit", done, **edit)
    stopped_by = verdict.stopped_by or run.stop.after(done)
    # If a signal ended the eval or the gate, the rest is made on resume and recorded before the `checkpoint` event.
    planned = verdict.stopped_by is None and (done % config.checkpoint.every == 0 or at_end)
    worse = (*worse, *verdict.worse)
    ends_here = stopped_by is not None or (bool(worse) and config.evalsets.regression.action == "stop")
    told = planned or ends_here
    offsets = save(run, done, planned, told=told) if told or again else None
    run.keep(done, verdict.keep, offsets)
    if ends_here and (not at_end or verdict.stopped_by is not None):
        run.settle(done)
        if stopped_by is not None:
            raise run.stopped(stopped_by, done)
        run.check_saved(done)
        raise RegressionStop(done, worse)


def _complete(run: Running) -> dict[str, Any]:
    """Finish a fully trained run, once all of it is on disk; return its `training_complete` event.

    Raises InputError if the last checkpoint or the end of the record could not be written.
    """
    setup, course = run.setup, run.setup.course
    total_steps = course.total_steps
    run.settle(total_steps)
    run.check_saved(total_steps)
    if is_first():
        run.directory.going_back.unlink(missing_ok=True)
    run.drop_golds()
    # Of many phases and windows, all fields of their results would take gigabytes.
    nats = {end: {name: r.nats_N for name, r in run.results.read(end).items()} for end in course.phase_ends}
    last = run.results.read(total_steps)
    bounds, watch = course.schedule.phase_bounds, run.history.watch
    transfer = transfer_matrix(bounds, watch, nats, last, from_scratch=setup.from_scratch)
    complete = fields.training_complete(setup, run.history, transfer, run.record.elapsed_s, run.state)
    event = run.record.event("training_complete", total_steps, **complete)
    try:
        run.offsets()
    except OSError as error:
        raise InputError(
            f"{run.directory.path}: is trained, but the end of its record could not be written: {error.strerror}; "
            f"{how_to_make_room(error)} and finish it with --resume latest"
        ) from None
    return event


def log(run: Running, done: int) -> None:
    """Record the metrics row of the updates since the one before it, and begin to gather the next."""
    row = run.record.row(fields.metrics_row(run.setup, done, run.history.row_step, run.state, run.clock))
    run.history = run.history.with_row(row)
    run.state = run.state._replace(window=run.setup.compiled.clear_window(run.state.window))


def evaluate(run: Running, done: int, names: list[str]) -> Evaluated:
    """Measure the named sets after `done` updates, and compare them with their baselines.

    A diverged state is not measured: raises what `check_diverged` raises. Raises _EvalLeft, and records nothing, if a
    signal to stop arrived before the end.
    """
    setup = run.setup
    with run.clock.paused(run.state):
        if done:
            check_diverged(run, done, whole_state=True)
        started = time.perf_counter()
        suite = setup.suite_at(done)
        results = _measure(run, done, suite, run.state.params, names)
        run.check_there()
        if done in setup.course.phase_ends and setup.config.averages.phase_mean is not None:
            # The mean of a phase is made from saved checkpoints, and written after the saves under way.
            run.settle(done)
        averages, notes = averages_at(setup, done, run.state, run.directory)
        averaged = {name: _measure(run, done, suite, params, names, name) for name, params in averages.items()}
        duration_s = time.perf_counter() - started
        run.results.write(done, results, averaged)
        run.history, evaluated = run.history.with_eval(setup, done, results)
        evaluated = evaluated._replace(notes=[*evaluated.notes, *notes])
        run.record.event("eval", done, **fields.eval_event(setup, done, evaluated, averaged, duration_s))
    return evaluated


def _measure(
    run: Running, done: int, suite: Suite, params: Any, names: list[str], average: str = ""
) -> dict[str, WindowResults]:
    """Measure parameters after `done` updates, and tell how far that is if it takes long; raises _EvalLeft."""
    progress = ConsoleProgress(f"measuring step {done:,} {average}".rstrip(), unit=WINDOWS, passing=True)

    def between(windows: int, of: int) -> None:
        # Several processes would have to agree before each micro-batch: they finish the eval.
        if run.stop.received is not None and windows < of and count() == 1:
            raise _EvalLeft
        if is_first():
            progress(windows, of)

    try:
        return suite.run(run.setup.states.whole(params), names, progress=between)
    finally:
        progress.clear()


def generate(run: Running, done: int) -> None:
    """Record how the model after `done` updates continues the prompts of `logging.generate`."""
    with run.clock.paused(run.state):
        params = run.setup.states.whole(run.state.params)
        run.record.event("generation", done, samples=run.setup.samples_at(done)(params))


def switch_phase(run: Running, done: int) -> None:
    """Record the phase switch after `done` updates; the eval there is the new phase's baseline.

    At step 0 only the name of the first phase changes, and nothing is recorded: no phase was trained before it.
    """
    if done == 0:
        run.history = replace(run.history, phase=run.setup.course.phase_at(0))
        return
    with run.clock.switching():
        event = run.record.event("phase_switch", done, **fields.phase_switch(run.setup, done, run.history.phase))
        results = run.results.read(done)
        run.history = run.history.with_phase(event["new_phase"], done, results)


def save(run: Running, done: int, planned: bool, *, told: bool = True) -> dict[str, int] | None:
    """Start saving the run after `done` updates; return the record's length that belongs to the checkpoint.

    `planned`: the schedule asks for this checkpoint, so its `checkpoint` event belongs to that record. Without
    `told` it has no event. Returns None if the disk refused the checkpoint, which is recorded. A diverged run is not
    saved: raises what `check_diverged` raises.
    """
    with run.clock.paused(run.state):
        check_diverged(run, done, whole_state=True)
        # The golds that the ledger names must be whole before it is; the gold of `done` itself is saved after it.
        run.settle(done)
        run.drop_golds()
        try:
            before = run.offsets()
            if told:
                run.record.event("checkpoint", done, path=f"checkpoints/{done}")
            # A checkpoint is never ahead of the record. If only a stop asked for it, a resume cuts its event off again.
            offsets = run.offsets() if planned else before
            run.save_in(run.checkpoints, done, offsets)
        except OSError as error:
            run.save_failed(done, error, f"checkpoints/{done}")
            return None
        run.best.note_saving(done, run.history.gold)
        if is_first():
            run.directory.write_training_state(fields.training_state(run.setup, done, run.history))
    return offsets


def _sets_due(config: Config, done: int, boundaries: Set[int]) -> list[str]:
    """Names of the eval sets to measure after `done` updates: all of them at `boundaries`, which include the end."""
    if done in boundaries:
        return list(config.eval_sources)
    return [name for name, s in config.eval_sources.items() if done % (s.every or config.evalsets.every) == 0]
