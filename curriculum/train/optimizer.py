"""The optimizers and their settings. Importing this module imports nothing heavy: the config reads them here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from curriculum.errors import InputError, no_such
from curriculum.train.kept import kept

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class AdamConfig:
    """AdamW's settings beyond the keys of `optim` itself."""

    nesterov: bool = False
    """The first moment looks one update ahead, as in NAdam."""


@dataclass(frozen=True)
class LionConfig:
    """Lion (arXiv:2302.06675); it wants a learning rate 3 to 10 times below AdamW's."""

    b1: float = 0.9
    """Share of the momentum in the update, of which only the sign is taken; the rest is the gradient."""
    b2: float = 0.99
    """Decay of the momentum."""


@dataclass(frozen=True)
class MuonConfig:
    """Muon for 2-D projections, another optimizer for the rest."""

    lr_scale: float = 1.0
    """Multiplies the learning rate of muon's arrays, in their update and in their decay."""
    weight_decay_mult: float = 1.0
    """Multiplies `optim.weight_decay` for muon's arrays."""
    consistent_rms: float | None = 0.2
    """Root mean square of an update at a rate of 1, whatever its shape; 0.2 is about AdamW's, so AdamW's learning
    rate fits here too. null: an orthogonal matrix times sqrt(max(1, outputs / inputs)).
    """
    allow_all_2d: bool = False
    """Apply muon to every 2-D array, including token and position embeddings and the head."""
    allow_tied_embed: bool = False
    """Apply muon also to an embedding that doubles as the head."""
    momentum: float = 0.95
    """Decay of the mean of the gradients that is made orthogonal."""
    ns_steps: int = 5
    """Newton-Schulz iterations towards an orthogonal matrix."""
    nesterov: bool = True
    """The mean of the gradients looks one update ahead."""
    rest: Literal["adamw", "lion"] = "adamw"
    """The optimizer of all other arrays, with its own keys of `optim`."""


