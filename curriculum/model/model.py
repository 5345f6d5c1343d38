"""A language model as the trainer sees it: pure functions over a nested dict of arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

Params = Any  # nested dict of float32 arrays, keyed by strings


@dataclass(frozen=True)
class Model:
    """What training, evals and checkpoints need of a model, and all that they know of one.

    `init(seed)`: the first parameters, float32 arrays on the host.

    `forward(params, tokens_BT, segment_ids_BT, keys_B)`: features_BTD. Position t may depend on the tokens 0..t of
    its row only. `segment_ids_BT` is None, or the mask of `packing.document_mask`: then position t may depend on its
    own document only, neighbours of equal id being one document. `keys_B` is a random key a row in training and None
    in evals.

    `head(params)`: kernel_VD; logits are features_BTD @ kernel_VD.T, worked out a few positions at a time. Without
    `head` the features are the logits.

    `architecture`: what the model is, as plain JSON; kept with the run, and a resumed run must have an equal one.

    `shapes()`: the parameters as jax.ShapeDtypeStruct, where that is cheaper than `init`.
    """

    init: Callable[[int], Params]
    forward: Callable[[Params, jax.Array, jax.Array | None, jax.Array | None], jax.Array]
    head: Callable[[Params], jax.Array] | None = None
    architecture: Mapping[str, Any] = field(default_factory=dict)
    shapes: Callable[[], Params] | None = None


def abstract_params(model: Model) -> Params:
    """The parameters' shapes and types, as jax.ShapeDtypeStruct."""
    return model.shapes() if model.shapes is not None else jax.eval_shape(lambda: model.init(0))


def num_parameters(model: Model) -> int:
    """Trained numbers of the model."""
    return sum(int(np.prod(array.shape)) for array in jax.tree.leaves(abstract_params(model)))
