"""One run in several processes: they begin together, decide alike, and end together. A single one notices none of it.

Every process runs the same program on the same config. Process 0 alone writes: the record, evals, the manifest of a
checkpoint, what is prepared of data. So whatever is read from the disk, asked of a clock or of another program, and
leads to a decision, is asked in process 0 and told to the others: `from_first`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from curriculum.errors import InputError, is_out_of_memory
from curriculum.train.device import missing_flags
from curriculum.train.processes.launch import JOIN_SECONDS, Launch
from curriculum.train.processes.peers import Peers

# Of jax's own service, where a process hangs whose machine still answers; the end of a process is noticed at once.
_HEARTBEAT_SECONDS = 60
_NEWS_SECONDS = 2.0
_LEAVE_SECONDS = 10.0  # for a process that ends by an error to give back what it holds

_IN_ORDER = "--xla_cpu_multi_thread_eigen=false"

_peers: Peers | None = None
_left: Peers | None = None  # those whom this process told of the error by which it ends


def count() -> int:
    """How many processes the run has."""
    return 1 if _peers is None else _peers.count


def by_gloo() -> bool:
    """Whether this run's processes exchange by gloo, as on CPUs."""
    import jax

    return count() > 1 and jax.default_backend() == "cpu"


def is_first() -> bool:
    """Whether this process keeps the record."""
    return _peers is None or _peers.index == 0


def from_first(make: Callable[[], Any]) -> Any:
    """Call `make` in process 0 alone, and return its result in every process. All processes must call this.

    The result is plain JSON with numpy arrays: in the others tuples are lists, keys of mappings strings. InputError and
    OSError are raised in every process; the message of the former is in process 0 alone.
    """
    if _peers is None:
        return make()
    if _peers.index == 0:
        try:
            value = make()
        except InputError as error:
            error.in_every_process = True
            _peers.from_first({"input_error": True})
            raise
        except OSError as error:
            _peers.from_first({"os_error": [error.errno, error.strerror, error.filename]})
            raise
        _peers.from_first({"value": value})
        return value
    told = _peers.from_first()
    if "input_error" in told:
        error = InputError()
        error.in_every_process = True
        raise error
    if "os_error" in told:
        raise OSError(*told["os_error"])
    return told["value"]


def first_then_all(make: Callable[[], Any]) -> Any:
    """Call `make` in process 0 first, then in the others, which find what it prepared; what it returned here."""
    if _peers is None:
        return make()
    made: list[Any] = []
    from_first(lambda: made.append(make()))
    if not is_first():
        made.append(make())
    _peers.gather()
    return made[0]


def wait_for_all() -> None:
    """Return once every process has come here."""
    if _peers is not None:
        _peers.gather()


def agreed_stop(received: int | None, step: int) -> int | None:
    """The signal that stops the run after `step`, None to go on: the same in all, whichever process `received` it."""
    return received if _peers is None else _peers.agreed_stop(received, step)


def check_same(find: Callable[[], Mapping[str, str]]) -> None:
    """Raise InputError in every process where one finds something else than process 0 under a name."""
    if _peers is None:
        return
    of_processes = _peers.gather(dict(find()))
    problems = [
        f"process {index} has {other.get(name, 'nothing')} as {name}, process 0 {mine}; start all processes with the "
        "same command and the same installation, on the same files"
        for index, other in enumerate(of_processes)
        for name, mine in of_processes[0].items()
        if other.get(name) != mine
    ]
    _refuse(problems)


def check_in_each(find: Callable[[], Sequence[str]]) -> None:
    """Raise InputError in every process where one finds problems; process 0 says them all. One alone looks for none."""
    if _peers is not None:
        _refuse([problem for found in _peers.gather(list(find())) for problem in found])


def _refuse(problems: Sequence[str]) -> None:
    """Raise InputError for problems that every process knows of, if there are any."""
    if problems:
        error = InputError(*(problems if is_first() else ()))
        error.in_every_process = True
        raise error


