"""The optimizer. Nothing heavy is imported with this module: the config reads its settings here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer part of the `optim` section."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    name: Literal["adamw"] = "adamw"
    """The update rule."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices, embeddings among them; vectors (biases, norm scales) are not decayed."""
    grad_clip: float = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""

    def problems(self) -> list[tuple[str, str]]:
        """What is wrong with the numbers: (field, message) pairs."""
        problems = []
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                problems.append((name, f"got {getattr(self, name)}, expected 0 or more and below 1"))
        for name in ("weight_decay", "grad_clip"):
            if not 0 <= getattr(self, name) < math.inf:
                problems.append((name, f"got {getattr(self, name)}, expected a finite number, 0 or more"))
        if not 0 < self.eps < math.inf:
            problems.append(("eps", f"got {self.eps}, expected a finite number above 0"))
        return problems


def make_optimizer(config: OptimConfig) -> optax.GradientTransformationExtraArgs:
    """The update rule without its learning rate.

    Its updates are those of a learning rate of 1, to be multiplied by the rate of the step and added to the
    parameters: so the rate is an array of the step's, and a change of rate compiles nothing. Clipping is the
    step's too, which has the gradient's norm at hand.
    """
    import optax

    return optax.with_extra_args_support(adamw(config.b1, config.b2, config.eps, config.weight_decay))


def adamw(b1: float, b2: float, eps: float, weight_decay: float) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) at a learning rate of 1, decaying `matrices` only."""
    import optax

    return optax.chain(
        optax.scale_by_adam(b1, b2, eps),
        optax.add_decayed_weights(weight_decay, mask=matrices),
        optax.scale(-1.0),
    )


def matrices(params: Any) -> Any:
    """True for each array of two or more axes, token and position embeddings included, as GPT-2 trainers do."""
    import jax

    return jax.tree.map(lambda array: array.ndim >= 2, params)