@dataclass(frozen=True)
class SophiaConfig:
    """Sophia (arXiv:2305.14342) with its Gauss-Newton-Bartlett estimate of the Hessian's diagonal."""

    b1: float = 0.965
    """Decay of the momentum."""
    b2: float = 0.99
    """Decay of the Hessian's average, from one estimate to the next."""
    gamma: float = 0.05
    """Momentum is divided by gamma times the Hessian: larger means fewer elements clipped at 1, and smaller steps."""
    eps: float = 1e-12
    """Smallest divisor."""
    every: int = 10
    """Updates from one estimate to the next; one costs about as much as a gradient."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer part of the `optim` section."""

    name: str = "adamw"
    """The update rule."""
    b1: float = 0.9
    """AdamW: decay of the first moment."""
    b2: float = 0.95
    """AdamW: decay of the second moment."""
    eps: float = 1e-8
    """AdamW: added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices, embeddings among them; vectors (biases, norm scales) are not decayed."""
    grad_clip: float = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""
    adam: AdamConfig = field(default_factory=AdamConfig)
    """More settings of adamw."""
    lion: LionConfig = field(default_factory=LionConfig)
    """Settings of lion."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """Settings of muon."""
    sophia: SophiaConfig = field(default_factory=SophiaConfig)
    """Settings of sophia."""

    @property
    def users_own(self) -> str | None:
        """The name of its optimizer, or of muon's `rest`, if that is not this module's; None if both are."""
        own = (name for name in self._chosen if name not in _SHIPPED or OPTIMIZERS.get(name) is not _SHIPPED[name])
        return next(own, None)

    @property
    def _chosen(self) -> tuple[str, ...]:
        return (self.name, self.muon.rest) if self.name == "muon" else (self.name,)

    def problems(self) -> list[tuple[str, str]]:
        """Problems with the numbers, and keys that nothing would read, as (field, message) pairs."""
        problems = []
        for path, (expected, fits) in _RANGES.items():
            number = attrgetter(path)(self)
            if number is not None and not fits(number):
                problems.append((path, f"got {number}, expected {expected}"))
        for name, rule in OPTIMIZERS.items():
            if not isinstance(rule, Rule):
                raise InputError(f"OPTIMIZERS[{name!r}]: got {rule!r}, expected Rule(FUNCTION)")
        read = [OPTIMIZERS[name].reads if name in OPTIMIZERS else None for name in self._chosen]
        if None in read:  # it may read any key
            return problems
        for key in dict.fromkeys(key for rule in OPTIMIZERS.values() for key in rule.reads or ()):
            if not any(key in keys for keys in read) and getattr(self, key) != getattr(OptimConfig(), key):
                readers = [name for name, rule in OPTIMIZERS.items() if key in (rule.reads or ())]
                message = f"applies to {' and '.join(readers)} only, but the optimizer is {' with '.join(self._chosen)}"
                problems.append((key, f"{message}; leave it out"))
        return problems


# In float32 a number beyond these bounds is 1, infinite or 0.
_BELOW_1, _LARGEST, _SMALLEST = 0.9999999, 3.4e38, 1.2e-38
_SHARE = f"0 to {_BELOW_1}", lambda number: 0 <= number <= _BELOW_1
_POSITIVE = f"{_SMALLEST:g} to {_LARGEST:g}", lambda number: _SMALLEST <= number <= _LARGEST
_RANGES = {
    **dict.fromkeys(("b1", "b2", "lion.b1", "lion.b2", "muon.momentum", "sophia.b1", "sophia.b2"), _SHARE),
    "grad_clip": (f"0, or {_POSITIVE[0]}", lambda number: number == 0 or _POSITIVE[1](number)),
    # Beyond these bounds an update ruins the parameters, and only the next update would show it.
    **dict.fromkeys(("weight_decay", "muon.weight_decay_mult"), ("0 to 100", lambda number: 0 <= number <= 100)),
    "muon.lr_scale": ("1e-06 to 1000", lambda number: 1e-6 <= number <= 1000),
    **dict.fromkeys(("eps", "muon.consistent_rms", "sophia.gamma", "sophia.eps"), _POSITIVE),
    "muon.ns_steps": ("1 to 20", lambda number: 1 <= number <= 20),
    "sophia.every": ("1 to 1000000000", lambda number: 1 <= number <= 10**9),
}


class Rule(NamedTuple):
    """An optimizer that `optim.name` may name.

    make: gives an optax chain for a learning rate of 1, so with `optax.scale(-1.0)` at its end; it may read any key of
      `optim`. `mask=matrices` selects the arrays to decay.
    moments: float32 numbers of its state per parameter, for the memory estimate; None: not known.
    reads: the keys of `optim` that it reads and some other rule does not; None: not known.
    layout: the settings, besides the name, that determine which arrays its state has.
    """

    make: Callable[[OptimConfig], optax.GradientTransformation]
    moments: float | None = None
    reads: tuple[str, ...] | None = None
    layout: tuple[str, ...] = ()


def make_optimizer(config: OptimConfig) -> optax.GradientTransformationExtraArgs:
    """The update rule without its learning rate.

    Its updates are for a learning rate of 1: the step multiplies them by its rate and adds them to the parameters. So
    the rate is an input of the step, and a change of it compiles nothing. Clipping is the step's too, which has the
    gradient's norm at hand. All rules are called as `update(grads, opt_state, params, hessian_diagonal=fn)`. `fn()`
    returns a tree like the parameters, an estimate of the diagonal of the loss's Hessian; only rules that use one
    (sophia) call it. Moments are stored in trees with the keys of the parameters.

    Equal settings of this module's rules give the same functions (`curriculum.train.kept`). Raises InputError if there
    is no rule of that name.
    """
    import optax

    if config.name not in OPTIMIZERS:
        raise InputError(f"optim.name: {no_rule(config.name)}")
    if config.users_own is not None:
        made = OPTIMIZERS[config.name].make(config)
        if not (hasattr(made, "init") and hasattr(made, "update")):
            raise InputError(f"OPTIMIZERS[{config.name!r}]: its function gave {made!r}, expected a chain of optax")
        return optax.with_extra_args_support(made)
    settings = {key.name: getattr(config, key.name) for key in fields(OptimConfig)}
    return _own_rule(OptimConfig(**settings))


def no_rule(name: str) -> str:
    of_ones_own = "one of your own goes into OPTIMIZERS of curriculum.train.optimizer, from Python"
    return f"{no_such('optimizer', name, OPTIMIZERS)}; {of_ones_own}"


@kept
def _own_rule(config: OptimConfig) -> optax.GradientTransformationExtraArgs:
    import optax

    return optax.with_extra_args_support(_SHIPPED[config.name].make(config))


def adamw(config: OptimConfig) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101), decaying `matrices` only."""
    import optax

    nesterov, decay = config.adam.nesterov, config.weight_decay
    return optax.adamw(1.0, config.b1, config.b2, config.eps, weight_decay=decay, mask=matrices, nesterov=nesterov)


