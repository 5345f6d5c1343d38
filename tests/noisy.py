"""Parameters far from their first values."""

import jax
import numpy as np

from curriculum.model.transformer import init_params


def noisy_params(config, seed=0, noise=0.3):
    """Moved so far that every part of a model shows: biases, scales and attention, in the likeliest token too."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda array: (array + rng.normal(0, noise, array.shape)).astype(np.float32), init_params(config, seed)
    )
