"""Seconds of training, without evals, saves and the first compilation."""

import time

import jax.numpy as jnp

from curriculum.train.clock import TrainClock
from curriculum.train.step import TrainState


def test_clock_counts_training_only():
    state = TrainState(None, None, jnp.int32(0), None, None)
    clock = TrainClock()
    with clock.update():
        time.sleep(0.4)  # the first update compiles
    with clock.update():
        time.sleep(0.1)
    with clock.paused(state):
        time.sleep(0.4)
    steps, seconds, once = clock.take()
    assert steps == 2 and 0.1 <= seconds < 0.35 and 0.4 <= once["first_step_compile_time_s"] < 0.65
    clock.switched()
    with clock.update():
        time.sleep(0.1)
    steps, seconds, once = clock.take()
    assert steps == 1 and once.keys() == {"switch_stall_s"} and 0.1 <= once["switch_stall_s"] < 0.35
    with clock.update():
        pass
    assert clock.take()[2] == {}
