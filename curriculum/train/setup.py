"""All that a run is made of, built from its config before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash
from jax.sharding import Mesh

from curriculum.adaptation import HfBase, resolved_model
from curriculum.config import Config
from curriculum.config_checks import NO_ADAPTERS
from curriculum.config_shapes import row_problems
from curriculum.data.corpus import Corpus, load_corpus
from curriculum.data.tokenizer import Tokenizer
from curriculum.errors import InputError
from curriculum.model.hf import load_hf
from curriculum.model.lora import adapters_of, frozen_of, joined
from curriculum.model.loss import nats_per_token
from curriculum.model.model import Model, Params, abstract_params, check_model
from curriculum.model.transformer import init_adapters, transformer
from curriculum.plan import Past, continued_schedule, kept_order, replay_schedule
from curriculum.train.abstract import abstract_batch, abstract_of, abstract_on_mesh, num_bytes, zeros
from curriculum.train.checkpoint import Checkpoints, beside_params, load_params
from curriculum.train.device import cache_compiled, device_lines, tune_device
from curriculum.train.feed import Feed
from curriculum.train.frozen import load_frozen
from curriculum.train.guard import with_window
from curriculum.train.mesh import (
    constrain,
    everywhere,
    make_mesh,
    on_mesh,
    place_batch,
    place_rows,
    place_state,
    row_shards,
    rows_here,
    state_shardings,
)
from curriculum.train.optimizer import make_optimizer
from curriculum.train.processes import by_gloo, check_same, first_then_all
from curriculum.train.programs import Programs, StepShape
from curriculum.train.samples import Samples
from curriculum.train.start import Start, check_base, load_base_optimizer
from curriculum.train.step import TrainState, Window, clear_window, init_state, make_train_step, window_for
from evalsets.evalset import EvalSet
from evalsets.suite import Suite
from phases.batches import Batch, DataPlan, Draws
from phases.replay import ReplayRefused
from phases.rollback import judged_from, passed_over
from phases.schedule import Schedule, Segment, SourceSupply, cut, segments_to_json

_NO_ROPE = "is of the config's own models only, not of one that make_model gives; leave it out"
# Of a state: up to here a program that is compiled ahead runs once, on zeros. Of one layer, 32 wide, the first run took
# 30 to 60 ms of a CPU's time, later ones 3 to 5. It takes the state's memory again meanwhile.
WARMED_BYTES = 256 << 20
EVAL_ROWS = 32  # of a micro-batch on a device, at most; on 2 CPU cores 32 is 1.1x 16, and all windows at once x0.65


@dataclass
class Setup:
    """Data, schedule, model and the compiled functions of one run."""

    config: Config
    mesh: Mesh
    corpus: Corpus
    schedule: Schedule
    plan: DataPlan
    model: Model
    past: Past  # what of `schedule` does not come from the config
    branched_from: Mapping[str, Any] | None  # what `curriculum.branch` says of a branch's trunk
    rates: np.ndarray  # float64, by update
    judged_from: np.ndarray  # int32, by update
    feed: Feed
    make_feed: Callable[[DataPlan], Feed]
    suite: Suite  # of the model itself, as `samples`: `suite_at` and `samples_at` know a phase's rope theta
    samples: Samples | None  # None: none are asked for
    model_of: Callable[[float | None], Model]  # on the mesh, by rope theta; None: the model's own
    clear_window: Callable[[Window], Window]  # one dispatch, where array by array they take ten times as long
    lower_update: Callable[[StepShape], jax.stages.Lowered]
    programs: Programs  # of `lower_update`, compiled
    suites: Programs  # what measures with a rope theta of a phase's own, by that
    initial_state: Callable[[], TrainState]
    # By number of sources, and the guard's window_steps (None: as configured): shapes, types and placement, no values.
    abstract_state: Callable[..., TrainState]
    device_lines: list[str]  # for the console
    lineage: dict[str, Any] | None  # the run that this one began from, back to the first
    frozen: Params | None = None  # the parameters that a run has which trains adapters alone
    begins_branch: bool = False  # what goes on from a checkpoint is a branch that begins
    edit: dict[str, Any] | None = None  # what the config changed of the run that goes on, as `schedule_edit` tells it
    # Of each share that this process raised: (step, the schedule and the past before it).
    before_raised: list[tuple[int, Schedule, Past]] = field(default_factory=list)
    _samples: dict[float, Samples] = field(default_factory=dict)  # by rope theta

    @property
    def content_hashes(self) -> dict[str, str]:
        """What each eval set is, by name."""
        return {name: evalset.content_hash for name, evalset in self.corpus.evalsets.items()}

    @property
    def trained(self) -> Params:
        """What is trained of the model, and kept by checkpoints, as shapes: all of it, or its adapters."""
        shapes = abstract_params(self.model)
        return shapes if self.frozen is None else adapters_of(shapes)

    def whole(self, params: Params) -> Params:
        """The model's parameters, as evals and generation take them, from those of a state or from an average."""
        return params if self.frozen is None else joined(self.frozen, params)

    def knobs(self, step: int) -> tuple[np.float32, np.int32]:
        """What update `step` is given beside its batch: the learning rate, and from where on its loss is judged."""
        return np.float32(self.rates[step]), np.int32(self.judged_from[step])

    def shape_at(self, step: int) -> StepShape:
        """The shape of update `step`."""
        return self._shape_of(self.schedule.segment_at(step))

    def update_at(self, step: int) -> Callable[..., TrainState]:
        """Update `step`, compiled: (state, batch, *knobs) -> state. It consumes the state that it is given.

        Raises what the compiler raised.
        """
        update = self.programs[self.shape_at(step)]
        return update if self.frozen is None else partial(update, frozen=self.frozen)

    def shapes_from(self, step: int) -> list[StepShape]:
        """The distinct shapes of the updates from `step` on, in the order in which they are needed."""
        return list(dict.fromkeys(self._shape_of(s) for s in self.schedule.segments if s.end > step))

    def compile_ahead(self, step: int) -> None:
        """Begin to compile in the background what the updates and evals from `step` on need; returns at once."""
        shapes = self.shapes_from(step)
        self.programs.ahead(shapes)
        self.suites.ahead(dict.fromkeys(shape.rope_theta for shape in shapes if shape.rope_theta is not None))

    def _shape_of(self, segment: Segment) -> StepShape:
        return StepShape.of(segment, self.config.grad_accum_of(segment.phase))

    def suite_at(self, step: int) -> Suite:
        """What measures the parameters after `step` updates: with the rope theta of the phase that made them."""
        theta = self.schedule.rope_theta_at(step)
        return self.suite if theta is None else self.suites[theta]

    def samples_at(self, step: int) -> Samples | None:
        """What writes with the parameters after `step` updates."""
        theta = self.schedule.rope_theta_at(step)
        if theta is None or self.samples is None:
            return self.samples
        if theta not in self._samples:
            self._samples[theta] = self.samples.using(self.model_of(theta))
        return self._samples[theta]

    def close(self) -> None:
        """End what goes on beside the run: batches and programs made ahead."""
        self.feed.close()
        self.programs.close()

    def tokens_at(self, step: int) -> int:
        """Token slots consumed in the first `step` updates."""
        return self.schedule.tokens(step)

    def raise_share(
        self, step: int, source: str, factor: float, max_share: float, spared: Collection[str] = ()
    ) -> dict[str, Any]:
        """Replay more of a source from update `step` on to the end of its phase, as `phases.replay` says.

        What `schedule_edit` records of it. Raises ReplayRefused where it cannot be; the schedule is then as it was.
        """
        if self.branched_from and step < self.branched_from["step"]:
            raise ReplayRefused(f"up to step {self.branched_from['step']} the schedule is the trunk's")
        replay = replay_schedule(
            self.config,
            self.corpus.tokens_per_epoch,
            self.schedule,
            self.past,
            step=step,
            source=source,
            factor=factor,
            max_share=max_share,
            spared=spared,
        )
        self.before_raised.append((step, self.schedule, self.past))
        self.replan(replay.schedule, replay.past)
        return {
            "kind": "replay",
            "phase": replay.phase,
            "mixture_before": replay.mixture_before,
            "mixture_after": replay.mixture_after,
            "until": replay.until,
        }

    def pass_over(self, step: int, num_steps: int) -> None:
        """Go on by a schedule without the data of `num_steps` updates from `step` on, as `phases.rollback` says.

        A share that was raised after that step is not: what raised it will come otherwise.
        Raises RollbackRefused where it cannot be; the schedule is then as it was.
        """
        epochs = self.corpus.tokens_per_epoch
        supplies = {n: SourceSupply(epochs[n], s.max_epochs, s.on_exhaust) for n, s in self.config.sources.items()}
        raised_later = [before for before in self.before_raised if before[0] > step]
        _, whole, past = raised_later[0] if raised_later else (step, self.schedule, self.past)
        schedule = passed_over(whole, supplies, step, num_steps)
        phase_end = next(end for _, start, end in schedule.phase_bounds if step < end)
        until = max(phase_end, past.end)
        self.before_raised = [before for before in self.before_raised if before[0] <= step]
        self.replan(schedule, cut(schedule.segments, until))

    def keep_edit(self, segment: Segment) -> None:
        """Let a segment that an edit made begin where the past ends, and last to the end of its phase."""
        schedule, past = kept_order(self.config, self.corpus.tokens_per_epoch, self.past, segment)
        self.replan(schedule, past.segments)

    def of_trunk(self, step: int) -> Mapping[str, Any] | None:
        """What a branch's trunk did after `step` updates, before the two part: {action, edits}, None if nothing.

        action: that of its `eval_regression`; edits: what it recorded as `schedule_edit`.
        """
        if self.branched_from is None or step >= self.branched_from["step"]:
            return None
        return self.branched_from["acts"].get(str(step))

    def phase_ends_at(self, step: int) -> frozenset[int]:
        """The phase ends that are planned after `step` updates: those of its trunk while a branch is it."""
        of_trunks = self.branched_from["phase_ends"] if self.branched_from else []
        return next((frozenset(ends) for until, ends in of_trunks if step <= until), self.schedule.phase_ends)

    def replan(self, schedule: Schedule, past: Sequence[Segment]) -> None:
        """Go on by another schedule of the same sources; the programs that there are stay.

        Batches that were made ahead are dropped. `past` is what of the schedule does not come from the config; the
        checkpoints keep it.
        """
        self.feed.close()
        self.schedule, self.past = schedule, replace(self.past, segments=tuple(past))
        self.plan = _data_plan(self.config, self.corpus, schedule, self.past)
        self.rates = schedule.rates(np.arange(schedule.total_steps))
        self.judged_from = judged_from(schedule)
        self.feed = self.make_feed(self.plan)

    def restore(
        self, checkpoints: Checkpoints, step: int, saved_sources: tuple[str, ...], window_steps: int | None = None
    ) -> TrainState:
        """The state of a checkpoint whose metrics window was over `saved_sources`, and whose guard had `window_steps`.

        None: as many as are configured.
        """
        state = checkpoints.restore(step, self.abstract_state(len(saved_sources), window_steps))
        window = window_for(state.window, saved_sources, self.plan.sources)
        guard = with_window(state.guard, step, self.config.train.window_steps)
        return state._replace(window=place_state(self.mesh, window), guard=place_state(self.mesh, guard))


