"""A run, from its config to its last checkpoint. Read `_loop` first: it is the story of every step."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from curriculum.config import Config
from curriculum.data.tokenizer import Tokenizer, load_tokenizer
from curriculum.errors import InputError
from curriculum.lock import RunLock
from curriculum.model.model import Model, count, num_parameters
from curriculum.plan import DEFAULT_STORE_DIR, Past, check_schedule
from curriculum.record.board import Board
from curriculum.record.console import Console, program
from curriculum.record.events import EVENTS, METRICS, Record, check_offsets, plain
from curriculum.record.wandb_log import WandbLog, check_wandb
from curriculum.run import RunDirectory, load_run, read_json, write_tokenizer
from curriculum.train import fields, ledger
from curriculum.train.averages import averages_at, set_aside_means_after
from curriculum.train.best import BestCheckpoints, lost_golds
from curriculum.train.checkpoint import Checkpoints, import_ahead
from curriculum.train.clock import peak_memory_gb
from curriculum.train.divergence import GoingBack, check_diverged, checkpoint_before
from curriculum.train.edits import compare, edit_event
from curriculum.train.judge import Evaluated, judge
from curriculum.train.mesh import describe_devices
from curriculum.train.processes import from_first, is_first, leaving_on_error
from curriculum.train.running import Running
from curriculum.train.setup import Setup, build
from curriculum.train.signals import Stopped, StopSignals
from curriculum.train.start import Resumed, damaged_checkpoints, resumed_by_first, start_of, to_resume
from curriculum.train.step import TrainState, read_window
from curriculum.train.unwritten import Unwritten
from curriculum.train.watch import RegressionStop, no_verdicts, transfer_matrix
from evalsets.metrics import Summary, WindowResults, summarise


def train(
    config: Config,
    run_dir: str | Path | None = None,
    *,
    resume: str | int | None = None,
    accept_past: bool = False,
    store_dir: str | Path = DEFAULT_STORE_DIR,
    make_model: Callable[[int], Model] | None = None,
) -> dict[str, Any]:
    """Train a run, or continue it, and return its `training_complete` event.

    `run_dir` is `runs/<name>` by default; `resume` is None for a new run, "latest", "gold", or a checkpoint's step.
    What the config changes of a run that goes on is recorded as `schedule_edit`; what it changes of what is trained
    already is refused, unless `accept_past` says that the run goes on from what was trained all the same.
    `make_model(vocab_size)` gives a model of one's own, for the tokenizer's ids; the `model` section is then not
    read, and null in what the run keeps.
    Raises InputError for what the user can mend, before anything is created; Stopped after a signal, and RegressionStop
    where `regression.action` is stop: the run is saved then, and may be resumed. Raises Diverged where training
    diverged and going back is no way out (any more).
    """
    directory = RunDirectory(Path(run_dir) if run_dir is not None else Path("runs") / config.name)
    with RunLock(directory.path) as lock:
        resumed = resumed_by_first(lambda: _taken_up(directory, lock, resume))
        if resumed is None:
            check(config)
            tokenizer = kept_tokenizer(directory, config) if resume is not None else None
            setup = build(config, store_dir, tokenizer, make_model, start_of(config))
            return train_built(setup, directory, None, lock)
        saved = resumed.ledger
        edit = compare(config, saved, accept_past=accept_past)
        check(config, edit.past)
        tokenizer, start = kept_tokenizer(directory, config), start_of(config, saved)
        setup = build(config, store_dir, tokenizer, make_model, start, edit.past, saved["branched_from"])
        accepted = ledger.check_past(saved, setup, accept_past=accept_past)
        setup.edit = edit_event(edit, saved, setup, accepted)
        return train_built(setup, directory, resumed, lock)


def _taken_up(directory: RunDirectory, lock: RunLock, resume: str | int | None) -> Resumed | None:
    """What the run of a directory goes on from, None where it begins; a run that is there is locked."""
    directory.check_usable()
    if directory.holds_run() and resume is None:
        raise InputError(
            f"{directory.path}: already holds a run; continue it with --resume latest, or choose another --run-dir"
        )
    if directory.holds_run():
        lock.take()
    return to_resume(directory, resume)


def train_built(setup: Setup, directory: RunDirectory, resumed: Resumed | None, lock: RunLock) -> dict[str, Any]:
    """Begin the run of a directory with what is built already, or continue it, and close it.

    `lock` is taken where it is not yet, which is where there was no run.
    """
    config = setup.config
    mean_of = config.averages.phase_mean
    keep_planned = None if mean_of is None else (config.checkpoint.every, mean_of)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep, keep_planned)
    try:
        return _run(setup, directory, checkpoints, resumed, lock)
    finally:
        setup.close()
        checkpoints.close()


def dry_run(
    config: Config,
    *,
    store_dir: str | Path = DEFAULT_STORE_DIR,
    make_model: Callable[[int], Model] | None = None,
) -> dict[str, Any]:
    """Validate, prepare, build, compile, take one step of each shape and one eval. Leaves nothing but prepared data.

    `shapes`: how long the updates of each took to compile.
    """
    check(config)
    setup = build(config, store_dir, make_model=make_model, start=start_of(config))
    try:
        clock = time.perf_counter()
        state = setup.update_at(0)(setup.states.first(), setup.course.feed[0], *setup.course.knobs(0))
        loss = read_window(state.window, setup.course.plan.sources)["loss"]
        step_s, clock = time.perf_counter() - clock, time.perf_counter()
        evaluated = setup.suite_at(1).run(setup.states.whole(state.params))
        eval_losses = {name: summarise(r).loss for name, r in evaluated.items()}
        eval_s = time.perf_counter() - clock
        for shape in setup.course.shapes_from(0)[1:]:  # each takes a step, so that what it needs of memory is seen too
            step = next(s.start for s in setup.course.schedule.segments if setup.course.shape_at(s.start) == shape)
            state = setup.update_at(step)(state, setup.course.feed[step], *setup.course.knobs(step))
        jax.block_until_ready(state.step)
    finally:
        setup.close()
    return {
        "devices": describe_devices(setup.mesh),
        "num_parameters": num_parameters(setup.model),
        "num_trained": count(setup.states.like.params),
        "total_steps": setup.course.schedule.total_steps,
        "loss": loss,
        "eval_losses": eval_losses,
        "first_step_s": step_s,
        "first_eval_s": eval_s,
        "shapes": {str(shape): seconds for shape, seconds in setup.compiled.updates.seconds.items()},
        "peak_memory_gb": peak_memory_gb(),
    }


def _run(
    setup: Setup, directory: RunDirectory, checkpoints: Checkpoints, resumed: Resumed | None, lock: RunLock
) -> dict[str, Any]:
    """Begin or continue the run of a directory, up to its `training_complete` event; go back where it diverges."""
    if resumed is not None:
        if complete := from_first(lambda: _finished(setup, directory, checkpoints, resumed)):
            return complete
    record, rollback, damaged = None, None, []
    edits = [] if setup.edit is None else [setup.edit]
    with StopSignals() as stop:
        try:
            while True:
                step = None if resumed is None else resumed.step
                state, history = _restored(setup, directory, resumed)
                lost = {} if resumed is None else _lost_golds(directory, resumed)
                history = replace(history, gold=history.gold.without(lost))
                if rollback is not None:
                    history = replace(history, rollbacks=rollback.rollbacks)
                last = -1 if step is None else step
                with _told(directory):
                    if rollback is None:
                        damaged = from_first(partial(_begin_in, directory, lock, checkpoints, resumed))
                    if resumed is not None:
                        checkpoints.adopt(resumed.folder)
                    # First of all: after a kill in what follows no checkpoint is found that speaks of what was moved.
                    checkpoints.set_aside_after(last)
                    best = BestCheckpoints(directory, step)
                    from_first(partial(_describe, setup, directory, last))
                    record = _record(setup, directory, resumed, record)
                with best, leaving_on_error():
                    run = Running(setup, directory, record, checkpoints, best, state, history)
                    try:
                        _begin(run, step, fields.taken_up(setup, state, step, rollback, damaged, lost, edits))
                        return _loop(run, step, stop)
                    except GoingBack as going:
                        rollback = going.rollback
                del run, state  # before another one is restored
                resumed, edits = checkpoint_before(directory, rollback), rollback.edits
        finally:
            if record is not None:
                record.close()


def _finished(
    setup: Setup, directory: RunDirectory, checkpoints: Checkpoints, resumed: Resumed
) -> dict[str, Any] | None:
    """The `training_complete` event of a run that has nothing left to train, which is said; None for others."""
    step, own = resumed.step, resumed.folder.parent == directory.checkpoints
    if not own or not step == setup.course.schedule.total_steps == max(checkpoints.steps(), default=None):
        return None
    if complete := load_run(directory.path).complete:
        added = [name for name in setup.corpus.evalsets if name not in resumed.ledger["history"]["eval_sets"]]
        unsaid = f" Not measured: {', '.join(added)} (give it more train.steps)." if added else ""
        changes = [] if setup.edit is None else setup.edit["changes"]
        if any(not change["path"].startswith("evalsets.") for change in changes):
            unsaid += " What the config changes is not taken up: no step lies ahead."
        print(f"{directory.path} is finished: {step} of {step} steps. Nothing to do.{unsaid}")
    return complete


def _restored(setup: Setup, directory: RunDirectory, resumed: Resumed | None) -> tuple[TrainState, ledger.History]:
    """What the run goes on from; nothing is changed where InputError is raised."""
    if resumed is None:
        return setup.states.first(), ledger.History.begin(setup)
    step, folder, saved = resumed
    from_first(lambda: check_offsets(directory.path, saved["offsets"]))
    source = Checkpoints(folder.parent)
    state = setup.states.restored(source, step, tuple(saved["sources"]), saved["window_steps"])
    return state, ledger.History.of(saved, source.baselines(step))


@contextmanager
def _told(directory: RunDirectory) -> Iterator[None]:
    """Raise InputError where a run cannot be begun, or taken up, because its folder cannot be written to."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or directory.path}: {error.strerror or error}: nothing was trained; mend that (make "
            "room, give the right to write), then begin again, or go on with --resume latest"
        ) from None


