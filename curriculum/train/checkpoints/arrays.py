"""Trees of arrays on disk, such as the parameters of a checkpoint: saved, and loaded to where they are needed."""

import gc
import logging
import os
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from curriculum.disk.append import is_disk_error
from curriculum.errors import InputError, check_read_as_utf8
from curriculum.find_checkpoint import check_there
from curriculum.model.model import by_name
from curriculum.train.device import own_settings

# Runs the saves of a process one after the other: orbax tells their operations apart by one counter for all of them.
in_turn = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")


def disk_error(error: Exception) -> Exception:
    """The OSError behind an error of tensorstore, which has its number in the message; or else the error itself."""
    number = None if isinstance(error, OSError) else re.search(r"os_error_code='(\d+)'", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else error


def save_params(folder: Path, params: Any) -> None:
    """Save a tree of arrays for `load_params`, after the saves under way. Raises OSError if the disk refuses it."""
    import orbax.checkpoint as ocp

    @own_settings()
    def save() -> None:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, params)
            checkpointer.wait_until_finished()

    try:
        in_turn.submit(save).result()
    except (OSError, ValueError) as error:
        raise disk_error(error) from None


@own_settings()
def load_params(folder: str | os.PathLike, like: Any = None) -> Any:
    """Load a saved tree of arrays, such as `RUN/checkpoints/STEP/params`, whatever devices it was saved from.

    It goes to the host, or gets the placement of `like`. Raises InputError if there is none, if it cannot be read, or
    if an array has another shape or type than in `like`.
    """
    folder = Path(folder).absolute()
    check_read_as_utf8(folder)
    if folder.parent.name.isdecimal():
        check_there(folder.parent)
    if not (folder / "_METADATA").exists():
        raise InputError(f"{folder}: holds no saved arrays; expected the folder RUN/checkpoints/STEP/params")
    try:
        return _restore(folder, like)
    except Exception as error:
        # If an array's bytes are missing, orbax raises the class Exception itself; others are not about the file.
        if isinstance(error, InputError) or not (
            type(error) is Exception or isinstance(error, ValueError | OSError | KeyError)
        ):
            raise
        if folder.parent.name.isdecimal():
            check_there(folder.parent)
        cause = error.__cause__ if type(error) is Exception and error.__cause__ else error
        if isinstance(cause, KeyboardInterrupt):  # which orbax turns into an Exception
            raise cause from None
        what = next(iter(str(cause).partition(" [tensorstore_spec")[0].splitlines()), type(cause).__name__)
        del cause
    # Outside of `except`, so that nothing holds on to the reads of other arrays that were under way: once collected,
    # each would print a traceback.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    gc.collect()
    sys.unraisablehook = hook
    message = f"{folder}: cannot be read: {what[:300]}; use the checkpoint of another step, or restore this one"
    raise InputError(f"{message} from a copy")


def _restore(folder: Path, like: Any) -> Any:
    """The saved arrays, placed as `load_params` says. Raises what orbax raises, and InputError for other arrays."""
    import orbax.checkpoint as ocp

    saved = ocp.StandardCheckpointHandler().metadata(folder).tree
    if like is None:
        like = abstract_on_host(saved)
    else:
        like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), like)
        _check_arrays(folder, _described(saved), _described(like))
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, like)


def abstract_on_host(shapes: Any) -> Any:
    """Shapes and types of a tree, placed on the host."""
    host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=host), shapes)


def _described(tree: Any) -> dict[str, str]:
    return {name: f"{array.dtype} {list(array.shape)}" for name, array in by_name(tree).items()}


def _check_arrays(folder: Path, saved: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise InputError if arrays differ in type or shape: orbax would cast another type silently."""
    if different := [name for name in sorted({**saved, **expected}) if saved.get(name) != expected.get(name)]:
        name, *more = different
        raise InputError(
            f"{folder}: array {name}: got {saved.get(name)}, expected {expected.get(name)}"
            f"{f' ({len(more)} more differ)' if more else ''}; use a checkpoint of this model and optimizer"
        )


@cache
def quiet_failed_saves() -> None:
    """Suppress the tracebacks that orbax and tensorstore print of a failed save: who waits for it gets the error."""
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
