"""Imports without garbage collection, which Ctrl-C ends at once."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting() -> Iterator[None]:
    """Run the block without garbage collection, and exempt from it for good all objects that there are at its end.

    Meant for imports at the start of a process: Python would scan their hundreds of thousands of objects again and
    again, and once more at exit, which takes 7 % of a plan's time.

    Ctrl-C leaves the process without raising KeyboardInterrupt, which amid the imports of jax was lost at times, and at
    times ended in a segmentation fault. Nothing is on the disk yet that would have to be cleaned up.
    """
    main = threading.current_thread() is threading.main_thread()
    if ours := main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
        if ours and signal.getsignal(signal.SIGINT) is _leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_number, _frame):
    os.write(2, b"interrupted\n")
    os._exit(130)
