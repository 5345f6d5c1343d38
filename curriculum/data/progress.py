"""Progress of a long job: one line that updates in place on a terminal, else a line every few seconds."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from curriculum.disk.append import is_terminal

QUIET_SECONDS = 2.0  # a job that is over sooner shows nothing
PASSING_SECONDS = 10.0  # nor does one of many such as the evals of a run; without a terminal also between its lines
TERMINAL_SECONDS = 0.2
PLAIN_SECONDS = 5.0

# (done, total or None if unknown); in the last call both are equal.
Progress = Callable[[int, int | None], None]


Unit = tuple[str, float, int]  # what a count is shown in: its name, how many are one of it, and decimals
MEGABYTES, WINDOWS = ("MB", 1e6, 1), ("windows", 1, 0)


class ConsoleProgress:
    """A Progress that writes share, rate and time left to stderr.

    passing: of one job of many, which leaves no line that it is done; `clear` takes the last one off the terminal.
    """

    def __init__(
        self,
        label: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        unit: Unit = MEGABYTES,
        passing: bool = False,
    ):
        self._label = label
        self._passing = passing
        self._unit = unit
        self._stream = stream or sys.stderr  # None again without a stderr, as in a daemon
        self._terminal = is_terminal(self._stream) and os.environ.get("TERM") != "dumb"
        self._clock = clock
        self._start = self._last = clock()
        self._shown = False

    def __call__(self, done: int, total: int | None) -> None:
        now = self._clock()
        elapsed_seconds = now - self._start
        finished = done == total
        quiet_seconds, plain_seconds = (
            (PASSING_SECONDS, PASSING_SECONDS) if self._passing else (QUIET_SECONDS, PLAIN_SECONDS)
        )
        pause_seconds = TERMINAL_SECONDS if self._terminal else plain_seconds
        if finished:
            due = self._shown and not self._passing
        else:
            due = elapsed_seconds >= quiet_seconds and (not self._shown or now - self._last >= pause_seconds)
        if not due or self._stream is None:
            return
        line = f"{self._label}: {progress_text(done, total, elapsed_seconds, self._unit)}"
        if self._terminal:  # a line that wraps could not be overwritten
            most = None if finished else self._num_columns() - 1
            line = f"\r\x1b[K{line[:most]}"
        self._write(line + "\n" * (finished or not self._terminal))
        self._last, self._shown = now, True

    def clear(self) -> None:
        """Take the line off a terminal, for a job that may have ended before its end."""
        if self._shown and self._terminal:
            self._write("\r\x1b[K")

    def _write(self, text: str) -> None:
        # The terminal may be closed, or its disk full: what is under way needs neither.
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()

    def _num_columns(self) -> int:
        """The terminal's width: COLUMNS or its own, as standard output may be another one or none."""
        with suppress(OSError, ValueError):
            return int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(self._stream.fileno()).columns or 80
        return 80


def progress_text(done: int, total: int | None, elapsed_seconds: float, unit: Unit = MEGABYTES) -> str:
    """Such as `12.3 of 45.6 MB (27%), 10.1 MB/s, ETA 3s`."""

    name, size, digits = unit

    def counted(number: float) -> str:
        return f"{number / size:,.{digits}f}"

    per_second = done / max(elapsed_seconds, 1e-9)
    rate = f"{per_second / size:.1f} {name}/s"
    if total is None:
        return f"{counted(done)} {name}, {rate}"
    text = f"{counted(done)} of {counted(total)} {name} ({done / max(total, 1):.0%}), {rate}"
    if done >= total:  # more if a file has grown
        return f"{text}, {_duration(elapsed_seconds)}"
    return f"{text}, ETA {_duration((total - done) / per_second)}" if done else text


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
