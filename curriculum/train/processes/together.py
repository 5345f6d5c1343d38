"""One run in several processes: they begin together, decide alike, and end together. A single process notices nothing.

Every process runs the same program on the same config. Process 0 alone writes: the record, evals, the manifests of
checkpoints, prepared data. So whatever leads to a decision and comes from the disk, a clock or another program is
asked in process 0 and told to the others: `from_first`.
"""

import atexit
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from curriculum.errors import InputError, is_out_of_memory
from curriculum.train.device import missing_flags
from curriculum.train.processes.connections import is_loopback
from curriculum.train.processes.launch import JOIN_SECONDS, Launch
from curriculum.train.processes.peers import Peers

# Of jax's own service, for a process that hangs while its machine answers; the end of a process is noticed at once.
_HEARTBEAT_SECONDS = 60
_NEWS_SECONDS = 2.0
_SEEN_SECONDS = 3.0  # by which a network folder usually shows a new file
_LEAVE_SECONDS = 10.0  # for a process that ends with an error to release what it holds

_IN_ORDER = "--xla_cpu_multi_thread_eigen=false"

_peers: Peers | None = None
_left: Peers | None = None  # the peers that this process told of the error that ends it


def count() -> int:
    """How many processes the run has."""
    return 1 if _peers is None else _peers.count


def is_first() -> bool:
    """Whether this is process 0, which writes the record."""
    return _peers is None or _peers.index == 0


def from_first(make: Callable[[], Any], received: Callable[[], int | None] = lambda: None) -> Any:
    """Call `make` in process 0 alone, and return its result in every process. All processes must call this.

    The result is plain JSON with numpy arrays: in the others tuples are lists, and keys of mappings strings.
    InputError and OSError are raised in every process; only process 0 has the message of an InputError. If `make` takes
    long, the others tell process 0 of the signal that they have `received` meanwhile: `signal_elsewhere`.
    """
    if _peers is None:
        return make()
    if _peers.index == 0:
        try:
            value = make()
        except InputError as error:
            _agreed(error)
            _peers.from_first({"input_error": True})
            raise
        except OSError as error:
            _peers.from_first({"os_error": [error.errno, error.strerror, error.filename]})
            raise
        _peers.from_first({"value": value})
        return value
    told = _peers.from_first(received=received)
    if "input_error" in told:
        raise _agreed(InputError())
    if "os_error" in told:
        raise OSError(*told["os_error"])
    return told["value"]


def signal_elsewhere() -> int | None:
    """In process 0: the signal that another process received in `from_first`, if one did."""
    return None if _peers is None else _peers.signal_elsewhere


def first_then_all(make: Callable[[], Any]) -> Any:
    """Call `make` in process 0 first, then in the others, which find what it prepared; each returns its own result."""
    if _peers is None:
        return make()
    made: list[Any] = []
    from_first(lambda: made.append(make()))
    if not is_first():
        made.append(make())
    _peers.gather()
    return made[0]


def wait_for_all() -> None:
    """Return once every process has called this."""
    if _peers is not None:
        _peers.gather()


def agreed_stop(received: int | None, step: int) -> int | None:
    """The signal that stops the run after `step`, None to continue: the same in all, whichever `received` it."""
    return received if _peers is None else _peers.agreed_stop(received, step)


def check_same(find: Callable[[], Mapping[str, str]]) -> None:
    """Raise InputError in every process if one of them finds another value under a name than process 0."""
    if _peers is None:
        return
    of_processes = _peers.gather(dict(find()))
    problems = [
        f"process {index} has {other.get(name, 'nothing')} as {name}, process 0 {mine.get(name, 'nothing')}; start all "
        "processes with the same command and the same installation, on the same files"
        for mine in of_processes[:1]
        for index, other in enumerate(of_processes)
        for name in dict.fromkeys([*mine, *other])
        if other.get(name) != mine.get(name)
    ]
    _refuse(problems)