def lion(config: OptimConfig) -> optax.GradientTransformation:
    """Lion (arXiv:2302.06675), decaying `matrices` only."""
    import optax

    return optax.lion(1.0, config.lion.b1, config.lion.b2, weight_decay=config.weight_decay, mask=matrices)


def muon(config: OptimConfig) -> optax.GradientTransformation:
    """Muon (kellerjordan.github.io/posts/muon, scaled as in arXiv:2502.16982) and `rest`, split by `muon_partition`.

    Matrices of muon are [inputs, outputs]. `init` raises InputError if the model has none.
    """
    import jax
    import optax

    own = config.muon

    def axes(updates):  # for optax None means "all are matrices", but then it fails on a tree
        return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(0, 1), updates)

    def by_shape(update):
        inputs, outputs = update.shape
        if own.consistent_rms is None:
            return update * max(1, outputs / inputs) ** 0.5
        # An orthogonal [inputs, outputs] matrix has a root mean square of max(inputs, outputs)^-0.5.
        return update * own.consistent_rms * max(inputs, outputs) ** 0.5

    projections = optax.chain(
        optax.contrib.scale_by_muon(
            ns_steps=own.ns_steps, beta=own.momentum, nesterov=own.nesterov, weight_dimension_numbers=axes
        ),
        optax.stateless_with_tree_map(lambda update, _: by_shape(update)),
        optax.add_decayed_weights(config.weight_decay * own.weight_decay_mult),
        optax.scale(-own.lr_scale),
    )
    rest = OPTIMIZERS[own.rest].make(config)
    return optax.partition({"muon": projections, "rest": rest}, lambda params: muon_partition(params, own))


def sophia(config: OptimConfig) -> optax.GradientTransformation:
    """Sophia (arXiv:2305.14342), decaying `matrices` only. Its update needs `hessian_diagonal`."""
    import optax

    from curriculum.train.sophia import scale_by_sophia

    own = config.sophia
    return optax.chain(
        scale_by_sophia(own.b1, own.b2, own.gamma, own.eps, own.every),
        optax.add_decayed_weights(config.weight_decay, mask=matrices),
        optax.scale(-1.0),
    )


# To add an optimizer, write a function of OptimConfig and add a line here. Settings of its own are a dataclass, a field
# of OptimConfig, and their ranges in _RANGES. To only try one, from Python: OPTIMIZERS["mine"] = Rule(mine).
OPTIMIZERS = {
    "adamw": Rule(adamw, moments=2, reads=("b1", "b2", "eps", "adam")),
    "lion": Rule(lion, moments=1, reads=("lion",)),
    "muon": Rule(muon, moments=1, reads=("muon",), layout=("muon.rest", "muon.allow_all_2d", "muon.allow_tied_embed")),
    "sophia": Rule(sophia, moments=2, reads=("sophia",)),
}
_SHIPPED = dict(OPTIMIZERS)


def matrices(params: Any) -> Any:
    """True for each array of two or more axes, token and position embeddings included, as in GPT-2 trainers."""
    import jax

    return jax.tree.map(lambda array: array.ndim >= 2, params)


def muon_partition(params: Any, config: MuonConfig) -> Any:
    """A tree like `params` with "muon" for each array that muon takes and "rest" for the others.

    Muon takes the arrays of exactly two axes whose path has no part named `embed`, `embedding`, `positions` or `head`;
    with `allow_all_2d` those too; with `allow_tied_embed` also the embedding of a model without a `head`. Raises
    InputError if nothing is left for muon.
    """
    import jax

    def parts(path):
        return set(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))

    has_head = any("head" in parts(path) for path, _ in jax.tree.leaves_with_path(params))

    def label(path, array):
        special = parts(path) & {"embed", "embedding", "positions", "head"}
        is_tied = special <= {"embed", "embedding"} and not has_head
        allowed = not special or config.allow_all_2d or (config.allow_tied_embed and is_tied)
        return "muon" if array.ndim == 2 and allowed else "rest"

    labels = jax.tree.map_with_path(label, params)
    if "muon" not in jax.tree.leaves(labels):
        raise InputError(
            "optim.name: muon has nothing to do: no array of the model has two axes and a path without embed, "
            "embedding, positions and head; choose another optimizer, or set optim.muon.allow_all_2d: true"
        )
    return labels


def state_layout(config: OptimConfig) -> dict[str, Any]:
    """The settings that determine which arrays the optimizer's state has; the ledger keeps them."""
    return {name: attrgetter(name)(config) for name in ("name", *OPTIMIZERS[config.name].layout)}
