import math
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from curriculum.train.optimizer import OptimConfig, adamw, make_optimizer, matrices


def test_two_steps_by_the_formula():
    b1, b2, eps, decay = 0.8, 0.9, 1e-3, 0.5
    optimizer = make_optimizer(OptimConfig(b1=b1, b2=b2, eps=eps, weight_decay=decay))
    matrix = 3.0
    state = optimizer.init({"w": jnp.full((1, 1), matrix)})
    first_moment = second_moment = 0.0
    for step, gradient in enumerate([0.25, -2.0], start=1):
        updates, state = optimizer.update({"w": jnp.full((1, 1), gradient)}, state, {"w": jnp.full((1, 1), matrix)})
        first_moment = b1 * first_moment + (1 - b1) * gradient
        second_moment = b2 * second_moment + (1 - b2) * gradient**2
        unbiased = first_moment / (1 - b1**step), second_moment / (1 - b2**step)
        expected = -(unbiased[0] / (math.sqrt(unbiased[1]) + eps) + decay * matrix)
        assert float(updates["w"][0, 0]) == pytest.approx(expected, rel=1e-5)  # float32
        matrix += 0.1 * expected


def test_only_matrices_decay():
    params = {"scale": jnp.full(3, 2.0), "kernel": jnp.full((3, 2), 2.0), "embedding": jnp.full((5, 3), 2.0)}
    assert matrices(params) == {"scale": False, "kernel": True, "embedding": True}
    optimizer = adamw(0.9, 0.95, 1e-8, weight_decay=0.25)
    no_gradient = {name: jnp.zeros_like(array) for name, array in params.items()}
    updates, _ = optimizer.update(no_gradient, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["scale"], np.zeros(3))
    np.testing.assert_array_equal(updates["kernel"], np.full((3, 2), -0.5))
    np.testing.assert_array_equal(updates["embedding"], np.full((5, 3), -0.5))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (OptimConfig(b1=1.0), ("b1", "got 1.0, expected 0 or more and below 1")),
        (OptimConfig(b2=-0.1), ("b2", "got -0.1, expected 0 or more and below 1")),
        (OptimConfig(eps=0.0), ("eps", "got 0.0, expected a finite number above 0")),
        (
            OptimConfig(weight_decay=math.inf),
            ("weight_decay", "got inf, expected a finite number, 0 or more"),
        ),
        (OptimConfig(grad_clip=math.nan), ("grad_clip", "got nan, expected a finite number, 0 or more")),
    ],
)
def test_a_problem_names_its_field(config, problem):
    assert config.problems() == [problem]


def test_the_defaults_and_the_edges_are_fine():
    assert OptimConfig().problems() == []
    assert OptimConfig(b1=0.0, b2=0.0, weight_decay=0.0, grad_clip=0.0).problems() == []


def test_the_settings_need_no_jax():
    program = "import sys, curriculum.train.optimizer; print([m for m in ('jax', 'optax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