def check_in_each(find: Callable[[], Sequence[str]]) -> None:
    """Raise InputError in every process if one finds problems; process 0 reports all. One alone looks for none."""
    if _peers is not None:
        _refuse([problem for found in _peers.gather(list(find())) for problem in found])


def share_folder(folder: Path) -> bool:
    """Whether process 0 can write to the folder at this path and every process sees that. All must call this."""
    if _peers is None:
        return True

    def mark() -> str | None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix="seen-by-all-", dir=folder, delete=False) as file:
                return Path(file.name).name
        except OSError:
            return None

    name = from_first(mark)
    seen, until = False, time.monotonic() + _SEEN_SECONDS
    while name is not None and not (seen := os.path.exists(folder / name)) and time.monotonic() < until:
        time.sleep(0.1)
    shared = all(_peers.gather(seen))
    if name is not None and is_first():
        (folder / name).unlink(missing_ok=True)
    return shared


def _refuse(problems: Sequence[str]) -> None:
    """Raise InputError for problems that every process knows of, if there are any; process 0 has the messages."""
    if problems:
        raise _agreed(InputError(*(problems if is_first() else ())))


@contextmanager
def joined(launch: Launch | None, join_seconds: float = JOIN_SECONDS) -> Iterator[None]:
    """Context of a run: the processes connect, jax learns of it, and they part when all are done. None: it is alone.

    To be entered before anything asks jax for its devices. If a process ends with an error or is killed, the others
    end too, with a line that says which one it was. Raises InputError if they cannot connect.
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
    """Context of what the processes do together.

    One that ends with an error tells the others before it cleans up, as the clean-up may need them.
    """
    try:
        yield
    except BaseException as error:
        leave(error)
        raise


def leave(error: BaseException) -> None:
    """Tell the other processes of an error that ends this one, unless they end by the same error."""
    global _left
    if _peers is None or _is_agreed(error) or isinstance(error, GeneratorExit):
        return
    _peers.wait_for_news(_NEWS_SECONDS)  # perhaps another process is gone: that news then ends this one
    if not isinstance(error, InputError | SystemExit | KeyboardInterrupt):
        _peers.give_way(_in_a_line(error))
    _peers.leave(_in_a_line(error), _exit_code(error))
    _left = _peers
    late = threading.Timer(_LEAVE_SECONDS, _exit_late, (error,))
    late.daemon = True
    late.start()


def see_off() -> None:
    """Last call of a process that leaves with an error; does what `Peers.see_off` says."""
    if _left is not None:
        _left.see_off()


def _start_jax(launch: Launch, address: str) -> None:
    import jax
    from absl import flags
    from orbax.checkpoint import multihost  # which defines the flag

    # During a save in the background, processes wait for each other by jax's service. Orbax's default is a computation
    # on the devices, which one process might run before a training step and another after it.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    flags.FLAGS.experimental_orbax_use_distributed_barrier = True
    del multihost
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # CPUs may start independent collectives of one computation in another order in each process. Gloo takes that for a
    # mismatch and ends the process: seen within 100 steps in most runs without these two settings. They do not keep two
    # concurrent computations apart (`make_suite`).
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *missing_flags(given, [_IN_ORDER])])
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from the run
    loopback = {"coordinator_bind_address": address} if is_loopback(launch.host) else {}
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
    """End in good order: jax's service, which process 0 runs, ends once nobody needs it."""
    import jax

    _peers.gather()
    jax.distributed.shutdown()
    _peers.close()


def _agreed(error: InputError) -> InputError:
    error.in_every_process = True
    return error


def _is_agreed(error: BaseException) -> bool:
    """Whether every process ends by this error, having decided so together."""
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
    """End a process whose clean-up takes too long, as by waiting for another one, after telling its error."""
    if isinstance(error, InputError):
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    _exit_at_once(_exit_code(error))
