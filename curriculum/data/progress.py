"""Progress of a long job in bytes: one line that renews itself on a terminal, else a line now and then."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

QUIET_SECONDS = 2.0  # a job that is over sooner shows nothing
TERMINAL_SECONDS = 0.2
PLAIN_SECONDS = 5.0

# (bytes done, bytes in all or None where that is not known); the last call has both equal.
Progress = Callable[[int, int | None], None]


class ConsoleProgress:
    """A Progress that writes share, MB/s and time to go to stderr."""

    def __init__(self, label: str, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._label = label
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._clock = clock
        self._start = self._last = clock()
        self._shown = False

    def __call__(self, done_bytes: int, total_bytes: int | None) -> None:
        now = self._clock()
        elapsed_seconds = now - self._start
        finished = done_bytes == total_bytes
        pause_seconds = TERMINAL_SECONDS if self._terminal else PLAIN_SECONDS
        if finished:
            due = self._shown
        else:
            due = elapsed_seconds >= QUIET_SECONDS and (not self._shown or now - self._last >= pause_seconds)
        if not due:
            return
        line = f"{self._label}: {progress_text(done_bytes, total_bytes, elapsed_seconds)}"
        self._stream.write(f"\r\x1b[K{line}" + "\n" * finished if self._terminal else line + "\n")
        self._stream.flush()
        self._last, self._shown = now, True


def progress_text(done_bytes: int, total_bytes: int | None, elapsed_seconds: float) -> str:
    """Such as `12.3 of 45.6 MB (27%), 10.1 MB/s, ETA 3s`."""
    rate = done_bytes / max(elapsed_seconds, 1e-9)
    if total_bytes is None:
        return f"{done_bytes / 1e6:,.1f} MB, {rate / 1e6:.1f} MB/s"
    text = f"{done_bytes / 1e6:,.1f} of {total_bytes / 1e6:,.1f} MB ({done_bytes / max(total_bytes, 1):.0%})"
    text += f", {rate / 1e6:.1f} MB/s"
    if done_bytes == total_bytes:
        return f"{text}, {_duration(elapsed_seconds)}"
    return f"{text}, ETA {_duration((total_bytes - done_bytes) / rate)}" if rate else text


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