def _begin_in(
    directory: RunDirectory, lock: RunLock, checkpoints: Checkpoints, resumed: Resumed | None
) -> list[dict[str, Any]]:
    """Take the lock of a directory that had no run, and so none to take, until now, and set what is damaged aside."""
    if not lock.held:
        lock.take()
        if directory.holds_run():
            raise InputError(f"{directory.path}: another process began a run here; choose another --run-dir")
    return _set_damaged_aside(directory, checkpoints, resumed)


def _describe(setup: Setup, directory: RunDirectory, last: int) -> None:
    """Write what the run is that goes on after step `last`, and move away what came after it."""
    directory.set_aside_evals_after(last)
    set_aside_means_after(directory.averages, last, directory.superseded / "averages")
    directory.create(setup.config, fields.derived(setup), plain(dict(setup.model.architecture)))
    write_tokenizer(directory, setup.corpus.tokenizer)


def _lost_golds(directory: RunDirectory, resumed: Resumed) -> dict[int, str]:
    """`lost_golds` as process 0 finds them."""
    return dict(from_first(lambda: list(lost_golds(directory, resumed.step, resumed.ledger).items())))


def _set_damaged_aside(
    directory: RunDirectory, checkpoints: Checkpoints, resumed: Resumed | None
) -> list[dict[str, Any]]:
    """Move what is damaged of a run's `checkpoints/` away before it goes on, and tell it on stderr."""
    moved = []
    for s, folder, why in damaged_checkpoints(directory, resumed):
        to = checkpoints.set_aside(s).relative_to(checkpoints.directory.parent)
        moved.append({"step": s, "why": why, "moved_to": str(to)})
        print(f"{folder}: is damaged: {why}; moved to {directory.path / to}", file=sys.stderr)
    if moved:
        where = "no checkpoint verifies: the run begins anew"
        if resumed is not None:
            where = f"the run goes on from step {resumed.step}"
        print(f"{directory.path}: {where}", file=sys.stderr)
    return moved