def build(
    config: Config,
    store_dir: str | Path,
    tokenizer: Tokenizer | None = None,
    make_model: Callable[[int], Model] | None = None,
    start: Start | None = None,
    past: Past | None = None,
    branched_from: Mapping[str, Any] | None = None,
) -> Setup:
    """Prepare what is not prepared, and build the rest. `tokenizer`: the one of a run that goes on.

    `make_model(vocab_size)` gives a model of one's own in the place of the config's, which is then null. `start`: what
    the run begins from, its seed by default. `past` is what stands of its schedule, and `branched_from` where a
    branch's comes from.
    """
    if make_model is not None:
        if config.adaptation.lora is not None:
            raise config.error([("adaptation.lora", NO_ADAPTERS)])
        if given := [f"phases[{i}].rope_theta" for i, p in enumerate(config.phases) if p.rope_theta is not None]:
            raise config.error((path, _NO_ROPE) for path in given)
        config = replace(config, model=None)
    elif config.model is None:
        raise config.error([("model", "got null and no other model; name a preset, or call train(make_model=...)")])
    start, past = start or Start(), past or Past()
    added_flags = tune_device(config.train.deterministic)
    cache_compiled(store_dir)
    mesh = _mesh_of(config)
    corpus = first_then_all(lambda: load_corpus(config, store_dir, tokenizer))
    schedule, past = continued_schedule(config, corpus.tokens_per_epoch, past)
    plan = _data_plan(config, corpus, schedule, past)
    if make_model is None:
        architecture = resolved_model(config, corpus.tokenizer.vocab_size)
        model = transformer(architecture)
    else:
        architecture, model = None, make_model(corpus.tokenizer.vocab_size)
        for micro_step in dict.fromkeys(_micro_steps(config)):
            check_model(model, corpus.tokenizer.vocab_size, *micro_step)
    if start.base is not None:
        check_base(start.base, config, model if start.frozen is None else transformer(replace(architecture, lora=None)))
    frozen, lineage = None, start.lineage
    if start.frozen is not None:
        like = abstract_on_mesh(mesh, frozen_of(abstract_params(model)))
        frozen, lineage = load_frozen(config, architecture, start.frozen, lineage, like)

    def make_feed(plan: DataPlan) -> Feed:
        def shape_at(step: int) -> StepShape:
            segment = plan.schedule.segment_at(step)
            return StepShape.of(segment, config.grad_accum_of(segment.phase))

        def make_batch(step: int, draws: Draws) -> Batch:
            return plan.batch(
                step,
                corpus.streams,
                corpus.tokenizer.eot,
                shape_at(step).A,
                draws,
                mask_boundary_loss=config.packing.mask_boundary_loss,
                train_on_eos=config.packing.train_on_eos,
                rows=rows_here(mesh, shape_at(step).B),
            )

        return Feed(plan, make_batch, lambda step, batch: place_batch(mesh, batch, shape_at(step).B))

    @lru_cache
    def model_of(rope_theta: float | None) -> Model:
        return on_mesh(model if rope_theta is None else transformer(replace(architecture, rope_theta=rope_theta)), mesh)

    suite = make_suite(config, mesh, model, corpus.evalsets.values())
    samples = None
    if config.logging.generate_every:
        samples = Samples(config, mesh, model_of(None), corpus.tokenizer, corpus.evalsets)
    optimizer = make_optimizer(config.optim)
    ema = config.averages.ema_decay is not None

    def abstract_state(num_sources: int, window_steps: int | None = None) -> TrainState:
        sizes = {"num_sources": num_sources, "window_steps": window_steps or config.train.window_steps}
        first_state = partial(init_state, optimizer=optimizer, **sizes, ema=ema)
        trained = abstract_params(model) if frozen is None else adapters_of(abstract_params(model))
        return abstract_on_mesh(mesh, jax.eval_shape(first_state, trained))

    shardings = state_shardings(mesh, abstract_state(len(plan.sources)))

    def initial_state() -> TrainState:
        # Compiled, so that the moments are made where they belong: no device ever holds all of them.
        sizes = {"num_sources": len(plan.sources), "window_steps": config.train.window_steps}
        first_state = partial(init_state, optimizer=optimizer, **sizes, ema=ema)
        compiled = jax.jit(first_state, donate_argnums=0, out_shardings=shardings)
        base = start.base
        if frozen is not None:
            return compiled(place_state(mesh, init_adapters(architecture, config.seed)))
        if isinstance(base, HfBase):
            like = abstract_state(len(plan.sources)).params
            return compiled(load_hf(base.folder, architecture, like))
        if base is not None:
            like = abstract_state(len(base.ledger["sources"]), base.ledger["window_steps"])
            state = compiled(load_params(base.checkpoint / "params", like.params))
            if not config.adaptation.keep_optimizer:
                return state
            return state._replace(opt_state=load_base_optimizer(base, beside_params(like)))
        # The run takes its parameters over; what a model of one's own keeps of them stays its own.
        params = jax.tree.map(lambda p: np.array(p) if isinstance(p, jax.Array) else p, model.init(config.seed))
        return compiled(place_state(mesh, params))

    beside = {} if frozen is None else {"frozen": frozen}

    def lower_update(shape: StepShape) -> jax.stages.Lowered:
        train_step = make_train_step(
            model_of(shape.rope_theta),
            optimizer,
            len(plan.sources),
            grad_clip=config.optim.grad_clip,
            seed=config.seed,
            document_mask=config.packing.document_mask,
            deterministic=config.train.deterministic is True,
            ema_decay=config.averages.ema_decay,
            sigmas=config.train.skip_updates and config.train.skip_updates.sigmas,
            judge_from_steps=config.train.skip_updates.judge_from_steps if config.train.skip_updates else 0,
            diverged_after=config.train.diverged_after,
            place_grads=partial(constrain, mesh),
        )
        inputs = [abstract_state(len(plan.sources)), abstract_batch(mesh, shape), np.float32(0), np.int32(0)]
        jitted = jax.jit(train_step, donate_argnums=0, out_shardings=shardings)
        return jitted.lower(*inputs, **jax.tree.map(abstract_of, beside))

    def warm_update(shape: StepShape, update: Callable) -> None:
        like = abstract_state(len(plan.sources))
        if mesh.size > 1 or num_bytes(like) > WARMED_BYTES:  # beside a run's own no other may talk between devices
            return
        state, batch = (jax.tree.map(zeros, shapes) for shapes in (like, abstract_batch(mesh, shape)))
        jax.block_until_ready(update(state, batch, np.float32(0), np.int32(0), **beside).step)

    def suite_of(rope_theta: float) -> Suite:
        measuring = suite.using(partial(nats_per_token, model_of(rope_theta)))
        if mesh.size == 1:  # over several devices the averages of parameters may lie otherwise than they do
            params = abstract_state(len(plan.sources)).params
            measuring.compile(params if frozen is None else joined(jax.tree.map(abstract_of, frozen), params))
        return measuring

    programs = Programs(lambda shape: lower_update(shape).compile(), warm_update)

    check_same(lambda: _agreed(config, corpus, schedule, lineage))
    return Setup(
        config=config,
        mesh=mesh,
        corpus=corpus,
        schedule=schedule,
        plan=plan,
        model=model,
        past=past,
        branched_from=branched_from,
        rates=schedule.rates(np.arange(schedule.total_steps)),
        judged_from=judged_from(schedule),
        feed=make_feed(plan),
        make_feed=make_feed,
        suite=suite,
        samples=samples,
        model_of=model_of,
        clear_window=jax.jit(clear_window, out_shardings=shardings.window),
        lower_update=lower_update,
        programs=programs,
        suites=Programs(suite_of, of="the eval with rope_theta", beside=programs),
        initial_state=initial_state,
        abstract_state=abstract_state,
        device_lines=device_lines(added_flags),
        lineage=lineage,
        frozen=frozen,
    )


