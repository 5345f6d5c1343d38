"""The compiled functions of a run: its updates, its evals, and its samples."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from curriculum.config import Config
from curriculum.data.corpus import Corpus
from curriculum.model.formulation import BY_BACKEND, Formulation, backend
from curriculum.model.loss import score_targets
from curriculum.model.model import Model
from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import transformer
from curriculum.train.kept import keeping, kept
from curriculum.train.mesh import ROW_AXES, everywhere, on_mesh, place_rows, place_state, row_shards, zeros
from curriculum.train.programs import Programs, StepShape, needed_bytes
from curriculum.train.samples import Samples
from curriculum.train.states import States
from curriculum.train.step import TrainState, UpdateKnobs, clear_window, make_train_step
from evalsets.evalset import EvalSet
from evalsets.suite import Suite, SumWindows, summed_by_window
from phases.batches import Batch

# Up to this size of a state, a program that is compiled ahead is run once, on zeros. With one layer of width 32 the
# first run took 30 to 60 ms of CPU time, later ones 3 to 5. Meanwhile it needs the memory of a second state.
WARMED_BYTES = 256 << 20
# Most rows of an eval micro-batch per device. On 2 CPU cores 32 rows have 1.1 times the speed of 16, and all windows at
# once 0.65 times.
EVAL_ROWS = 32


class Compiled:
    """The compiled functions of a run, shared by all phases of the same shape and rope theta.

    updates: by shape, (state, batch, *knobs) -> state. The state passed in is donated.
    suites: what measures the eval sets, by the rope theta of a phase, None for the model's own. They take parameters
        that are placed as in a state.
    samples: what generates text, by rope theta as well; only if `logging.generate_every` is set.
    clear_window: empties the metrics window in one dispatch, in a tenth of the time of one dispatch per array.
    in_background: whether programs may be compiled, and run for the first time, while others run. Not on an NVIDIA
        card: for the first run of a program with its flash attention, cuDNN records what is launched on the run's
        stream, whoever launches it, and throws it away (`warmup` of cudnn-frontend). Beside a batch that was being
        placed this ended runs on an H200. And the compiler times kernels there, which want the card to themselves.

    Raises InputError if the model cannot generate or prompts of `logging.generate` are unusable.
    """

    def __init__(self, states: States, corpus: Corpus):
        config, self._states = states.config, states
        self.in_background = backend() != "gpu"
        self._have_run: set[StepShape] = set()  # of those that `make_ready` was asked for
        self.updates = Programs(self._update, self._warm)
        self.suites = Programs(self._suite, of="the eval with rope_theta", beside=self.updates)
        self.samples = Programs(self._samples, of="the samples with rope_theta", beside=self.updates)
        self.clear_window = jax.jit(clear_window, out_shardings=states.shardings.window)
        self._own_suite = make_suite(config, states.mesh, states.model, corpus.evalsets.values())
        self._own_samples = None
        if config.logging.generate_every:
            self._own_samples = Samples(config, states.mesh, self._model(None), corpus.tokenizer, corpus.evalsets)

    def ahead(self, shapes: Iterable[StepShape]) -> None:
        """Start compiling in the background what updates, evals and samples of these shapes need; returns at once."""
        for shape in shapes:  # in the order in which they are needed
            self.updates.ahead([shape])
            self.suites.ahead([shape.rope_theta])
            if self._own_samples is not None:
                self.samples.ahead([shape.rope_theta])

    def make_ready(self, shapes: Iterable[StepShape], state: TrainState) -> TrainState:
        """Compile what these shapes need, run each update and each eval once, and return the state as it was.

        Samples are compiled only: those of `transformer` take plain attention.

        An update without a valid token changes nothing but the step, the skipped updates and the guard, which are put
        back.
        """
        before = {name: jax.device_get(getattr(state, name)) for name in ("step", "skipped_updates", "guard")}
        for shape in shapes:
            if shape not in self._have_run:
                nothing = jax.tree.map(zeros, abstract_batch(self._states.mesh, shape))
                state = jax.block_until_ready(self.updates[shape](state, nothing, *UpdateKnobs()))
                self.suites[shape.rope_theta].run_once(self._states.whole(state.params))
                if self._own_samples is not None:
                    self.samples[shape.rope_theta]
                self._have_run.add(shape)
        return state._replace(**{name: place_state(self._states.mesh, part) for name, part in before.items()})

    def close(self) -> None:
        """Start no more compilations in the background."""
        for programs in (self.updates, self.suites, self.samples):
            programs.close()

    def lower_update(self, shape: StepShape) -> jax.stages.Lowered:
        """The lowered update of a shape, as the compiler gets it."""
        states, config, mesh = self._states, self._states.config, self._states.mesh
        train_step = keeping(make_train_step, states.own)(
            self._model(shape.rope_theta),
            states.optimizer,
            len(states.sources),
            grad_clip=config.optim.grad_clip,
            document_mask=config.packing.document_mask,
            deterministic=config.train.deterministic is True,
            ema_decay=config.averages.ema_decay,
            skip_updates=config.train.skip_updates,
            diverged_after=config.train.diverged_after,
            mesh=mesh,
        )
        inputs = [states.like, abstract_batch(mesh, shape), *UpdateKnobs()]
        frozen = {} if states.frozen is None else {"frozen": states.frozen}
        return jax.jit(train_step, donate_argnums=0, out_shardings=states.shardings).lower(*inputs, **frozen)

    def update_bytes(self, shape: StepShape) -> int:
        """Bytes of a device's memory that an update of a shape needs, as the compiler counts them."""
        update = self.updates[shape]
        return needed_bytes(update.func if isinstance(update, partial) else update)

    def _update(self, shape: StepShape) -> Callable[..., TrainState]:
        update, frozen = self.lower_update(shape).compile(), self._states.frozen
        return update if frozen is None else partial(update, frozen=frozen)

    def _warm(self, shape: StepShape, update: Callable[..., TrainState]) -> None:
        mesh, like = self._states.mesh, self._states.like
        num_bytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(like))
        if mesh.size > 1 or num_bytes > WARMED_BYTES:  # no second program may run collectives beside the run's
            return
        state, batch = (jax.tree.map(zeros, shapes) for shapes in (like, abstract_batch(mesh, shape)))
        jax.block_until_ready(update(state, batch, *UpdateKnobs()).step)

    def _suite(self, rope_theta: float | None) -> Suite:
        sum_windows = keeping(_sum_windows, self._states.own)
        suite = self._own_suite.using(sum_windows(score_targets, self._model(rope_theta)))
        suite.compile(self._states.whole(self._states.like.params))
        return suite

    def _samples(self, rope_theta: float | None) -> Samples:
        samples = self._own_samples.using(self._model(rope_theta))
        samples.compile(self._states.whole(self._states.like.params))
        return samples

    def _model(self, rope_theta: float | None) -> Model:
        """The model on the mesh, with this rope theta; None: its own."""
        architecture, mesh = self._states.architecture, self._states.mesh
        if architecture is None:
            return on_mesh(self._states.model, mesh)
        if rope_theta is not None:
            architecture = replace(architecture, rope_theta=rope_theta)
        return _transformer_on(architecture, mesh, BY_BACKEND[backend()])


