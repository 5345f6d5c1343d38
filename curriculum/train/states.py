"""The state of a run: its shapes and placement, the first state, and a state restored from a checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from curriculum.config import Config
from curriculum.model.formats.hf import load_hf
from curriculum.model.lora import adapters_of, joined
from curriculum.model.model import Model, Params, abstract_params, shapes_by_name
from curriculum.model.presets import ModelConfig
from curriculum.model.transformer import init_adapters
from curriculum.schema.adaptation import Base, HfBase
from curriculum.train.checkpoints.arrays import load_params
from curriculum.train.checkpoints.folder import beside_params, restore
from curriculum.train.guard import with_window
from curriculum.train.kept import keeping
from curriculum.train.mesh import abstract_on_mesh, place_state, state_shardings
from curriculum.train.optimizer import make_optimizer
from curriculum.train.step import TrainState, init_state, window_for


@dataclass
class States:
    """Makes the states of a run, whose parameters are those of `model` or, beside `frozen` ones, the adapters alone."""

    config: Config
    mesh: Mesh
    model: Model
    architecture: ModelConfig | None  # None: a custom model
    frozen: Params | None  # None: all parameters are trained
    base: Base | HfBase | None  # where the first parameters come from; None: the seed
    sources: Sequence[str]  # the order of the sources in a metrics window

    @cached_property
    def optimizer(self) -> Any:
        return make_optimizer(self.config.optim)

    @property
    def own(self) -> bool:
        """Whether model and optimizer are the program's own."""
        return self.architecture is not None and self.config.optim.users_own is None

    @cached_property
    def like(self) -> TrainState:
        """Shapes, types and placement of a state, without values."""
        return self._like(len(self.sources), self.config.train.window_steps)

    @property
    def trained_shapes(self) -> dict[str, list[int]]:
        """The shape of each parameter that is trained, by its dotted name."""
        return shapes_by_name(self.like.params)

    @cached_property
    def shardings(self) -> TrainState:
        return state_shardings(self.mesh, self.like)

    def whole(self, params: Params) -> Params:
        """The whole model's parameters, as evals and generation take them, from those of a state or of an average."""
        return params if self.frozen is None else joined(self.frozen, params)

    def first(self) -> TrainState:
        # Compiled, so that the moments are made in their place: no device ever holds all of them.
        begun = self._begun(len(self.sources), self.config.train.window_steps)
        compiled = jax.jit(begun, donate_argnums=0, out_shardings=self.shardings)
        if self.frozen is not None:
            return compiled(place_state(self.mesh, init_adapters(self.architecture, self.config.seed)))
        if isinstance(self.base, HfBase):
            return compiled(load_hf(self.base.folder, self.architecture, self.like.params))
        if self.base is not None:
            saved = self.base.ledger
            like = self._like(len(saved["sources"]), saved["window_steps"])
            state = compiled(load_params(self.base.checkpoint / "params", like.params))
            if not self.config.adaptation.keep_optimizer:
                return state
            beside = load_params(self.base.checkpoint / "train", beside_params(like))
            return state._replace(opt_state=beside["opt_state"])
        # Copied, as the run donates its parameters and a custom model may keep references to its own.
        params = self.model.init(self.config.seed)
        params = jax.tree.map(lambda p: np.array(p) if isinstance(p, jax.Array) else p, params)
        return compiled(place_state(self.mesh, params))

    def restored(self, checkpoint: Path, sources: Sequence[str], window_steps: int) -> TrainState:
        """The state in a checkpoint's folder, with this run's metrics window and guard.

        It was saved with a metrics window over `sources` and a guard of `window_steps`.
        """
        state = restore(checkpoint, self._like(len(sources), window_steps))
        window = window_for(state.window, sources, self.sources)
        guard = with_window(state.guard, int(checkpoint.name), self.config.train.window_steps)
        return state._replace(window=place_state(self.mesh, window), guard=place_state(self.mesh, guard))

    def _like(self, num_sources: int, window_steps: int) -> TrainState:
        params = abstract_params(self.model)
        trained = params if self.frozen is None else adapters_of(params)
        return abstract_on_mesh(self.mesh, jax.eval_shape(self._begun(num_sources, window_steps), trained))

    def _begun(self, num_sources: int, window_steps: int) -> Callable[[Params], TrainState]:
        """A function from parameters to the first state, whose guard looks back `window_steps` updates."""
        sizes = {"num_sources": num_sources, "window_steps": window_steps}
        ema = self.config.averages.ema_decay is not None
        return keeping(_begin, self.own)(self.architecture, optimizer=self.optimizer, ema=ema, **sizes)


def _begin(_: ModelConfig | None, **settings: Any) -> Callable[[Params], TrainState]:
    """A function of its own for each architecture: jax keeps all that it has compiled of one."""
    return partial(init_state, **settings)
