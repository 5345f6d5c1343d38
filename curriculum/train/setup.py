"""All that a run is made of, built from its config before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from curriculum.config import Config
from curriculum.data.corpus import Corpus, load_corpus
from curriculum.data.tokenizer import Tokenizer
from curriculum.model.loss import nats_per_token
from curriculum.model.model import Model
from curriculum.model.presets import resolve_model
from curriculum.model.transformer import transformer
from curriculum.plan import resolve_schedule
from curriculum.train.checkpoint import Checkpoints
from curriculum.train.feed import Feed
from curriculum.train.mesh import make_mesh, place_batch, place_rows, place_state
from curriculum.train.optimizer import make_optimizer
from curriculum.train.step import TrainState, init_state, make_train_step, tune_malloc, window_for
from evalsets.suite import Suite
from phases.batches import DataPlan
from phases.lr import learning_rate
from phases.schedule import Schedule

EVAL_MICRO_BATCH = 32  # rows; on 2 CPU cores 32 is 1.1x 16, and all windows at once x0.65


@dataclass
class Setup:
    """Data, schedule, model and the compiled functions of one run."""

    config: Config
    corpus: Corpus
    schedule: Schedule
    plan: DataPlan
    model: Model
    rates: np.ndarray  # float64, by update
    feed: Feed
    suite: Suite
    train_step: Callable
    initial_state: Callable[[], TrainState]
    place: Callable[[Any], Any]

    @property
    def content_hashes(self) -> dict[str, str]:
        """What each eval set is, by name."""
        return {name: evalset.content_hash for name, evalset in self.corpus.evalsets.items()}

    def tokens_at(self, step: int) -> int:
        """Token slots consumed in the first `step` updates."""
        return step * self.config.train.batch_size * self.config.train.seq_len

    def restore(self, checkpoints: Checkpoints, step: int, saved_sources: tuple[str, ...]) -> TrainState:
        """The state of a checkpoint whose metrics window was over `saved_sources`."""
        like = self.initial_state()
        window = self.place(window_for(like.window, self.plan.sources, saved_sources))
        state = checkpoints.restore(step, like._replace(window=window))
        return state._replace(window=self.place(window_for(state.window, saved_sources, self.plan.sources)))


def build(
    config: Config,
    store_dir: str | Path,
    tokenizer: Tokenizer | None = None,
    make_model: Callable[[int], Model] | None = None,
) -> Setup:
    """Prepare what is not prepared, and build the rest. `tokenizer`: the one of a run that goes on.

    `make_model(vocab_size)` gives a model of one's own in the place of the config's.
    """
    tune_malloc()
    # A second start reads its programs from here instead of compiling them again.
    jax.config.update("jax_compilation_cache_dir", str(Path(store_dir).absolute() / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

    corpus = load_corpus(config, store_dir, tokenizer)
    num_tokens = {name: len(stream) for name, stream in corpus.tokens.items()}
    schedule = resolve_schedule(config, num_tokens)
    plan = DataPlan(schedule, config.seed, num_tokens, config.train.seq_len)
    model = (make_model or partial(_configured_model, config))(corpus.tokenizer.vocab_size)
    mesh = make_mesh()
    feed = Feed(
        plan,
        corpus.tokens,
        corpus.tokenizer.eot,
        config.train.grad_accum,
        partial(place_batch, mesh),
        scored=corpus.scored,
    )
    suite = Suite(
        list(corpus.evalsets.values()), partial(nats_per_token, model), EVAL_MICRO_BATCH, partial(place_rows, mesh)
    )
    optimizer = make_optimizer(config.optim)
    step = make_train_step(
        model,
        optimizer,
        len(plan.sources),
        grad_clip=config.optim.grad_clip,
        seed=config.seed,
        ema_decay=config.averages.ema_decay,
    )

    def initial_state() -> TrainState:
        state = init_state(
            model.init(config.seed), optimizer, len(plan.sources), ema=config.averages.ema_decay is not None
        )
        return place_state(mesh, state)

    return Setup(
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


def _configured_model(config: Config, vocab_size: int) -> Model:
    """The transformer of the config's `model` section, without dropout where training is to be deterministic."""
    architecture = resolve_model(config.model, vocab_size)
    return transformer(replace(architecture, dropout=0.0) if config.train.deterministic else architecture)
