"""Training time and peak memory."""

import resource
import sys
import time
from contextlib import contextmanager

import jax

from curriculum.train.step import TrainState


class TrainClock:
    """Seconds spent training since the last metrics row; evals, saves and the first compilation are not counted."""

    def __init__(self):
        self._running_since: float | None = time.perf_counter()  # None while paused
        self._seconds = 0.0
        self._steps = 0
        self._compiled = False  # whether the first update, which compiles, is over
        self._compile_s: float | None = None  # seconds of that update, until `take` reports them
        self._before_s = 0.0  # seconds of compiling before it
        self._switch_s: float | None = None  # seconds of a switch, until its first update
        self._stall_s: float | None = None

    @contextmanager
    def paused(self, state: TrainState):
        """Exclude a block from training time, after waiting for the updates under way. May be nested."""
        if self._running_since is None:
            yield
            return
        jax.block_until_ready(state.step)
        self._seconds += time.perf_counter() - self._running_since
        self._running_since = None
        try:
            yield
        finally:
            self._running_since = time.perf_counter()

    @contextmanager
    def compiling(self):
        """Exclude a block before the first update, and count it to the first compilation."""
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self._before_s += seconds
        self._running_since += seconds

    @contextmanager
    def update(self):
        """Time one update, including the wait for its batch."""
        started = time.perf_counter()
        yield
        waited_s = time.perf_counter() - started
        if not self._compiled:
            self._compiled, self._compile_s = True, waited_s
        if self._switch_s is not None:
            self._stall_s, self._switch_s = self._switch_s + waited_s, None
        self._steps += 1

    @contextmanager
    def switching(self):
        """Time the work of a phase switch.

        The stall of a switch is this block plus the time until the host has dispatched the next update, including the
        wait for its batch and any compilation.
        """
        started = time.perf_counter()
        yield
        self._switch_s = time.perf_counter() - started

    def take(self) -> tuple[int, float, dict[str, float]]:
        """(updates, seconds) since the last call, and the compile time or stall once. Not within a pause."""
        now = time.perf_counter()
        steps, seconds = self._steps, self._seconds + now - self._running_since
        once = {}
        if self._compile_s is not None:
            once["first_step_compile_time_s"] = round(self._before_s + self._compile_s, 3)
            seconds, self._compile_s = seconds - self._compile_s, None
        if self._stall_s is not None:
            once["switch_stall_s"], self._stall_s = round(self._stall_s, 6), None
        self._steps, self._seconds, self._running_since = 0, 0.0, now
        return steps, seconds, once


def peak_memory_gb() -> float:
    """Peak memory in GB: of the first device if it reports it, else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return round(stats["peak_bytes_in_use"] / 1e9, 3)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts in KiB on Linux
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 3)
