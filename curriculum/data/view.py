"""Chosen spans of a token stream that lies in several files, read as one array."""

from bisect import bisect_right

import numpy as np


class TokenView:
    """One-dimensional read-only array of tokens: chosen spans of a stream of several files, end to end.

    Supports `len` and contiguous slices. A slice inside one span of one file is a view of the memory map; any
    other is a copy. Finding a slice is one bisection of the span table.
    """

    def __init__(self, shards: list[np.ndarray], starts: np.ndarray, stops: np.ndarray):
        """The spans [starts[i], stops[i]) of the concatenated shards; sorted, disjoint, none empty."""
        shard_stops = np.cumsum([len(shard) for shard in shards], dtype=np.int64)
        shard_starts = np.concatenate([[0], shard_stops[:-1]])
        # A span that crosses the start of a file is split there.
        before = np.searchsorted(starts, shard_starts, side="left") - 1
        inside = shard_starts[(before >= 0) & (shard_starts < np.append(stops, 0)[before])]
        starts = np.sort(np.concatenate([starts, inside]))
        stops = np.sort(np.concatenate([stops, inside]))
        lengths = stops - starts

        shard = np.searchsorted(shard_starts, starts, side="right") - 1
        self.dtype = shards[0].dtype
        # Plain lists: bisecting and indexing them is several times faster than numpy on single numbers.
        span_stops = np.cumsum(lengths)
        self._starts: list[int] = (span_stops - lengths).tolist()
        # For each span: its end in the view, its file, and what to add to a position in the view for that in the file.
        shifts = starts - shard_starts[shard] - (span_stops - lengths)
        files = [shards[i] for i in shard.tolist()]
        self._spans = list(zip(span_stops.tolist(), files, shifts.tolist(), strict=True))
        self._len = int(lengths.sum())

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop = index.start, index.stop
        if index.step is not None or start is None or stop is None or not 0 <= start < stop <= self._len:
            start, stop, step = index.indices(self._len)
            if step != 1:
                raise ValueError(f"step {step}; a view of tokens gives contiguous slices only")
            if start >= stop:
                return np.empty(0, self.dtype)
        return self.between(start, stop)

    def between(self, start: int, stop: int) -> np.ndarray:
        """The slice of 0 <= start < stop <= len, unchecked: a check takes as long as reading a row of a batch."""
        span = bisect_right(self._starts, start) - 1
        end, file, shift = self._spans[span]
        if stop <= end:
            return file[start + shift : stop + shift]
        parts = [file[start + shift : end + shift]]
        while end < stop:
            start, span = end, span + 1
            end, file, shift = self._spans[span]
            parts.append(file[start + shift : min(stop, end) + shift])
        return np.concatenate(parts)
