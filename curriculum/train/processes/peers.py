"""The connections between the processes of a run, one from each to process 0.

They carry what all must decide alike. By them the end of one process is noticed by all at once: its operating system
closes the connection, however it ended. jax alone would take up to its heartbeat's timeout, or say it in a stack
trace.
"""

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from curriculum.errors import InputError
from curriculum.train.processes.connections import (
    address,
    frame,
    free_port,
    has_ended,
    keep_alive,
    listening,
    read_message,
)
from curriculum.train.processes.launch import Launch

GRACE_SECONDS = 5.0  # for a process to end by itself when another ends with an error, which it may have too
_OFF_SECONDS = 3.0  # that a process may take to end after that
_TELL_AFTER_SECONDS = 10.0
_LOOK_SECONDS = 0.5  # until one that waits looks for a signal
_ANSWER_SECONDS = 5.0  # that process 0 may take, once all have come or it has given up
_GO_ON = "continue from the newest checkpoint with --resume latest, with as many processes as you then have"


class Peers:
    """What one process knows of the others.

    Only the main thread uses `from_first` and `gather`, in every process in the same order. Raises InputError if the
    processes do not all connect within `join_seconds`.
    """

    def __init__(self, launch: Launch, join_seconds: float):
        self.index, self.count, self._launched_by = launch.process_id, launch.num_processes, launch.launched_by
        self._names = {self.index: f"{socket.gethostname()}, pid {os.getpid()}"}
        self._sockets: dict[int, socket.socket] = {}
        self._inbox = {i: queue.SimpleQueue() for i in range(self.count)}  # by sender
        self._sending = threading.Lock()
        self._changed = threading.Condition()  # guards all that follows
        self._closed = self._left = self._ending = False
        self._ended_by: str | None = None  # why another process ends
        # (rollbacks so far, step) at which the main thread asks whether to stop: last, and next at the earliest.
        self._last_look, self._next_look = (0, -1), (0, 0)
        self._looks: dict[int, tuple[int, int]] = {}  # in process 0: the next of each process, once a stop is asked for
        self._stop_signal: int | None = None
        self._stop_look: tuple[int, int] | None = None
        self._asking = self._told_signal = False
        self.signal_elsewhere: int | None = None  # in process 0: of a process that waited for it
        if self.index == 0:
            self.jax_address = self._meet(launch, join_seconds)
        else:
            self.jax_address = self._come(launch, join_seconds)
        self._receiving = [
            threading.Thread(target=self._receive, args=(index,), name=f"process-{index}", daemon=True)
            for index in self._sockets
        ]
        for thread in self._receiving:
            thread.start()

    def from_first(self, value: Any = None, received: Callable[[], int | None] = lambda: None) -> Any:
        """The value that process 0 passes, in every process; plain JSON and numpy arrays. Others are ignored.

        `received`: the signal that this process got, if any. Process 0 hears of it at once (`signal_elsewhere`).
        """
        if self._left:
            return value
        while self.index:
            try:
                return self._inbox[0].get(timeout=None if self._told_signal else _LOOK_SECONDS)
            except queue.Empty:
                if (number := received()) is not None:
                    self._told_signal = True
                    self._send(0, {"kind": "signal", "signal": number})
        self._send_all({"kind": "value", "value": value})
        return value

    def gather(self, value: Any = None) -> list[Any]:
        """The values that the processes pass, by index. Returns once all of them have called it."""
        if self._left:
            return [value] * self.count
        if self.index:
            self._send(0, {"kind": "value", "value": value})
            return self._inbox[0].get()
        values = [value, *(self._inbox[i].get() for i in range(1, self.count))]
        self._send_all({"kind": "value", "value": values})
        return values

    def agreed_stop(self, received: int | None, step: int) -> int | None:
        """The signal to stop by after `step`, None to continue; the same in all processes.

        Called after every step. `received`: the signal that this process got. No process waits for another until a
        stop is asked for; then all stop at the first step that none has passed, or, if a rollback comes before it, at
        the first one after that.
        """
        if self._left:
            return received
        with self._changed:
            rollbacks, last = self._last_look
            look = self._last_look = (rollbacks + (step <= last), step)
            asks = received is not None and self._stop_signal is None
            if self._stop_signal is None:
                self._next_look = (look[0], step + 1)
            # Having promised process 0 to look at `_next_look`, this process must wait there to learn when to stop.
            elif look >= self._next_look:
                self._changed.wait_for(lambda: self._stop_look is not None)
            if self._stop_look is not None and look >= self._stop_look:
                return self._stop_signal
        if asks:
            if self.index:
                self._send(0, {"kind": "stop", "signal": received})
            else:
                self._asked_to_stop(received)
        return None

    def leave(self, why: str, exit_code: int) -> None:
        """Tell the others that this process ends with an error, so that they end with the same exit code."""
        with self._changed:
            if self._left or self._closed:
                return
            self._left = self._ending = True
            self._changed.notify_all()
        self._send_all({"kind": "gone", "index": self.index, "why": why, "exit_code": exit_code})

    def see_off(self) -> None:
        """In process 0, before it ends: wait a while for the others to end.

        jax's service ends with process 0, and a process that still needs it is aborted before it can report anything.
        """
        until = time.monotonic() + GRACE_SECONDS + _OFF_SECONDS
        for thread in self._receiving if self.index == 0 else ():
            thread.join(max(until - time.monotonic(), 0))

    def wait_for_news(self, seconds: float) -> None:
        """Give the receiving threads time to hear why communication failed; they then end this process."""
        with self._changed:
            self._changed.wait_for(lambda: self._left or self._closed, seconds)

    def give_way(self, why: str) -> None:
        """If another process ends for another reason than `why`, wait for that to end this one, whose error follows.

        If all have the same error, each tells it.
        """
        with self._changed:
            if self._ended_by in (None, why) or self._left or self._closed:
                return
        threading.Event().wait(3 * GRACE_SECONDS)  # more than `_lost` takes

    def close(self) -> None:
        """Disconnect in good order, all at once."""
        if not self._left:
            if self.index:
                self._send(0, {"kind": "value", "value": None})
                self._inbox[0].get()
            else:
                for index in self._sockets:
                    self._inbox[index].get()
                self._closed = True
                self._send_all({"kind": "end"})
        self._closed = True
        for connection in self._sockets.values():
            connection.close()

    def _meet(self, launch: Launch, join_seconds: float) -> str:
        """In process 0: wait for all the others; returns the address where jax's own service is to listen."""
        where, began, told = address(launch.host, launch.port), time.monotonic(), False
        try:
            server = listening(launch.host, launch.port)
        except OSError as error:
            raise InputError(
                f"--coordinator {where}: process 0 cannot listen there: {error.strerror or error}; expected an address "
                "of this machine, where process 0 runs, and a port that is free"
            ) from None
        jax_address = address(launch.host, free_port(launch.host))
        with server:
            while missing := ", ".join(map(str, self._missing())):
                waited = time.monotonic() - began
                if waited > join_seconds:
                    self._refuse_all(f"process 0 gave up after {join_seconds:g} s: {missing} did not come, or left")
                    raise InputError(
                        f"--coordinator {where}: waited {join_seconds:g} s for {self.count} processes, but these "
                        f"did not connect: {missing}; start all of them with this address, --num-processes "
                        f"{self.count} and each with its own --process-id (or wait longer: --join-seconds)"
                    )
                if waited > _TELL_AFTER_SECONDS and not told:
                    told = True
                    print(f"waiting at {where} for {missing} of {self.count} processes", file=sys.stderr, flush=True)
                server.settimeout(min(1.0, max(join_seconds - waited, 0.01)))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                self._welcome(connection)
        for index in self._sockets:
            self._send(index, {"kind": "welcome", "jax": jax_address, "names": list(self._names.items())})
        return jax_address

    def _missing(self) -> list[int]:
        """In process 0: those that have not come yet, or have gone again, as a process that is started anew has."""
        for index in [i for i, connection in self._sockets.items() if has_ended(connection)]:
            self._sockets.pop(index).close()
        return [i for i in range(1, self.count) if i not in self._sockets]

    def _welcome(self, connection: socket.socket) -> None:
        """Accept a process, or refuse it and with it all others.

        A connection from anything else is ignored; a process of another launch, with the same address, is sent away.
        """
        keep_alive(connection)
        connection.settimeout(5.0)
        try:
            hello = read_message(connection)
            index, count, name = hello["index"], hello["count"], str(hello["name"])
            launched_by = str(hello["launched_by"])
        except (OSError, ValueError, KeyError, TypeError):
            index = count = name = None
        if not (isinstance(index, int) and isinstance(count, int) and 0 <= index < count):
            connection.close()
            return
        if launched_by and self._launched_by and launched_by != self._launched_by:
            _refuse(
                connection,
                f"process 0 of {self._launched_by} listens there ({self._names[0]}), and this is process {index} of "
                f"{launched_by}; give each launch a port of its own: --coordinator HOST:PORT, or JAX_COORDINATOR_PORT",
            )
            return
        problem = None
        if count != self.count:
            problem = f"process {index} ({name}) was started with --num-processes {count}, process 0 with {self.count}"
        elif index not in self._missing():
            problem = f"two processes were started with --process-id {index}: {self._names[index]}, and {name}"
        if problem:
            fix = f"{problem}; give all the same number, and each an id of its own"
            _refuse(connection, fix)
            self._refuse_all(fix)
            raise InputError(fix)
        connection.settimeout(None)
        self._sockets[index], self._names[index] = connection, name

    def _refuse_all(self, why: str) -> None:
        for connection in self._sockets.values():
            _refuse(connection, why)

    def _come(self, launch: Launch, join_seconds: float) -> str:
        """In the others: connect to process 0, which may start later; returns the address of jax's own service."""
        where, began, told = address(launch.host, launch.port), time.monotonic(), False
        while True:
            try:
                connection = socket.create_connection((launch.host, launch.port), timeout=5.0)
                break
            except OSError as error:
                why, waited = error.strerror or str(error), time.monotonic() - began
            if waited > join_seconds:
                raise InputError(
                    f"--coordinator {where}: process {self.index} of {self.count} could not reach it for "
                    f"{join_seconds:g} s: {why}; expected process 0 to listen there: its machine's address "
                    "as seen from this one (or wait longer: --join-seconds)"
                )
            if waited > _TELL_AFTER_SECONDS and not told:
                told = True
                print(f"process {self.index}: waiting for {where}: {why}", file=sys.stderr, flush=True)
            time.sleep(0.2)
        keep_alive(connection)
        try:
            hello = {"index": self.index, "count": self.count, "name": self._names[self.index]}
            connection.sendall(frame(hello | {"launched_by": launch.launched_by}))
            connection.settimeout(join_seconds + _ANSWER_SECONDS)
            answer = read_message(connection)
            refused = answer["why"] if answer["kind"] == "refused" else None
            if refused is None:
                self._names |= dict(answer["names"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            refused = f"is not process 0 of a run, or that has ended: {error}; see its output for why"
            if isinstance(error, TimeoutError) and error.errno is None:  # with a number, its machine is lost
                refused = (
                    f"process 0 is there, but not all {self.count} processes came within {join_seconds:g} s; start the "
                    "others too (or wait longer: --join-seconds)"
                )
        if refused:
            connection.close()
            raise InputError(f"--coordinator {where}: {refused}")
        connection.settimeout(None)
        self._sockets[0] = connection
        return answer["jax"]

    def _receive(self, sender: int) -> None:
        """A thread per connection: values go to the main thread's inbox; other messages are handled here."""
        while True:
            try:
                message = read_message(self._sockets[sender])
            except (OSError, ValueError):
                return self._lost(sender, None, 1)
            match message["kind"]:
                case "value":
                    self._inbox[sender].put(message["value"])
                case "end":
                    self._closed = True
                    self._inbox[sender].put(None)
                    return None
                case "gone":
                    self._told_gone(message["index"], message["why"], message["exit_code"])
                case "signal":
                    self.signal_elsewhere = message["signal"]
                case "stop":
                    self._asked_to_stop(message["signal"])
                case "stopping":
                    self._send(0, {"kind": "look", "at": self._promise(message["signal"])})
                case "look":
                    self._looked(sender, tuple(message["at"]))
                case "stop_at":
                    self._stop_after(tuple(message["at"]))

    def _told_gone(self, index: int, why: str | None, exit_code: int) -> None:
        if why is None:  # before process 0, which ends at once, seems the lost one
            self._lost(index, None, exit_code)
        elif not self._left:  # at the interpreter's end no thread can be started
            lost = (index, why, exit_code)
            threading.Thread(target=self._lost, args=lost, daemon=True).start()  # which waits

    def _asked_to_stop(self, signal_number: int) -> None:
        """In process 0: ask every process where it can stop at the earliest."""
        with self._changed:
            if self._asking:
                return
            self._asking = True
        self._send_all({"kind": "stopping", "signal": signal_number})
        self._looked(0, self._promise(signal_number))

    def _promise(self, signal_number: int) -> tuple[int, int]:
        with self._changed:
            self._stop_signal = signal_number
            return self._next_look

    def _looked(self, index: int, look: tuple[int, int]) -> None:
        with self._changed:
            self._looks[index] = look
            agreed = max(self._looks.values()) if len(self._looks) == self.count else None
        if agreed is not None:
            self._send_all({"kind": "stop_at", "at": agreed})
            self._stop_after(agreed)

    def _stop_after(self, look: tuple[int, int]) -> None:
        with self._changed:
            self._stop_look = look
            self._changed.notify_all()

    def _lost(self, index: int, why: str | None, exit_code: int) -> None:
        """End this process, as another one is gone; `why` is its own message, None if its connection broke."""
        with self._changed:
            if self._closed or self._left:
                return
            first, self._ending, self._ended_by = not self._ending, True, self._ended_by or why
        if not first:
            return
        if self.index == 0:
            for other in self._sockets:
                if other != index:
                    self._send(other, {"kind": "gone", "index": index, "why": why, "exit_code": exit_code})
        if why is not None:
            with self._changed:
                if self._changed.wait_for(lambda: self._left or self._closed, GRACE_SECONDS):
                    return
        ended = "is gone: it was killed, or its machine cannot be reached" if why is None else f"ended: {why}"
        name = self._names.get(index, "?")
        line = f"process {index} of {self.count} ({name}) {ended}. Process {self.index} ends as well; {_GO_ON}\n"
        try:
            os.write(2, line.encode())
            if why is not None:
                self.see_off()
        finally:
            os._exit(exit_code)

    def _send_all(self, message: dict[str, Any]) -> None:
        for index in self._sockets:
            self._send(index, message)

    def _send(self, index: int, message: dict[str, Any]) -> None:
        framed = frame(message)
        with self._sending:
            try:
                self._sockets[index].sendall(framed)
            except OSError:
                if self._ending:  # it is gone as well
                    return
                threading.Event().wait(GRACE_SECONDS)  # the receiving thread has noticed, and ends this process
                raise


def _refuse(connection: socket.socket, why: str) -> None:
    with suppress(OSError):  # it is gone
        connection.sendall(frame({"kind": "refused", "why": why}))
    connection.close()
