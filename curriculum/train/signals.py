"""Orderly stops by SIGINT, SIGTERM and SIGHUP."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from curriculum.train.processes.together import agreed_stop, is_first, signal_elsewhere

_ends_process = False  # at a second signal


class Stopped(Exception):
    """A signal stopped the run after its checkpoint was saved or, if `why_not` is given, could not be saved.

    `last_good` is then the step of the last good checkpoint. Before the first update there is nothing to save.
    """

    in_every_process = True

    def __init__(self, signal_number: int, step: int, last_good: int | None = None, why_not: str = ""):
        super().__init__(signal_number, step, last_good, why_not)  # what a copy in another process is made from
        self.signal_number, self.step, self.last_good, self.why_not = signal_number, step, last_good, why_not

    def __str__(self) -> str:
        name = signal.Signals(self.signal_number).name
        if self.step == 0 and self.last_good is None:
            return f"stopped by {name} before the first update, so nothing had to be saved"
        saved = "which was saved"
        if self.why_not:
            good = (
                "there is no checkpoint yet"
                if self.last_good is None
                else f"the last good checkpoint is of step {self.last_good}"
            )
            saved = f"which could not be saved ({self.why_not}): {good}"
        return f"stopped by {name} at step {self.step}, {saved}"


class StopSignals:
    """SIGINT, SIGTERM and SIGHUP ask for a stop after the step; a second one ends the run at once.

    The process is the caller's: a second SIGINT raises KeyboardInterrupt, and another signal does what it did before.
    Inside `ending_the_process` each of them ends the process.

    SIGHUP comes when the terminal is closed. Under nohup, which ignores it, it stays ignored. A signal that a program
    around Python handles, whose handler Python could not put back, is left to it.
    """

    def __init__(self):
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handler = signal.getsignal(number)
                if handler is not None and (number != signal.SIGHUP or handler is not signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def anywhere(self) -> int | None:
        """In process 0: the signal that it received, or another process while it waited for this one."""
        return self.received or signal_elsewhere()

    def after(self, step: int) -> int | None:
        """The signal to stop by after `step`, None to continue: the same in every process, whichever received it."""
        return agreed_stop(self.received, step)

    def _receive(self, number, _frame):
        if self.received is not None:
            self._end_at_once(number)
            return
        self.received = number
        if is_first():  # of several processes, which all stop
            name = signal.Signals(number).name
            _say(f"{name}: the run stops after this step and saves; a second one ends it at once\n")

    def _end_at_once(self, number: int) -> None:
        if _ends_process:
            if is_first():
                _say(f"{signal.Signals(number).name}: ended at once; what is not in a checkpoint is trained again\n")
            os._exit(128 + number)
        self.__exit__()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.raise_signal(number)


@contextlib.contextmanager
def ending_the_process() -> Iterator[None]:
    """Context of a command, in whose process nothing is but its run: a second signal ends the process at once."""
    global _ends_process
    _ends_process = True
    try:
        yield
    finally:
        _ends_process = False


def _say(line: str) -> None:
    """Write a line to stderr, on a terminal below the line of progress; in a handler, so without Python's buffers."""
    with contextlib.suppress(OSError):
        os.write(2, (("\n" if os.isatty(2) else "") + line).encode())
