"""A run, from its config to its last checkpoint. Read `_loop` first: it is the story of every step."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from curriculum.config import Config
from curriculum.data.tokenizer import Tokenizer, load_tokenizer
from curriculum.errors import InputError
from curriculum.model.model import Model, num_parameters
from curriculum.plan import DEFAULT_STORE_DIR, check_schedule
from curriculum.record.board import Board
from curriculum.record.console import Console, program
from curriculum.record.events import Record, check_offsets, plain, set_aside
from curriculum.record.wandb_log import WandbLog, check_wandb
from curriculum.run import (
    RunDirectory,
    checkpoint_steps,
    find_checkpoint,
    load_run,
    read_json,
    read_ledger,
    write_tokenizer,
)
from curriculum.train import fields, ledger
from curriculum.train.averages import averages_at, set_aside_means_after
from curriculum.train.checkpoint import Checkpoints
from curriculum.train.clock import TrainClock, peak_memory_gb
from curriculum.train.mesh import describe_devices
from curriculum.train.setup import Setup, build
from curriculum.train.signals import Stopped, StopSignals
from curriculum.train.start import start_of
from curriculum.train.step import TrainState, clear_window, read_window
from evalsets.metrics import Summary, WindowResults, summarise
from phases.schedule import Segment


def train(
    config: Config,
    run_dir: str | Path | None = None,
    *,
    resume: str | int | None = None,
    store_dir: str | Path = DEFAULT_STORE_DIR,
    make_model: Callable[[int], Model] | None = None,
) -> dict[str, Any]:
    """Train a run, or continue it, and return its `training_complete` event.

    `run_dir` is `runs/<name>` by default; `resume` is None for a new run, "latest", or the step of a checkpoint.
    `make_model(vocab_size)` gives a model of one's own, for the tokenizer's ids; the `model` section is then not
    read, and null in what the run keeps.
    Raises InputError for what the user can mend, before anything is created, and Stopped after a signal.
    """
    directory = RunDirectory(Path(run_dir) if run_dir is not None else Path("runs") / config.name)
    directory.check_usable()
    if directory.holds_run() and resume is None:
        raise InputError(
            f"{directory.path}: already holds a run; continue it with --resume latest, or choose another --run-dir"
        )
    _check_resume(directory, resume)
    saved = _saved(directory, resume)
    past = ledger.past_of(saved)
    _check(config, past)
    tokenizer = kept_tokenizer(directory, config) if resume is not None else None
    start = start_of(config, directory, resume)
    setup = build(config, store_dir, tokenizer, make_model, start, past, saved.get("branched_from"))
    return train_built(setup, directory, resume)


def train_built(setup: Setup, directory: RunDirectory, resume: str | int | None) -> dict[str, Any]:
    """Begin or continue the run of a directory with what is built already, and close it."""
    config = setup.config
    mean_of = config.averages.phase_mean
    keep_planned = None if mean_of is None else (config.checkpoint.every, mean_of)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep, keep_planned)
    try:
        return _run(setup, directory, checkpoints, resume)
    finally:
        setup.feed.close()
        checkpoints.close()


def dry_run(
    config: Config,
    *,
    store_dir: str | Path = DEFAULT_STORE_DIR,
    make_model: Callable[[int], Model] | None = None,
) -> dict[str, Any]:
    """Validate, prepare, build, compile, take one step and one eval. Leaves nothing behind but prepared data."""
    _check(config)
    setup = build(config, store_dir, make_model=make_model, start=start_of(config))
    try:
        clock = time.perf_counter()
        state = setup.train_step(setup.initial_state(), setup.feed[0], np.float32(setup.rates[0]))
        loss = read_window(state.window, setup.plan.sources)["loss"]
        step_s, clock = time.perf_counter() - clock, time.perf_counter()
        eval_losses = {name: summarise(r).loss for name, r in setup.suite.run(state.params).items()}
        eval_s = time.perf_counter() - clock
    finally:
        setup.feed.close()
    return {
        "devices": describe_devices(setup.mesh),
        "num_parameters": num_parameters(setup.model),
        "total_steps": setup.schedule.total_steps,
        "loss": loss,
        "eval_losses": eval_losses,
        "first_step_s": step_s,
        "first_eval_s": eval_s,
        "peak_memory_gb": peak_memory_gb(),
    }


def _run(setup: Setup, directory: RunDirectory, checkpoints: Checkpoints, resume: str | int | None) -> dict[str, Any]:
    """Begin or continue the run of a directory, up to its `training_complete` event."""
    step = _step_to_resume(checkpoints, resume)
    if step is None:
        state, history = setup.initial_state(), ledger.History.begin(setup.schedule.segments[0].phase)
        if resume is not None:
            set_aside(directory.path)
    else:
        saved = checkpoints.ledger(step)
        ledger.check_past(saved, setup)
        if step == setup.schedule.total_steps == checkpoints.steps()[-1]:
            if complete := load_run(directory.path).complete:
                added = [name for name in setup.suite.evalsets if name not in saved["history"]["eval_sets"]]
                unmeasured = f" Not measured: {', '.join(added)} (give it more train.steps)." if added else ""
                print(f"{directory.path} is finished: {step} of {step} steps. Nothing to do.{unmeasured}")
                return complete
        check_offsets(directory.path, saved["offsets"])
        state, history = setup.restore(checkpoints, step, tuple(saved["sources"])), ledger.History.of(saved)
    checkpoints.set_aside_after(-1 if step is None else step)
    directory.set_aside_evals_after(-1 if step is None else step)
    set_aside_means_after(directory.averages, -1 if step is None else step, directory.superseded / "averages")
    directory.create(setup.config, fields.derived(setup), plain(dict(setup.model.architecture)))
    write_tokenizer(directory, setup.corpus.tokenizer)

    views = [
        Console(directory.path, _resume_command(setup.config, directory), device_lines=setup.device_lines),
        *([Board(directory.path)] if setup.config.logging.tensorboard else []),
    ]
    if wandb := setup.config.logging.wandb:
        views.append(WandbLog(directory.path, wandb, setup.config.to_json()))
    if step is None:
        record = Record(directory.path, setup.tokens_at, views=views)
    else:
        record = Record.resume(directory.path, saved["offsets"], setup.tokens_at, saved["elapsed_s"], views)
    try:
        return _loop(setup, directory, checkpoints, record, state, history, step)
    finally:
        record.close()


def _loop(
    setup: Setup,
    directory: RunDirectory,
    checkpoints: Checkpoints,
    record: Record,
    state: TrainState,
    history: ledger.History,
    resumed_step: int | None,
) -> dict[str, Any]:
    config, total = setup.config, setup.schedule.total_steps
    boundaries = {end for _, _, end in setup.schedule.phase_bounds}
    clock = TrainClock()

    def evaluate(done: int, names: list[str]) -> None:
        nonlocal history
        with clock.paused(state):
            started = time.perf_counter()
            results = setup.suite.run(state.params, names)
            averages = averages_at(setup, done, state, checkpoints, directory.averages)
            averaged = {average: setup.suite.run(params, names) for average, params in averages.items()}
            duration_s = time.perf_counter() - started
            ledger.write_results(directory.path / "evals" / f"{done}.npz", results, averaged)
            summaries = _summaries(results)
            of_averages = {average: _summaries(of_sets) for average, of_sets in averaged.items()}
            record.event("eval", done, **fields.eval_event(setup, done, summaries, of_averages, duration_s))
            history = history.with_eval(done, summaries, setup.content_hashes)

    def save(done: int, planned: bool) -> None:
        with clock.paused(state):
            before = record.offsets()
            record.event("checkpoint", done, path=f"checkpoints/{done}")
            # A checkpoint is never ahead of the record; one that only a stop made leaves no event once it is resumed.
            offsets = record.offsets() if planned else before
            checkpoints.save(state, ledger.entry(setup, done, history, offsets, record.elapsed_s))
            directory.write_training_state(fields.training_state(setup, done, history))

    def switch_phase(done: int) -> None:
        nonlocal history
        event = record.event("phase_switch", done, **fields.phase_switch(setup, done))
        history = history.with_phase(event["new_phase"])

    with StopSignals() as stop:
        if resumed_step is None:
            record.event("training_start", 0, **fields.training_start(setup))
            evaluate(0, list(setup.suite.evalsets))
        else:
            record.event("resume", resumed_step, **fields.resume(setup))
            if added := [name for name in setup.suite.evalsets if name not in history.eval_sets]:
                evaluate(resumed_step, added)
            if resumed_step in boundaries and resumed_step < total:
                clock.switched()
                if history.phase != setup.schedule.segment_at(resumed_step).phase:  # the run ended here before
                    switch_phase(resumed_step)

        for step in range(resumed_step or 0, total):
            with clock.update():
                state = setup.train_step(state, setup.feed[step], np.float32(setup.rates[step]))
            done = step + 1
            if done % config.logging.every == 0 or done == total:
                row = record.row(fields.metrics_row(setup, done, state, clock))  # an ordinary step's only host sync
                history = history.with_row(row)
                state = state._replace(window=clear_window(state.window))
            if names := _sets_due(config, done, boundaries):
                evaluate(done, names)
            if done in boundaries and done < total:
                switch_phase(done)
                clock.switched()
            stopped_by, planned = stop.received, done % config.checkpoint.every == 0 or done == total
            if planned or stopped_by is not None:
                save(done, planned)
            if stopped_by is not None and done < total:
                checkpoints.wait()
                raise Stopped(stopped_by, done)
    checkpoints.wait()
    complete = fields.training_complete(setup, history, record.elapsed_s, int(state.skipped_updates))
    return record.event("training_complete", total, **complete)


def _summaries(results: Mapping[str, WindowResults]) -> dict[str, Summary]:
    return {name: summarise(result) for name, result in results.items()}


def _resume_command(config: Config, directory: RunDirectory) -> str | None:
    """What to type to go on with a run, None where its config came from no file."""
    if config.origin.text is None:
        return None
    config_file, run_dir = shlex.quote(config.origin.file), shlex.quote(str(directory.path))
    return f"{program('curriculum')} train {config_file} --run-dir {run_dir} --resume latest"


def _sets_due(config: Config, done: int, boundaries: set[int]) -> list[str]:
    """Names of the eval sets to measure after `done` updates; boundaries, the end among them, measure all."""
    if done in boundaries:
        return list(config.eval_sources)
    every = config.evalsets.every
    return [name for name, s in config.eval_sources.items() if done % every == 0 and done % (s.every or every) == 0]


def _check(config: Config, past: Sequence[Segment] = ()) -> None:
    """Raise InputError for what can be told of a config before anything is prepared."""
    if config.logging.wandb:
        check_wandb(config.logging.wandb)
    check_schedule(config, past)


def _check_resume(directory: RunDirectory, resume: str | int | None) -> None:
    """Refuse what cannot be resumed, before anything is prepared or created."""
    if resume is None or resume == "latest":
        return
    if isinstance(resume, str) and not (resume.isascii() and resume.isdecimal()):
        raise InputError(f"--resume {resume}: expected 'latest' or the step of a checkpoint")
    steps = sorted(int(path.name) for path in directory.checkpoints.glob("[0-9]*") if path.name.isdecimal())
    if int(resume) not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise InputError(f"--resume {resume}: {directory.path} has no checkpoint of that step; there are: {there}")


def _saved(directory: RunDirectory, resume: str | int | None) -> dict[str, Any]:
    """The ledger of the checkpoint to continue from; nothing where the run begins."""
    if resume is None or (resume == "latest" and not checkpoint_steps(directory.checkpoints)):
        return {}
    return read_ledger(find_checkpoint(directory, resume, option="--resume")[1])


def kept_tokenizer(directory: RunDirectory, config: Config) -> Tokenizer | None:
    """The tokenizer kept with the run, unless the config now asks for another: new sources do not train it anew."""
    if not directory.tokenizer.exists() or not directory.resolved_config.exists():
        return None
    same = read_json(directory.resolved_config).get("tokenizer") == config.to_json()["tokenizer"]
    return load_tokenizer(directory.tokenizer) if same else None


def _step_to_resume(checkpoints: Checkpoints, resume: str | int | None) -> int | None:
    if resume != "latest":
        return None if resume is None else int(resume)
    steps = checkpoints.steps()
    return steps[-1] if steps else None