def _agreed(config: Config, corpus: Corpus, schedule: Schedule, lineage: Mapping[str, Any] | None) -> dict[str, str]:
    """Digests of what every process of a run must have alike, by what it is."""
    found = {
        **{f"the config's {section}": value for section, value in config.to_json().items()},
        "the tokenizer": corpus.tokenizer.fingerprint,
        "the training text": {name: details["stream"] for name, details in corpus.details.items()},
        "the eval sets": {name: evalset.content_hash for name, evalset in corpus.evalsets.items()},
        "the schedule": segments_to_json(schedule.segments),
        "what the run begins from": lineage,
    }
    return {name: xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode()) for name, value in found.items()}


def make_suite(config: Config, mesh: Mesh, model: Model, evalsets: Iterable[EvalSet]) -> Suite:
    """What measures eval sets, in training and later: the same compiled function over the same micro-batches."""
    measured = partial(nats_per_token, on_mesh(model, mesh))
    rows = _eval_rows(config, mesh)
    return Suite(list(evalsets), measured, rows, partial(place_rows, mesh), everywhere(mesh), by_gloo())


def _data_plan(config: Config, corpus: Corpus, schedule: Schedule, past: Past) -> DataPlan:
    seed = config.seed if past.seed is None else past.seed
    return DataPlan(schedule, seed, corpus.tokens_per_epoch, config.longest_seq_len)


