"""What is raised where the user gave something wrong, and how it is said: InputError, FieldError of one key."""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """The user's input cannot be used as it is; the command exits with code 2.

    Each problem is one line that says where, what was got, what was expected and how to mend it. `details` are lines to
    read or to copy, of all problems together.
    """

    def __init__(self, *problems: str, details: Sequence[str] = ()):
        self.problems, self.details = problems, tuple(details)
        super().__init__("\n".join([*problems, *details]))


class FieldError(ValueError):
    """What a dataclass of the config refuses of its field `key`, with the others as they are."""

    def __init__(self, key: str, message: str):
        self.key = key
        super().__init__(message)


def is_out_of_memory(error: BaseException) -> bool:
    """Of the host; or of a device, as jax raises it, whose word for it gRPC has for other things too."""
    exhausted = isinstance(error, RuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, MemoryError) or (exhausted and any(w in str(error).lower() for w in ("memory", "alloc")))


@contextmanager
def readable(path: Path, what: str = "read") -> Iterator[None]:
    """Raise InputError where a file or folder is there, but cannot be read (or what else is `what`): another user's."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or path}: cannot be {what}: {error.strerror}; mend that, and try again"
        ) from None


def check_choice(option: str, name: str, choices: Collection[str]) -> None:
    """Raise InputError where the value of an option is not among its choices."""
    if name not in choices:
        from difflib import get_close_matches

        near = get_close_matches(name, choices, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"{option} {name}: there is no such one; {hint}expected one of: {', '.join(choices)}")


def no_such(what: str, name: str, known: Iterable[str]) -> str:
    """`no such key; did you mean ...? (keys: ...)`: the one most like it, or else those that begin with it."""
    from difflib import get_close_matches

    known = list(known)
    near = get_close_matches(name, known, 1) or [other for other in known if name and other.startswith(name)]
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if 0 < len(near) <= 3 else ""
    return f"no such {what}{hint} ({what}s: {', '.join(sorted(known))})"


def no_such_path(path: Path) -> str:
    """What to say of a path that is not there: the name beside it that it may have been meant for."""
    from difflib import get_close_matches

    parent = next((p for p in path.parents if p.exists()), Path("."))
    listable = parent == path.parent and parent.is_dir() and os.access(parent, os.R_OK | os.X_OK)
    names = [name for name in os.listdir(parent) if name != path.name] if listable else []
    near = get_close_matches(path.name, names, 1)
    hint = f"; did you mean {str(parent / near[0])!r}?" if near else ""
    return f"does not exist{hint} (paths are relative to the working folder)"