def abstract_batch(mesh: Mesh, shape: StepShape) -> Batch:
    A, B, T, _ = shape
    lying = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec(None, ROW_AXES)))
    ids_ABT, scored_ABT = lying((A, B, T), np.int32), lying((A, B, T), np.bool_)
    return Batch(ids_ABT, ids_ABT, scored_ABT, ids_ABT, lying((A, B), np.int32))


@kept
def _transformer_on(architecture: ModelConfig, mesh: Mesh, formulation: Formulation) -> Model:
    """The transformer on a mesh; `formulation` is what it is computed by, so that another one is another model."""
    return on_mesh(transformer(architecture), mesh)


def _sum_windows(score_targets: Callable, model: Model) -> SumWindows:
    return summed_by_window(partial(score_targets, model))


def make_suite(config: Config, mesh: Mesh, model: Model, evalsets: Iterable[EvalSet]) -> Suite:
    """The suite that measures eval sets, in training and later: the same compiled function and micro-batches."""
    measured = partial(score_targets, on_mesh(model, mesh))
    rows = _eval_rows(config, mesh)
    # On CPUs only one eval with collectives may be under way. The devices of a process share one thread per core, and
    # hold it while they wait for each other: dozens of evals on one device hold all threads, and nothing proceeds.
    # Between processes gloo confuses the messages of two evals, and all wait forever.
    one_at_a_time = mesh.size > 1 and jax.default_backend() == "cpu"
    return Suite(list(evalsets), measured, rows, partial(place_rows, mesh), everywhere(mesh), one_at_a_time)


def _eval_rows(config: Config, mesh: Mesh) -> int:
    """Rows of an eval micro-batch: at most twice the tokens of the largest micro-step, which keeps far more per token.

    So `train.grad_accum`, which makes updates smaller, makes evals smaller too.
    """
    shards = row_shards(mesh)
    micro_step_tokens = max(num_rows * seq_len for num_rows, seq_len in micro_steps(config))
    rows = min(EVAL_ROWS * shards, max(1, 2 * micro_step_tokens // config.eval_seq_len))
    return -(-rows // shards) * shards


def micro_steps(config: Config) -> list[tuple[int, int]]:
    """The distinct (rows, tokens per row) of the micro-steps of all phases."""
    batch_size, seq_len = config.train.batch_size, config.train.seq_len
    found = (
        ((phase.batch_size or batch_size) // config.grad_accum_of(phase.name), phase.seq_len or seq_len)
        for phase in config.phases
    )
    return list(dict.fromkeys(found))