def _eval_rows(config: Config, mesh: Mesh) -> int:
    """Rows of an eval micro-batch: at most twice the tokens of the largest micro-step, which keeps far more of each.

    So what makes updates smaller (`train.grad_accum`) makes an eval smaller as well.
    """
    shards = row_shards(mesh)
    micro_step_tokens = max(num_rows * seq_len for num_rows, seq_len in _micro_steps(config))
    rows = min(EVAL_ROWS * shards, max(1, 2 * micro_step_tokens // config.eval_seq_len))
    return -(-rows // shards) * shards


def _mesh_of(config: Config) -> Mesh:
    """The mesh of a config, or InputError with its place in the file."""
    try:
        mesh = make_mesh(config.mesh)
    except InputError as error:
        raise config.error(("mesh", problem) for problem in error.problems) from None
    if problems := list(row_problems(config.train, config.phases, row_shards(mesh))):
        raise config.error(problems)
    return mesh


class _MicroStep(NamedTuple):
    num_rows: int
    seq_len: int


def _micro_steps(config: Config) -> list[_MicroStep]:
    """The micro-steps of the config's phases."""
    batch_size, seq_len = config.train.batch_size, config.train.seq_len
    return [
        _MicroStep((phase.batch_size or batch_size) // config.grad_accum_of(phase.name), phase.seq_len or seq_len)
        for phase in config.phases
    ]
