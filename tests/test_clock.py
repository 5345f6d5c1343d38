"""Seconds of training, without evals, saves and the first compilation."""

import resource
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from curriculum.train.clock import TrainClock, peak_memory_gb
from curriculum.train.step import TrainState


def test_clock_counts_training_only():
    state = TrainState(None, None, jnp.int32(0), None, None, None)
    began = time.perf_counter()
    clock = TrainClock()
    compiling = slept(clock.update(), 0.05)  # the first update compiles
    training = slept(clock.update(), 0.02)
    pause = slept(clock.paused(state), 0.05)
    taking = time.perf_counter()
    steps, seconds, once = clock.take()
    elapsed = time.perf_counter() - began
    compile_s = once["first_step_compile_time_s"]
    assert steps == 2 and training <= seconds <= elapsed - compiling - pause + 0.001  # of rounding, like the others
    assert compiling - 0.001 <= compile_s <= elapsed - training - pause + 0.001

    stall = slept(clock.switching(), 0.02) + slept(clock.update(), 0.02)
    steps, seconds, once = clock.take()
    elapsed = time.perf_counter() - taking
    assert steps == 1 and once.keys() == {"switch_stall_s"} and stall <= seconds <= elapsed
    assert stall - 1e-6 <= once["switch_stall_s"] <= elapsed
    with clock.update():
        pass
    assert clock.take()[2] == {}


def test_what_was_compiled_before_the_first_update_is_told_with_it_and_is_no_training():
    began = time.perf_counter()
    clock = TrainClock()
    before = slept(clock.compiling(), 0.05)
    first = slept(clock.update(), 0.01)
    training = slept(clock.update(), 0.02)
    _, seconds, once = clock.take()
    elapsed = time.perf_counter() - began
    assert before + first - 0.001 <= once["first_step_compile_time_s"] <= elapsed - training + 0.001
    assert training <= seconds <= elapsed - before - first + 0.001


def test_a_pause_within_a_pause_is_a_part_of_it():
    state = TrainState(None, None, jnp.int32(0), None, None, None)
    clock = TrainClock()
    slept(clock.update(), 0.0)  # the first update compiles
    began = time.perf_counter()
    clock.take()
    training = slept(clock.update(), 0.02)
    with clock.paused(state):
        pausing = time.perf_counter()
        within = slept(clock.paused(state), 0.02)
        time.sleep(0.02)
        pause = time.perf_counter() - pausing
    training += slept(clock.update(), 0.02)
    steps, seconds, _ = clock.take()
    assert within < pause
    assert steps == 2 and training <= seconds <= time.perf_counter() - began - pause


class UnderWay:
    """An array that is there 0.02 seconds after it is waited for."""

    def block_until_ready(self):
        time.sleep(0.02)


def test_updates_that_a_pause_waits_for_count_as_training():
    clock = TrainClock()
    with clock.paused(TrainState(None, None, UnderWay(), None, None, None)):
        pass
    assert clock.take()[1] >= 0.02


def test_an_error_in_a_pause_ends_it():
    clock = TrainClock()
    with pytest.raises(OSError), clock.paused(TrainState(None, None, jnp.int32(0), None, None, None)):
        raise OSError
    slept(clock.update(), 0.0)  # the first update compiles
    training = slept(clock.update(), 0.02)
    steps, seconds, _ = clock.take()
    assert steps == 2 and seconds >= training


@pytest.mark.parametrize("stats", [{"peak_bytes_in_use": 2_345_678_901}, {"bytes_in_use": 2_345_678_901}, None])
def test_peak_memory_is_the_device_s_or_else_the_process_s(monkeypatch, stats):
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(memory_stats=lambda: stats)])
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3_000_000))  # KiB
    monkeypatch.setattr("sys.platform", "linux")
    assert peak_memory_gb() == (2.346 if stats and "peak_bytes_in_use" in stats else 3.072)


def slept(context, seconds):
    """Sleep within a context; how long it was, which is what the machine made of it."""
    with context:
        started = time.perf_counter()
        time.sleep(seconds)
        return time.perf_counter() - started
