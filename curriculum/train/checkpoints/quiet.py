"""Silences what orbax and tensorstore print about a failed save: whoever waits for the save gets the error, once."""

from __future__ import annotations

import logging
import sys
from functools import cache

from curriculum.disk.append import is_disk_error


@cache
def quiet_failed_saves() -> None:
    """Suppress the tracebacks of a failed save and of the other arrays' writes that were under way."""
    logging.getLogger("absl").addFilter(lambda r: not ("orbax" in r.pathname and r.levelno >= logging.ERROR))
    logging.getLogger("asyncio").addFilter(lambda r: not _of_write(r))
    hook = sys.unraisablehook

    def without_late(unraisable):
        late = isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"
        if not late:
            hook(unraisable)

    sys.unraisablehook = without_late


def _of_write(record: logging.LogRecord) -> bool:
    """Whether it is of a write that nobody waited for: the disk refused it, or its folder, loop or Python was gone."""
    error = record.exc_info and record.exc_info[1]
    late = isinstance(error, FileNotFoundError) and ".saving" in str(error.filename)
    at_end = isinstance(error, RuntimeError) and str(error).startswith("cannot schedule new futures after")
    return "os_error_code" in record.getMessage() or late or at_end or is_disk_error(error)
