"""The compiled programs of a run: one a shape, made before it is needed, and never twice."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

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
    """`programs[shape]` is the compiled update of that shape, or what else of a run is compiled by what it is for.
    To be asked by one thread.

    `compile(shape)` makes one, and is called once a shape, in whatever thread; `warm(shape, program)` is called after
    it in the background alone. `of` says in a message what the programs are. `beside`: those that share the thread.
    `seconds`: how long each took, in the order in which they were ready.
    """

    def __init__(
        self,
        compile: Callable[[Any], Any],
        warm: Callable[[Any, Any], None] = lambda shape, program: None,
        of: str = "the update of",
        beside: Programs | None = None,
    ):
        self._compile, self._warm, self._of = compile, warm, of
        self._ready: dict[Hashable, Any] = {}
        self._ahead: dict[Hashable, Future] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=COMPILE_THREAD) if beside is None else beside._worker
        self.seconds: dict[Hashable, float] = {}

    def __getitem__(self, shape: Hashable) -> Any:
        """Waits for a program that is being compiled; one that nothing was begun of is compiled here and now.

        Raises what the compiler raised, in the background too, with the shape as a note.
        """
        if shape not in self._ready:
            future = self._ahead.get(shape)
            begun = future is not None and not future.cancel()
            self._ready[shape] = future.result() if begun else self._make(shape)
        return self._ready[shape]

    def ahead(self, shapes: Iterable[Hashable]) -> None:
        """Begin to compile in the background, in this order, what is not yet there; returns at once."""
        for shape in shapes:
            if shape not in self._ready and shape not in self._ahead:
                self._ahead[shape] = self._worker.submit(self._make_ahead, shape)

    def close(self) -> None:
        """Begin nothing more. What is being compiled is not waited for here, but by the interpreter as it ends: the
        compiler cannot be interrupted, and a process that is taken down under it crashes. So the `curriculum` command
        leaves without the interpreter's end.
        """
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _make(self, shape: Hashable) -> Any:
        started = time.perf_counter()
        try:
            program = self._compile(shape)
        except BaseException as error:
            error.add_note(f"while {self._of} {shape} was compiled")
            raise
        self.seconds[shape] = time.perf_counter() - started
        return program

    def _make_ahead(self, shape: Hashable) -> Any:
        program = self._make(shape)
        self._warm(shape, program)
        return program


def compiling() -> bool:
    """Whether something is still being compiled after all `Programs` were closed: their threads end with it."""
    return any(thread.name.startswith(COMPILE_THREAD) for thread in threading.enumerate())
