"""Whether a state holds numbers alone."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from curriculum.train.checkpoints.finite import NonFiniteState, _finite, check_finite
from curriculum.train.checkpoints.folder import _copied
from curriculum.train.step import init_state


def new_state():
    return init_state({"w": jnp.ones((3, 4))}, optax.adam(1e-3), 1)


@pytest.mark.parametrize("shape", [(), (5,), (7, 5), (64, 128), (3, 4, 40)])
def test_what_is_no_number_is_found_wherever_it_stands(shape):
    state, w = new_state(), np.full(shape, np.finfo(np.float32).max, np.float32)
    check_finite(state._replace(params={"w": jax.device_put(w)}))
    for value in (np.nan, np.inf, -np.inf):
        for place in (0, w.size // 3, w.size - 1):
            bad = w.copy()
            bad.reshape(-1)[place] = value
            with pytest.raises(NonFiniteState, match=r"params\.w is not finite"):
                check_finite(state._replace(params={"w": jax.device_put(bad)}))


def test_what_was_found_finite_vouches_for_nothing_else():
    state = jax.device_put(new_state())
    for _ in range(2):
        check_finite(state)
    adam, *rest = state.opt_state
    for value in (np.nan, np.inf, -np.inf):
        bad = state._replace(opt_state=(adam._replace(nu={"w": adam.nu["w"].at[-1, -1].set(value)}), *rest))
        with pytest.raises(NonFiniteState, match=r"nu\.w is not finite"):
            check_finite(bad)
    check_finite(state)


@pytest.mark.parametrize("function", [_copied, _finite])
def test_of_states_of_many_shapes_the_latest_programs_alone_stay_in_memory(function):
    """As in a sweep over architectures: jax keeps all that it has compiled of one function."""

    def in_memory():
        gc.collect()
        return [e for e in jax.devices()[0].client.live_executables() if function.__name__ in e.hlo_modules()[0].name]

    for width in range(1, 12):
        function({"w": jnp.ones(width)})
    before = in_memory()
    function({"w": jnp.zeros(11)})
    assert 1 <= len(before) == len(in_memory()) <= 8
