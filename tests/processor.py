"""Seconds of the processor, for tests that say something is quick: a ratio, so that a slow or busy machine does not count."""

import os
import resource
import subprocess
import time
from collections.abc import Callable, Sequence


def seconds(work: Callable[[], object], times: int = 3) -> float:
    """The least of a few runs of `work` in this thread."""
    return min(_one(work) for _ in range(times))


def _one(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def loop_seconds(rounds: float) -> float:
    """What a plain Python loop of that many rounds takes here; a million of them are measured."""

    def loop():
        total = 0
        for i in range(1_000_000):
            total += i & 1

    return seconds(loop) * rounds / 1e6


def command_seconds(command: Sequence[object], times: int = 3) -> tuple[float, str]:
    """The least of a few runs of a command that succeeds, and what its last one printed.

    Modules are kept compiled, as a user has them: not to be compiled at each start is no work of the command's.
    """
    least = float("inf")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for _ in range(times):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        least = min(least, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return least, done.stdout
