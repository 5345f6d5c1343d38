"""The compiled updates of a run: one a shape, made before it is needed, and never twice."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from phases.schedule import Segment

COMPILE_THREAD = "curriculum-compile"


class StepShape(NamedTuple):
    """What of an update is compiled in: A micro-steps of B rows of T tokens, and the base of the rotary positions.

    `rope_theta` is None where it is the model's own.
    """

    A: int
    B: int
    T: int
    rope_theta: float | None = None

    @staticmethod
    def of(segment: Segment, grad_accum: int) -> StepShape:
        """The shape of a segment's updates: A as `DataPlan.batch` has it."""
        num_micro = math.gcd(grad_accum, segment.batch_size)
        return StepShape(num_micro, segment.batch_size // num_micro, segment.seq_len, segment.rope_theta)

    def __str__(self) -> str:
        theta = "" if self.rope_theta is None else f", rope_theta {self.rope_theta:g}"
        return f"{self.A} x {self.B} rows of {self.T} tokens{theta}"


class Programs:
    """`programs[shape]` is the compiled update of that shape. To be asked by one thread.

    `compile(shape)` makes one, and is called once a shape, in whatever thread.
    `seconds`: how long each took, in the order in which they were ready.
    """

    def __init__(self, compile: Callable[[StepShape], Callable]):
        self._compile = compile
        self._ready: dict[StepShape, Callable] = {}
        self._ahead: dict[StepShape, Future] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=COMPILE_THREAD)
        self.seconds: dict[StepShape, float] = {}

    def __getitem__(self, shape: StepShape) -> Callable:
        """Waits for a program that is being compiled; one that nothing was begun of is compiled here and now.

        Raises what the compiler raised, in the background too, with the shape as a note.
        """
        if shape not in self._ready:
            future = self._ahead.get(shape)
            begun = future is not None and not future.cancel()
            self._ready[shape] = future.result() if begun else self._make(shape)
        return self._ready[shape]

    def ahead(self, shapes: Iterable[StepShape]) -> None:
        """Begin to compile in the background, in this order, what is not yet there; returns at once."""
        for shape in shapes:
            if shape not in self._ready and shape not in self._ahead:
                self._ahead[shape] = self._worker.submit(self._make, shape)

    def close(self) -> None:
        """Begin nothing more. What is being compiled is not waited for here, but by the interpreter as it ends: the
        compiler cannot be interrupted, and a process that is taken down under it crashes. So the `curriculum` command
        leaves without the interpreter's end.
        """
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _make(self, shape: StepShape) -> Callable:
        started = time.perf_counter()
        with _Noted(f"while the update of {shape} was compiled"):
            program = self._compile(shape)
        self.seconds[shape] = time.perf_counter() - started
        return program


def compiling() -> bool:
    """Whether something is still being compiled after all `Programs` were closed: their threads end with it."""
    return any(thread.name.startswith(COMPILE_THREAD) for thread in threading.enumerate())


class _Noted:
    """Add a line to whatever is raised inside."""

    def __init__(self, note: str):
        self._note = note

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None:
            error.add_note(self._note)
