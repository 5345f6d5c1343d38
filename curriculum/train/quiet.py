"""What orbax and tensorstore print of a save that failed: here whoever waits for the save is told, once."""

from __future__ import annotations

import logging
import sys
from functools import cache


@cache
def quiet_failed_saves() -> None:
    """Leave out their tracebacks: the save's own, and those of the writes of other arrays that were under way."""
    logging.getLogger("absl").addFilter(lambda r: not ("orbax" in r.pathname and r.levelno >= logging.ERROR))
    logging.getLogger("asyncio").addFilter(lambda r: "os_error_code" not in r.getMessage())
    told = sys.unraisablehook

    def tell(unraisable):
        late = isinstance(unraisable.exc_value, RuntimeError) and str(unraisable.exc_value) == "Event loop is closed"
        if not late:
            told(unraisable)

    sys.unraisablehook = tell
