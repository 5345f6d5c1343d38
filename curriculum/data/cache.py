"""What is prepared already: the content key of a source, found by its files' sizes and times, and folders built once.

<store_dir>/contents/<signature>   the content key of a source whose files have these sizes and times
<store_dir>/verified/<signature>   empty; exists if the store whose files have these sizes and times was verified
<store_dir>/locks/<name>           held while the folder of that name is built; never deleted
<store_dir>/.../<name>.partial     a folder being built, or left by a process that was killed
"""

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from curriculum.data.progress import ConsoleProgress
from curriculum.data.sources import SourceConfig, source_files, suffix_of
from curriculum.disk.append import tell
from curriculum.disk.durable import rename_whole, write_whole
from curriculum.errors import InputError

READ_BYTES = 1 << 24
PARTIAL = ".partial"
_CONTENT_KEY = re.compile(rb"[0-9a-f]{32}")


def digest(*parts: object) -> str:
    """A hex key of plain values."""
    return xxhash.xxh3_128(repr(parts).encode()).hexdigest()


def source_signature(source: SourceConfig) -> str:
    """A key of a source's files from their paths, sizes and times; writing to one of them changes it."""
    if source.hf is not None:
        return digest("hf", source.hf)
    files = [(file.relative, file.size_bytes, file.mtime_ns, file.ctime_ns) for file in source_files(source)]
    return digest(os.path.realpath(source.local_path), files)


def find_content(source: SourceConfig, store_dir: Path) -> str | None:
    """The content key of a source if it was computed before and no file has changed since, else None.

    A file without a valid key, as a power cut may leave one, is ignored. Raises InputError if `store_dir` cannot be
    read.
    """
    path = store_dir / "contents" / source_signature(source)
    try:
        noted = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error) from error
    return noted.decode() if _CONTENT_KEY.fullmatch(noted) else None


def is_there(path: Path) -> bool:
    """Whether a path under the store folder exists; raises InputError if that cannot be told."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unreadable(path, error) from error
    return True


def _unreadable(path: Path, error: OSError) -> InputError:
    return InputError(f"{path}: {error.strerror}; expected a readable store folder; fix that or choose another")


def content_of(name: str, source: SourceConfig, store_dir: Path) -> str:
    """A key of the bytes of a source's files, in order; reads them if `find_content` has no key.

    A long read shows its progress under `name`. A hub dataset has no files here: its name stands for its content.
    """
    if (known := find_content(source, store_dir)) is not None:
        return known
    signature = source_signature(source)
    content = xxhash.xxh3_128()
    if source.hf is not None:
        content.update(f"hf:{source.hf}".encode())
    else:
        files = source_files(source)
        progress, done_bytes = ConsoleProgress(f"reading {name}"), 0
        total_bytes = sum(file.size_bytes for file in files)
        for file in files:
            suffix = suffix_of(file.relative)
            content.update(os.fsencode(f"{suffix} {file.size_bytes}\n"))
            try:
                with open(file.path, "rb", buffering=0) as stream:
                    while block := stream.read(READ_BYTES):
                        content.update(block)
                        done_bytes += len(block)
                        progress(done_bytes, total_bytes)
            except OSError as error:
                raise InputError(f"{file.path}: {error.strerror}; expected a readable file") from error
    if source_signature(source) != signature:
        raise InputError(f"{source.location}: changed while it was read; start again when it is complete")
    with writing(store_dir):
        path = store_dir / "contents" / signature
        path.parent.mkdir(parents=True, exist_ok=True)
        # A random name: processes on several machines that share the folder may have the same process id.
        write_whole(path, content.hexdigest(), suffix=f".{secrets.token_hex(8)}")
    return content.hexdigest()


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Turn an OSError of the block into an InputError that names its path, or else `directory`."""
    try:
        yield
    except OSError as error:
        place, reason = error.filename2 or error.filename or directory, error.strerror or error  # 2: of a rename
        raise InputError(f"{place}: cannot write here ({reason}); fix that or choose another folder") from error


@contextmanager
def building(target: Path, lock_path: Path) -> Iterator[Path | None]:
    """Yield an empty folder, renamed to `target` if the block ends without an error; None if `target` exists.

    One process builds at a time; others wait for the lock and then find the folder. What a killed process left is
    deleted, and only a finished folder ever has the name.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(lock_path, f"waiting for another process that builds {target}"):
            if target.exists():
                yield None
                return
            partial = target.with_name(target.name + PARTIAL)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                yield partial
                rename_whole(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


def build_once(directory: Path, store_dir: Path, write: Callable[[Path], None]) -> None:
    """Unless `directory`, which lies below `store_dir`, exists: let `write` fill it, under the rules of `building`."""
    if is_there(directory):
        return
    locks = store_dir / "locks"
    _sweep(directory.parent, locks)
    with building(directory, locks / directory.name) as partial:
        if partial is not None:
            write(partial)


def _sweep(parent: Path, locks: Path) -> None:
    """Delete the folders that killed processes left half-built under `parent`."""
    for partial in parent.glob("*" + PARTIAL):
        lock_path = locks / partial.name.removesuffix(PARTIAL)
        with writing(partial), _locked(lock_path, wait_message=None) as held:
            if held:
                shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(path: Path, wait_message: str | None) -> Iterator[bool]:
    """Yield True with a file's lock held. Else print `wait_message` and wait, or yield False if that is None."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if wait_message is not None:
            tell(wait_message)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield wait_message is not None
    else:
        yield True
    finally:
        os.close(descriptor)
