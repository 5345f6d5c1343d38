"""Imports without garbage collection, which Ctrl-C ends at once."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Context of imports at the start of a process, in which Ctrl-C ends it at once.

    Without garbage collection, from which the imported objects are frozen for good: scanning these hundreds of
    thousands again and again, and once more at exit, takes 7 % of a plan's time. Ctrl-C raises no KeyboardInterrupt: in
    the imports of jax that was lost at times, and at times ended in a segmentation fault. There is nothing on the disk
    yet to clean up.
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
