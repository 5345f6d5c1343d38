"""Batches ahead of time: a thread works out the order of many steps at once and places each batch on the mesh."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from phases.batches import Batch, DataPlan, Draws

_PLANNED_STEPS = 256  # order worked out at a time; one by one takes over 30 times as long (tools/bench_data.py)


class Feed:
    """`feed[step]` is the batch of that update, on the device. Any step may be asked for, in order is fast.

    `make_batch(step, draws=...)` is the plan's `batch` with all else that it takes, or what of it this process needs;
    `place(step, batch)` puts that on the devices.

    The batches depend on the step alone: neither on how far ahead they were made nor on what was asked before.
    """

    def __init__(
        self,
        plan: DataPlan,
        make_batch: Callable[..., Batch],
        place: Callable[[int, Batch], Any],
        prefetch: int = 3,
    ):
        self._plan, self._make_batch, self._place, self._prefetch = plan, make_batch, place, prefetch
        self._ahead: OrderedDict[int, Future] = OrderedDict()
        self._planned: tuple[int, list[Draws]] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="feed")

    def __getitem__(self, step: int):
        if step not in self._ahead:
            for future in self._ahead.values():
                future.cancel()
            self._ahead.clear()
        last = min(step + self._prefetch, self._plan.schedule.total_steps - 1)
        for ahead in range(step, max(step, last) + 1):
            if ahead not in self._ahead:
                self._ahead[ahead] = self._worker.submit(self._make, ahead)
        return self._ahead.pop(step).result()

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _make(self, step: int):
        # From the step that is asked for: what lies before it may have been read of sources that are gone.
        if self._planned is None or not 0 <= step - self._planned[0] < len(self._planned[1]):
            num_steps = max(1, min(_PLANNED_STEPS, self._plan.schedule.total_steps - step))
            self._planned = step, self._plan.draws(step, num_steps)
        first, draws = self._planned
        return self._place(step, self._make_batch(step, draws=draws[step - first]))
