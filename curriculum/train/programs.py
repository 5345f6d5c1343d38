"""The compiled programs of a run: one per shape, made before it is needed, and never twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from curriculum.train.device import own_settings
from phases.batches import num_micro_steps
from phases.schedule import Segment

COMPILE_THREAD = "curriculum-compile"
# jax's settings that the bits of a program hang on. Those of its context managers hold in the thread that is in them.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_disable_jit",
    "jax_debug_nans",
    "jax_debug_infs",
)


class StepShape(NamedTuple):
    """The shape of an update: A micro-steps of B rows of T tokens, and its rope theta (None: the model's own)."""

    A: int
    B: int
    T: int
    rope_theta: float | None = None

    @staticmethod
    def of(segment: Segment, grad_accum: int) -> StepShape:
        """The shape of a segment's updates, with A as in `DataPlan.batch`."""
        num_micro = num_micro_steps(grad_accum, segment.batch_size)
        return StepShape(num_micro, segment.batch_size // num_micro, segment.seq_len, segment.rope_theta)

    def __str__(self) -> str:
        theta = "" if self.rope_theta is None else f", rope_theta {self.rope_theta:g}"
        return f"{self.A} x {self.B} rows of {self.T} tokens{theta}"


class Programs:
    """`programs[shape]` is the compiled program of a shape, or of another key. To be asked by one thread only.

    `compile(shape)` makes a program; it is called once per shape, in the asking thread or in the background.
    `warm(shape, program)` is called after it, in the background only. `of` names the programs in a message. `beside`:
    other programs whose background thread these share. `seconds`: how long each took to compile, in the order they
    were ready.
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
        """Wait for a program that is being compiled; one that has not been started is compiled here and now.

        Raises what the compiler raised, also in the background, with the shape as a note.
        """
        if shape not in self._ready:
            future = self._ahead.get(shape)
            begun = future is not None and not future.cancel()
            self._ready[shape] = future.result() if begun else self._make(shape)
        return self._ready[shape]

    def ahead(self, shapes: Iterable[Hashable]) -> None:
        """Start compiling missing programs in the background, in this order; returns at once.

        If the caller is in a context manager of jax's that the background would not see, they are compiled here.
        """
        missing = [shape for shape in shapes if shape not in self._ready and shape not in self._ahead]
        if missing and _settings() != _settings_of_new_threads():
            self._ready.update((shape, self._make_ahead(shape)) for shape in missing)
            return
        for shape in missing:
            self._ahead[shape] = self._worker.submit(self._make_ahead, shape)

    def close(self) -> None:
        """Start no more compilations. The one under way is not waited for here, but by the interpreter at its exit.

        The compiler cannot be interrupted, and a process that is torn down during a compilation crashes. To avoid that
        wait, the `curriculum` command exits without the interpreter's shutdown. A program that is neither ready nor
        under way cannot be asked for any more.
        """
        self._worker.shutdown(wait=False, cancel_futures=True)
        # As a rule methods of what has these programs: all of it would stay until a garbage collection.
        self._compile = self._warm = None

    def _make(self, shape: Hashable) -> Any:
        started = time.perf_counter()
        try:
            program = self._compile(shape)
        except BaseException as error:
            error.add_note(f"while {self._of} {shape} was compiled")
            raise
        self.seconds[shape] = time.perf_counter() - started
        return program

    @own_settings()
    def _make_ahead(self, shape: Hashable) -> Any:
        program = self._make(shape)
        if warm := self._warm:  # not closed meanwhile
            warm(shape, program)
        return program


def _settings() -> list[Any]:
    return [getattr(jax.config, name) for name in SETTINGS]


def _settings_of_new_threads() -> list[Any]:
    with ThreadPoolExecutor(1) as other:
        return other.submit(own_settings()(_settings)).result()


def needed_bytes(compiled: Any) -> int:
    """Bytes of a device's memory that a compiled program needs, as the compiler counts them."""
    sizes = compiled.memory_analysis()
    not_in_place = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + not_in_place


def compiling() -> bool:
    """Whether something is still being compiled after all `Programs` were closed, whose threads then end."""
    return any(thread.name.startswith(COMPILE_THREAD) for thread in threading.enumerate())
