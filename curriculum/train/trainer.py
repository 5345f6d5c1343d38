"""A run, from its config to its last checkpoint. Read `_loop` first: it is the story of every step."""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from curriculum.config import PRIMARY, Config
from curriculum.data.corpus import Corpus, load_corpus
from curriculum.errors import InputError
from curriculum.model.presets import ModelConfig, num_parameters, resolve_model
from curriculum.model.transformer import init_params, nats_per_token
from curriculum.plan import DEFAULT_STORE_DIR, describe_phases, resolve_schedule
from curriculum.record.board import Board
from curriculum.record.console import Console
from curriculum.record.events import Record, set_aside
from curriculum.run import RunDirectory, load_run, write_tokenizer
from curriculum.train import ledger
from curriculum.train.checkpoint import Checkpoints
from curriculum.train.feed import Feed
from curriculum.train.mesh import make_mesh, place_batch, place_rows, place_state
from curriculum.train.optimizer import make_optimizer
from curriculum.train.step import (
    TrainState,
    clear_window,
    init_state,
    make_train_step,
    read_window,
    tune_malloc,
    window_for,
)
from evalsets.metrics import Summary, summarise
from evalsets.suite import Suite
from phases.batches import DataPlan
from phases.lr import learning_rate
from phases.schedule import Schedule

EVAL_MICRO_BATCH = 32  # rows; on 2 CPU cores 32 is 1.1x 16, and all windows at once x0.65


class Stopped(Exception):
    """The run was stopped by a signal, after its checkpoint was saved."""

    def __init__(self, signal_number: int, step: int):
        self.signal_number, self.step = signal_number, step
        super().__init__(f"stopped by {signal.Signals(signal_number).name} at step {step}, which was saved")


def train(
    config: Config,
    run_dir: str | Path | None = None,
    *,
    resume: str | int | None = None,
    store_dir: str | Path = DEFAULT_STORE_DIR,
) -> dict[str, Any]:
    """Train a run, or continue it, and return its `training_complete` event.

    `run_dir` is `runs/<name>` by default; `resume` is None for a new run, "latest", or the step of a checkpoint.
    Raises InputError for what the user can mend, before anything is created, and Stopped after a signal.
    """
    directory = RunDirectory(Path(run_dir) if run_dir is not None else Path("runs") / config.name)
    if directory.holds_run() and resume is None:
        raise InputError(
            f"{directory.path}: already holds a run; continue it with --resume latest, or choose another --run-dir"
        )
    _check_resume(directory, resume)
    setup = _build(config, store_dir)
    checkpoints = Checkpoints(directory.checkpoints, config.checkpoint.keep)
    try:
        return _run(setup, directory, checkpoints, resume)
    finally:
        setup.feed.close()
        checkpoints.close()


def dry_run(config: Config, *, store_dir: str | Path = DEFAULT_STORE_DIR) -> dict[str, Any]:
    """Validate, prepare, build, compile, take one step and one eval. Leaves nothing behind but prepared data."""
    setup = _build(config, store_dir)
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
        "num_parameters": num_parameters(setup.model),
        "total_steps": setup.schedule.total_steps,
        "loss": loss,
        "eval_losses": eval_losses,
        "first_step_s": step_s,
        "first_eval_s": eval_s,
        "peak_memory_gb": peak_memory_gb(),
    }


@dataclass
class _Setup:
    """All that a run is made of, built from its config before anything is written."""

    config: Config
    corpus: Corpus
    schedule: Schedule
    plan: DataPlan
    model: ModelConfig
    rates: np.ndarray  # float64, by update
    feed: Feed
    suite: Suite
    train_step: Callable
    initial_state: Callable[[], TrainState]
    place: Callable[[Any], Any]

    def restore(self, checkpoints: Checkpoints, step: int, saved_sources: tuple[str, ...]) -> TrainState:
        """The state of a checkpoint whose metrics window was over `saved_sources`."""
        like = self.initial_state()
        window = self.place(window_for(like.window, self.plan.sources, saved_sources))
        state = checkpoints.restore(step, like._replace(window=window))
        return state._replace(window=self.place(window_for(state.window, saved_sources, self.plan.sources)))


