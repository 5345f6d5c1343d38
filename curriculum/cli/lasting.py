"""Imports without garbage collection."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting() -> Iterator[None]:
    """Run the block without garbage collection, and exempt from it for good all objects that there are at its end.

    Meant for imports at the start of a process: Python would scan their hundreds of thousands of objects again and
    again, and once more at exit, which takes 7 % of a plan's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