@contextmanager
def joined(launch: Launch | None, join_seconds: float = JOIN_SECONDS) -> Iterator[None]:
    """Around a run: the processes find together, jax learns of it, and they part when all are done. None: it is alone.

    Before anything asks jax for its devices. Where a process ends by an error, or is killed, the others end too, with a
    line that says which one it was. Raises InputError where they do not find together.
    """
    global _peers
    if launch is None:
        yield
        return
    _peers = Peers(launch, join_seconds)
    try:
        _start_jax(launch, _peers.jax_address)
        try:
            yield
        except BaseException as error:
            if not _is_agreed(error):
                raise
            _part()
            raise
        _part()
    except BaseException as error:
        if not _is_agreed(error):
            leave(error)
            atexit.register(_exit_at_once, _exit_code(error))
        raise
    finally:
        _peers = None


@contextmanager
def leaving_on_error() -> Iterator[None]:
    """Around what the processes do together: one that ends by an error tells the others before it cleans up after
    itself, for which it may need them."""
    try:
        yield
    except BaseException as error:
        leave(error)
        raise


def leave(error: BaseException) -> None:
    """Tell the other processes of an error by which this one ends, unless they end by the same."""
    global _left
    if _peers is None or _is_agreed(error) or isinstance(error, GeneratorExit):
        return
    _peers.wait_for_news(_NEWS_SECONDS)  # it may be that another one is gone, which then ends this one
    _peers.leave(_in_a_line(error), _exit_code(error))
    _left = _peers
    late = threading.Timer(_LEAVE_SECONDS, _exit_late, (error,))
    late.daemon = True
    late.start()


def see_off() -> None:
    """Last of all, of a process that leaves by an error: what `Peers.see_off` says."""
    if _left is not None:
        _left.see_off()


def _start_jax(launch: Launch, address: str) -> None:
    import jax
    from absl import flags
    from orbax.checkpoint import multihost  # which defines the flag

    # While a checkpoint is saved in the background its processes wait for each other by jax's service. Orbax's own way
    # is a computation on the devices, which would come between those of a training step, here before and there after.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    flags.FLAGS.experimental_orbax_use_distributed_barrier = True
    del multihost
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Exchanges of one computation that do not wait for each other a CPU may begin in another order here than there,
    # which gloo takes for a mismatch and ends the process: seen within 100 steps in most runs without these two. Two
    # computations at once are not kept apart by them (`make_suite`).
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *missing_flags(given, [_IN_ORDER])])
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from the run
    loopback = {"coordinator_bind_address": address} if address.startswith(("127.", "localhost", "[::1]")) else {}
    jax.distributed.initialize(
        address,
        launch.num_processes,
        launch.process_id,
        local_device_ids=launch.local_devices,
        cluster_detection_method="deactivate",
        initialization_timeout=60,
        heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=30,
        **loopback,
    )


def _part() -> None:
    """In good order: jax's service, which process 0 runs, ends once nobody needs it."""
    import jax

    _peers.gather()
    jax.distributed.shutdown()
    _peers.close()


def _is_agreed(error: BaseException) -> bool:
    """Whether every process ends by this, having decided it together."""
    if isinstance(error, SystemExit) and error.__context__ is not None:
        return _is_agreed(error.__context__)
    return getattr(error, "in_every_process", False)


def _in_a_line(error: BaseException) -> str:
    said = f": {error}" if str(error) else ""
    return f"{type(error).__name__}{said}".partition("\n")[0][:300]


def _exit_code(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    return 2 if isinstance(error, InputError) or is_out_of_memory(error) else 1


def _exit_at_once(code: int) -> None:
    """At the interpreter's exit, before jax waits there for processes that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    see_off()
    os._exit(code)


def _exit_late(error: BaseException) -> None:
    traceback.print_exception(error)
    _exit_at_once(_exit_code(error))
