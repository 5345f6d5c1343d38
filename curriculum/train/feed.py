"""Batches made ahead: a thread works out the order of many steps at once, and places each batch on the mesh."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from phases.batches import Batch, DataPlan, Draws

PREFETCH = 3  # batches made ahead
_PLANNED_STEPS = 256  # ordered at a time; one by one takes over 30 times as long (tools/bench_data.py)


class Feed:
    """`feed[step]` is the batch of that update, on the device. Any step may be asked for; asking in order is fast.

    `make(step, draws)` makes a batch, in a thread; `draws` are the plan's. The batches depend on the step alone, not
    on how far ahead they were made or on what was asked before.
    """

    def __init__(self, plan: DataPlan, make: Callable[[int, Draws], Batch]):
        self._plan, self._make = plan, make
        self._ahead: dict[int, Future] = {}
        self._planned: tuple[int, list[Draws]] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="feed")

    def __getitem__(self, step: int) -> Batch:
        if step not in self._ahead:
            for future in self._ahead.values():
                future.cancel()
            self._ahead.clear()
        last = min(step + PREFETCH, self._plan.schedule.total_steps - 1)
        for ahead in range(step, max(step, last) + 1):
            if ahead not in self._ahead:
                self._ahead[ahead] = self._worker.submit(self._made, ahead)
        return self._ahead.pop(step).result()

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()
        self._make = None  # as a rule a method of what has this feed: both would stay until a garbage collection

    def _made(self, step: int) -> Batch:
        # From the requested step on: earlier steps may have read sources that are gone.
        if self._planned is None or not 0 <= step - self._planned[0] < len(self._planned[1]):
            num_steps = max(1, min(_PLANNED_STEPS, self._plan.schedule.total_steps - step))
            self._planned = step, self._plan.draws(step, num_steps)
        first, draws = self._planned
        return self._make(step, draws[step - first])