def _record(setup: Setup, directory: RunDirectory, resumed: Resumed | None, record: Record | None) -> Record:
    """The record as of what the run goes on from; `record` is the one that this process has open already."""
    offsets = {EVENTS: 0, METRICS: 0} if resumed is None else resumed.ledger["offsets"]
    if record is not None:
        record.cut_back(offsets)
        return record
    elapsed_before_s = 0.0 if resumed is None else resumed.ledger["elapsed_s"]
    if not is_first():
        return Unwritten(directory.path, setup.course.tokens_at, elapsed_before_s)
    views = [
        Console(directory.path, _resume_command(setup.config, directory), device_lines=setup.device_lines),
        *([Board(directory.path)] if setup.config.logging.tensorboard else []),
    ]
    if wandb := setup.config.logging.wandb:
        views.append(WandbLog(directory.path, wandb, setup.config.to_json()))
    return Record.resume(directory.path, offsets, setup.course.tokens_at, elapsed_before_s, views)


def _begin(run: Running, resumed_step: int | None, taken_up: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """What is recorded and measured before the first update, and before the one after `resumed_step`."""
    setup, step = run.setup, resumed_step or 0
    if resumed_step is None:
        run.record.event("training_start", 0, **fields.training_start(setup))
        judge(run, 0, evaluate(run, 0, list(setup.corpus.evalsets)))
        if setup.config.logging.generate_every and setup.lineage:  # what the model wrote that it begins from
            generate(run, 0)
        run.keep(0)
    for name, event in taken_up:
        run.record.event(name, step, **event)
    if resumed_step is None or step == setup.course.schedule.total_steps:
        switches = False
    else:  # to a phase that the record does not tell yet: the run ended here before, or the config begins one here
        switches = run.history.phase != setup.course.schedule.segment_at(step).phase
    measured = run.results.read(step) if switches else None
    there = run.history.watch.sets if measured is None else measured
    if missing := [name for name in setup.corpus.evalsets if name not in there]:
        judge(run, step, evaluate(run, step, missing))
        run.keep(step)
    if switches:
        switch_phase(run, step)


def _loop(run: Running, resumed_step: int | None, stop: StopSignals) -> dict[str, Any]:
    setup, config, record, clock = run.setup, run.setup.config, run.record, run.clock
    course = setup.course
    first = resumed_step or 0
    for step in range(first, course.schedule.total_steps):
        with clock.update():
            run.state = setup.update_at(step)(run.state, course.feed[step], *course.knobs(step))
        if step == first:
            setup.compile_ahead(step)
            import_ahead()
        done = step + 1
        run.settle(done, wait=False)
        at_end = done == course.schedule.total_steps
        if done % config.logging.every == 0 or at_end:
            row = record.row(fields.metrics_row(setup, done, run.state, clock))  # an ordinary step's only host sync
            run.history = run.history.with_row(row)
            run.state = run.state._replace(window=setup.compiled.clear_window(run.state.window))
            check_diverged(run, done)
        names = _sets_due(config, done, course.schedule.phase_ends)
        evaluated = evaluate(run, done, names) if names else None
        if config.logging.generate_every and (done % config.logging.generate_every == 0 or at_end):
            generate(run, done)
        if done in course.schedule.phase_ends and not at_end:
            switch_phase(run, done)
        worse = judge(run, done, evaluated) if evaluated else []
        for edit in fields.edits_again(setup, run.history, done):
            record.event("schedule_edit", done, **edit)
        stopped_by, planned = stop.after(done), done % config.checkpoint.every == 0 or at_end
        ends_here = stopped_by is not None or (bool(worse) and config.evalsets.regression.action == "stop")
        offsets = save(run, done, planned) if planned or ends_here else None
        run.keep(done, offsets)
        if ends_here and not at_end:
            run.settle(done)
            if stopped_by is not None:
                last_good = max(from_first(run.checkpoints.steps), default=None)
                raise Stopped(stopped_by, done, last_good, "" if last_good == done else run.why_not_saved)
            run.check_saved(done)
            raise RegressionStop(done, worse)
    return _complete(run)


def _complete(run: Running) -> dict[str, Any]:
    """Close a run that is trained to its end, once all of it is on the disk."""
    setup, total_steps = run.setup, run.setup.course.schedule.total_steps
    run.settle(total_steps)
    run.check_saved(total_steps)
    results = {end: run.results.read(end) for end in setup.course.schedule.phase_ends}
    transfer = transfer_matrix(setup.course.schedule.phase_bounds, run.history.watch, results)
    complete = fields.training_complete(setup, run.history, transfer, run.record.elapsed_s, run.state)
    event = run.record.event("training_complete", total_steps, **complete)
    try:
        run.offsets()
    except OSError as error:
        raise InputError(
            f"{run.directory.path}: is trained, but the end of its record could not be written: {error.strerror}; make "
            "room on the disk and end it with --resume latest"
        ) from None
    return event


def evaluate(run: Running, done: int, names: list[str]) -> Evaluated:
    """Measure the named sets after `done` updates, and compare them with what they were.

    Nothing is measured of training that diverged: raises what `check_diverged` does.
    """
    setup, before = run.setup, run.history.watch
    with run.clock.paused(run.state):
        if done:
            check_diverged(run, done, whole_state=True)
        started = time.perf_counter()
        suite = setup.suite_at(done)
        results = suite.run(setup.states.whole(run.state.params), names)
        if done in setup.course.schedule.phase_ends and setup.config.averages.phase_mean is not None:
            run.settle(done, run.checkpoints)  # the mean of a phase is of checkpoints that were saved
        averages = averages_at(setup, done, run.state, run.checkpoints, run.directory.averages)
        averaged = {average: suite.run(setup.states.whole(params), names) for average, params in averages.items()}
        duration_s = time.perf_counter() - started
        run.results.write(done, results, averaged)
        summaries = _summaries(results)
        of_averages = {average: _summaries(of_sets) for average, of_sets in averaged.items()}
        run.history, comparisons = run.history.with_eval(setup, done, results, summaries)
        watch, recovered, worse = run.history.watch.with_verdicts(setup, done, comparisons)
        watch, notes = watch.with_notes(setup, done, comparisons)
        run.history = replace(run.history, watch=watch)
        if done:  # those of the first eval stand in `training_start`
            notes += no_verdicts(setup.corpus.evalsets[name] for name in names if name not in before.sets)
        event = fields.eval_event(setup, done, summaries, of_averages, comparisons, notes, duration_s)
        run.record.event("eval", done, **event)
    newly = [name for name in worse if name not in before.standing]
    return Evaluated(summaries, recovered, worse, newly, watch.standing)


def generate(run: Running, done: int) -> None:
    """Record what the parameters after `done` updates go on with after the prompts of `logging.generate`."""
    with run.clock.paused(run.state):
        params = run.setup.states.whole(run.state.params)
        run.record.event("generation", done, samples=run.setup.samples_at(done)(params))


def switch_phase(run: Running, done: int) -> None:
    """Tell the switch after `done` updates, to whose eval the new phase will be compared."""
    with run.clock.switching():
        event = run.record.event("phase_switch", done, **fields.phase_switch(run.setup, done))
        results = run.results.read(done)
        run.history = run.history.with_phase(event["new_phase"], done, results)


def save(run: Running, done: int, planned: bool) -> dict[str, int] | None:
    """Save the run after `done` updates; the length of the record that the checkpoint goes with.

    None where the disk did not take it, which is told. Nothing is saved of a run that diverged: raises what
    `check_diverged` does.
    """
    with run.clock.paused(run.state):
        check_diverged(run, done, whole_state=True)
        # The golds that the ledger names are whole before it is; the gold of `done` itself comes after.
        run.settle(done)
        try:
            before = run.offsets()
            run.record.event("checkpoint", done, path=f"checkpoints/{done}")
            # A checkpoint is never ahead of the record; one that only a stop made leaves no event once it is resumed.
            offsets = run.offsets() if planned else before
            run.save_in(run.checkpoints, done, offsets)
        except OSError as error:
            run.save_failed(done, error, f"checkpoints/{done}")
            return None
        run.best.spoken_of(done, run.history.gold)
        if is_first():
            run.directory.write_training_state(fields.training_state(run.setup, done, run.history))
    return offsets


def _summaries(results: Mapping[str, WindowResults]) -> dict[str, Summary]:
    return {name: summarise(result) for name, result in results.items()}


def _resume_command(config: Config, directory: RunDirectory) -> str | None:
    """What to type to go on with a run, None where its config came from no file."""
    if config.origin.text is None:
        return None
    config_file, run_dir = shlex.quote(config.origin.file), shlex.quote(str(directory.path))
    return f"{program('curriculum')} train {config_file} --run-dir {run_dir} --resume latest"


def _sets_due(config: Config, done: int, boundaries: Set[int]) -> list[str]:
    """Names of the eval sets to measure after `done` updates; boundaries, the end among them, measure all."""
    if done in boundaries:
        return list(config.eval_sources)
    every = config.evalsets.every
    return [name for name, s in config.eval_sources.items() if done % every == 0 and done % (s.every or every) == 0]


def check(config: Config, past: Past | None = None) -> None:
    """Raise InputError for what can be told of a config before anything is prepared."""
    if config.logging.wandb:
        check_wandb(config.logging.wandb)
    check_schedule(config, past)


def kept_tokenizer(directory: RunDirectory, config: Config) -> Tokenizer | None:
    """The tokenizer kept with the run, unless the config now asks for another: new sources do not train it anew."""
    if not directory.tokenizer.exists() or not directory.resolved_config.exists():
        return None
    same = read_json(directory.resolved_config).get("tokenizer") == config.to_json()["tokenizer"]
    return load_tokenizer(directory.tokenizer) if same else None
