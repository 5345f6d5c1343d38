"""Batches ahead of time: a thread works out the order of many steps at once and places each batch on the mesh."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from phases.batches import DataPlan, Draws

_PLANNED_STEPS = 256  # order worked out at a time; one by one takes over 30 times as long (tools/bench_data.py)


class Feed:
    """`feed[step]` is the batch of that update, on the device. Any step may be asked for, in order is fast.

    The batches depend on the step alone: neither on how far ahead they were made nor on what was asked before.
    """

    def __init__(
        self,
        plan: DataPlan,
        tokens: Mapping[str, Any],
        eot: int,
        grad_accum: int,
        place: Callable[[Any], Any],
        prefetch: int = 3,
        scored: Mapping[str, Any] | None = None,
    ):
        self._scored = scored
        self._plan, self._tokens, self._eot, self._grad_accum = plan, tokens, eot, grad_accum
        self._place, self._prefetch = place, prefetch
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
        first = step - step % _PLANNED_STEPS
        if self._planned is None or self._planned[0] != first:
            num_steps = max(min(_PLANNED_STEPS, self._plan.schedule.total_steps - first), step - first + 1)
            self._planned = first, self._plan.draws(first, num_steps)
        draws = self._planned[1][step - first]
        return self._place(self._plan.batch(step, self._tokens, self._eot, self._grad_accum, draws, self._scored))