def _build(config: Config, store_dir: str | Path) -> _Setup:
    tune_malloc()
    # A second start reads its programs from here instead of compiling them again.
    jax.config.update("jax_compilation_cache_dir", str(Path(store_dir).absolute() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

    corpus = load_corpus(config, store_dir)
    num_tokens = {name: len(stream) for name, stream in corpus.tokens.items()}
    schedule = resolve_schedule(config, num_tokens)
    plan = DataPlan(schedule, config.seed, num_tokens, config.train.seq_len)
    model = resolve_model(config.model, corpus.tokenizer.vocab_size)
    mesh = make_mesh()
    feed = Feed(plan, corpus.tokens, corpus.tokenizer.eot, config.train.grad_accum, partial(place_batch, mesh))
    suite = Suite(
        list(corpus.evalsets.values()), partial(nats_per_token, model), EVAL_MICRO_BATCH, partial(place_rows, mesh)
    )
    optimizer = make_optimizer(config.optim)
    step = make_train_step(model, optimizer, config.optim.grad_clip, len(plan.sources))

    def initial_state() -> TrainState:
        return place_state(mesh, init_state(init_params(model, config.seed), optimizer, len(plan.sources)))

    return _Setup(
        config=config,
        corpus=corpus,
        schedule=schedule,
        plan=plan,
        model=model,
        rates=learning_rate(schedule.lr, np.arange(schedule.total_steps)),
        feed=feed,
        suite=suite,
        train_step=jax.jit(step, donate_argnums=0),
        initial_state=initial_state,
        place=partial(place_state, mesh),
    )


def _run(setup: _Setup, directory: RunDirectory, checkpoints: Checkpoints, resume: str | int | None):
    """Begin or continue the run of a directory, up to its `training_complete` event."""
    config, schedule = setup.config, setup.schedule
    history = ledger.History.begin()
    saved_step = _step_to_resume(checkpoints, resume)
    if saved_step is not None:
        saved = checkpoints.ledger(saved_step)
        ledger.check_past(saved, config, setup.corpus, setup.plan, asdict(setup.model))
        if saved_step == schedule.total_steps == checkpoints.steps()[-1]:
            if complete := load_run(directory.path).complete:
                print(f"{directory.path} is finished: {saved_step} of {saved_step} steps. Nothing to do.")
                return complete
        history = ledger.History.of(saved)
        state = setup.restore(checkpoints, saved_step, tuple(saved["sources"]))
        checkpoints.set_aside_after(saved_step)
    else:
        state = setup.initial_state()
        if resume is not None:
            set_aside(directory.path)
    directory.create(config, _derived(setup), asdict(setup.model))
    write_tokenizer(directory, setup.corpus.tokenizer)

    tokens_per_step = config.train.batch_size * config.train.seq_len
    views = [Console(directory.path)]
    if config.logging.tensorboard:
        views.append(Board(directory.path))
    if saved_step is None:
        record = Record(directory.path, lambda step: step * tokens_per_step, views=views)
    else:
        record = Record.resume(
            directory.path, saved["offsets"], lambda step: step * tokens_per_step, saved["elapsed_s"], views
        )
    try:
        return _loop(setup, directory, checkpoints, record, state, history, saved_step)
    finally:
        record.close()


def _loop(setup, directory, checkpoints, record, state, history, saved_step) -> dict[str, Any]:
    config, schedule = setup.config, setup.schedule
    total, first = schedule.total_steps, saved_step or 0
    boundaries = {end for _, _, end in schedule.phase_bounds}
    clock = _TrainClock()

    def evaluate(step: int, names: list[str]) -> None:
        nonlocal history
        with clock.paused(state):
            started = time.perf_counter()
            results = setup.suite.run(state.params, names)
            duration_s = time.perf_counter() - started
            ledger.write_results(directory.path / "evals" / f"{step}.npz", results)
            summaries = {name: summarise(r) for name, r in results.items()}
            record.event("eval", step, **_eval_fields(setup, step, summaries), eval_duration_s=round(duration_s, 3))
            history = history.with_eval(step, summaries)

    def save(step: int) -> None:
        nonlocal history
        with clock.paused(state):
            record.event("checkpoint", step, path=f"checkpoints/{step}")
            directory.write_training_state(_training_state(setup, step, history))
            checkpoints.save(
                state,
                _ledger(setup, step, history, record),
            )

    if saved_step is None:
        record.event("training_start", 0, **_start_fields(setup))
        evaluate(0, list(setup.suite.evalsets))
    else:
        record.event("resume", first, plan=_derived(setup))
        if added := [name for name in setup.suite.evalsets if name not in history.eval_sets]:
            evaluate(first, added)

    with _StopSignals() as stop_signals:
        for step in range(first, total):
            with clock.update():
                state = setup.train_step(state, setup.feed[step], np.float32(setup.rates[step]))
            done = step + 1
            if done % config.logging.every == 0 or done == total:
                row = record.row(_row_fields(setup, done, state, clock))  # the only host sync of an ordinary step
                history = history.with_row(row)
                state = state._replace(window=clear_window(state.window))
            if names := _sets_due(config, done, boundaries):
                evaluate(done, names)
            if done in boundaries and done < total:
                record.event("phase_switch", done, **_switch_fields(setup, done))
                clock.switched()
            if done % config.checkpoint.every == 0 or done == total or stop_signals.received:
                save(done)
            if stop_signals.received and done < total:
                checkpoints.wait()
                raise Stopped(stop_signals.received, done)
    checkpoints.wait()
    return record.event("training_complete", total, **_complete_fields(setup, history, record))


def _ledger(setup: _Setup, step: int, history: ledger.History, record: Record) -> dict[str, Any]:
    return ledger.entry(
        setup.config,
        setup.corpus,
        setup.plan,
        asdict(setup.model),
        step,
        history,
        offsets=record.offsets(),
        elapsed_s=record.elapsed_s,
    )


# ---------------------------------------------------------------- what goes into the record


def _start_fields(setup: _Setup) -> dict[str, Any]:
    evalsets = {
        name: {
            "documents": e.num_documents,
            "windows": e.num_windows,
            "tokens": e.num_tokens,
            "bytes": e.num_bytes,
            "content_hash": e.content_hash,
        }
        for name, e in setup.corpus.evalsets.items()
    }
    return {
        "config": setup.config.to_json(),
        "model": {**asdict(setup.model), "num_parameters": num_parameters(setup.model)},
        "plan": _derived(setup),
        "sources": setup.corpus.details,
        "evalsets": evalsets,
        "warnings": list(setup.schedule.warnings) + list(setup.corpus.warnings),
    }


def _derived(setup: _Setup) -> dict[str, Any]:
    return {
        "total_steps": setup.schedule.total_steps,
        "tokens_per_step": setup.config.train.batch_size * setup.config.train.seq_len,
        "num_parameters": num_parameters(setup.model),
        "phases": list(describe_phases(setup.schedule)),
        "learning_rate": [asdict(piece) for piece in setup.schedule.lr],
    }


def _training_state(setup: _Setup, step: int, history: ledger.History) -> dict[str, Any]:
    """Where the run stands, for people and scripts that watch it; resuming never reads it."""
    return {
        "step": step,
        "total_steps": setup.schedule.total_steps,
        "phase": setup.schedule.segment_at(max(step - 1, 0)).phase,
        "checkpoint": f"checkpoints/{step}",
        "tokens_drawn": setup.schedule.drawn(step),
        **asdict(history),
    }


def _eval_fields(setup: _Setup, step: int, summaries: dict[str, Summary]) -> dict[str, Any]:
    update = max(step - 1, 0)
    fields: dict[str, Any] = {
        "progress_pct": round(100 * step / setup.schedule.total_steps, 4),
        "lr": float(setup.rates[update]),
        "phase": setup.schedule.segment_at(update).phase,
    }
    for name, summary in summaries.items():
        loss, bpb, sem = ("val_loss", "val_bpb", "val_sem")
        if name != PRIMARY:
            loss, bpb, sem = f"eval_{name}", f"eval_{name}_bpb", f"eval_{name}_sem"
        fields |= {loss: summary.loss, bpb: summary.bpb, sem: summary.sem}
    return fields


def _row_fields(setup: _Setup, done: int, state: TrainState, clock: _TrainClock) -> dict[str, Any]:
    config, segment = setup.config, setup.schedule.segment_at(done - 1)
    means = read_window(state.window, setup.plan.sources)
    steps, seconds, once = clock.take()
    tokens_per_step = config.train.batch_size * config.train.seq_len
    fields = {
        "step": done,
        "loss": means["loss"],
        **{f"loss_{name}": loss for name, loss in means["source_loss"].items()},
        "grad_norm": means["grad_norm"],
        "lr": float(setup.rates[done - 1]),
        "tokens_seen": done * tokens_per_step,
        "tokens_per_sec": round(steps * tokens_per_step / seconds, 1),
        "step_time_s": round(seconds / steps, 6),
        "phase": segment.phase,
        "mixture": {name: segment.mixture_at(done - 1).get(name, 0.0) for name in setup.config.sources},
        "skipped_updates": int(state.skipped_updates),
        "packing_mode": "stream",
        "packing_utilization": 1.0,
        "peak_memory_gb": peak_memory_gb(),
    }
    return fields | once


def _switch_fields(setup: _Setup, done: int) -> dict[str, Any]:
    before, after = setup.schedule.segment_at(done - 1), setup.schedule.segment_at(done)
    consumed = setup.schedule.drawn(done)
    sizes = setup.plan.tokens_per_epoch
    return {
        "from_phase": before.phase,
        "new_phase": after.phase,
        "mixture_before": before.mixture_at(done - 1),
        "mixture_after": after.mixture,
        "ramp_steps": 0 if after.ramp is None else after.ramp.steps,
        "consumed": consumed,
        "epochs": {name: round(consumed[name] / sizes[name], 6) for name in consumed if sizes.get(name)},
        "lr": float(setup.rates[done]),
    }


def _complete_fields(setup: _Setup, history: ledger.History, record: Record) -> dict[str, Any]:
    total = setup.schedule.total_steps
    total_tokens = total * setup.config.train.batch_size * setup.config.train.seq_len
    return {
        "started_at": history.started_at,
        "total_elapsed_s": round(record.elapsed_s, 3),
        "total_steps": total,
        "total_tokens": total_tokens,
        "steps_per_sec": round(total / record.elapsed_s, 3),
        "tokens_per_sec": round(total_tokens / record.elapsed_s, 1),
        "final_train_loss": history.train_loss,
        "final_val_loss": history.val_loss,
        "best_val_loss": history.best_val_loss,
        "best_val_step": history.best_val_step,
        "gold_step": None,
    }


def _sets_due(config: Config, done: int, boundaries: set[int]) -> list[str]:
    """Names of the eval sets to measure after `done` updates; boundaries, the end among them, measure all."""
    if done in boundaries:
        return list(config.eval_sources)
    every = config.evalsets.every
    return [name for name, s in config.eval_sources.items() if done % every == 0 and done % (s.every or every) == 0]


def _check_resume(directory: RunDirectory, resume: str | int | None) -> None:
    """Refuse what cannot be resumed, before anything is prepared or created."""
    if resume is None or resume == "latest":
        return
    if isinstance(resume, str) and not resume.isdigit():
        raise InputError(f"--resume {resume}: expected 'latest' or the step of a checkpoint")
    steps = sorted(int(path.name) for path in directory.checkpoints.glob("[0-9]*") if path.name.isdigit())
    if int(resume) not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise InputError(f"--resume {resume}: {directory.path} has no checkpoint of that step; there are: {there}")


def _step_to_resume(checkpoints: Checkpoints, resume: str | int | None) -> int | None:
    if resume != "latest":
        return None if resume is None else int(resume)
    steps = checkpoints.steps()
    return steps[-1] if steps else None


def peak_memory_gb() -> float:
    """Peak memory in GB: of the first device where it tells, else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return round(stats["peak_bytes_in_use"] / 1e9, 3)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts in KiB on Linux
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 3)


class _TrainClock:
    """Seconds spent training since the last metrics row; evals and saves are not counted."""

    def __init__(self):
        self._running_since = time.perf_counter()
        self._seconds = 0.0
        self._steps = 0
        self._compile_s: float | None = None
        self._switching, self._stall_s = False, None

    @contextmanager
    def paused(self, state: TrainState):
        """Around what is not training. Waits for the updates that are under way first: their time is training's."""
        jax.block_until_ready(state.step)
        self._seconds += time.perf_counter() - self._running_since
        try:
            yield
        finally:
            self._running_since = time.perf_counter()

    @contextmanager
    def update(self):
        """Around one update, the wait for its batch included."""
        started = time.perf_counter()
        yield
        waited_s = time.perf_counter() - started
        if self._steps == 0 and self._compile_s is None:
            self._compile_s = waited_s
        if self._switching:
            self._switching, self._stall_s = False, waited_s
        self._steps += 1

    def switched(self) -> None:
        """The next update is the first of another phase."""
        self._switching = True

    def take(self) -> tuple[int, float, dict[str, float]]:
        """(updates, seconds) since the last call, and what is told once: the compile time, a switch's stall."""
        now = time.perf_counter()
        steps, seconds = self._steps, self._seconds + now - self._running_since
        once = {}
        if self._compile_s is not None and self._compile_s >= 0:
            once["first_step_compile_time_s"], self._compile_s = round(self._compile_s, 3), -1.0
        if self._stall_s is not None:
            once["switch_stall_s"], self._stall_s = round(self._stall_s, 6), None
        self._steps, self._seconds, self._running_since = 0, 0.0, now
        return steps, seconds, once


class _StopSignals:
    """SIGINT and SIGTERM ask for a stop after the step; a second one ends the process at once."""

    def __init__(self):
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number, _frame):
        self.received = number
        for n in self._before:
            signal.signal(n, signal.SIG_DFL)
