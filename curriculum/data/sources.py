"""Sources of text: how a config names them, and the files that hold their documents."""

import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from curriculum.data.split import parse_share
from curriculum.errors import FieldError, InputError
from phases.schedule import OnExhaust

COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
# Published corpora call compressed JSON lines .json too.
JSON_LINES = (".jsonl", ".ndjson", *(rows + end for end in COMPRESSED for rows in (".jsonl", ".ndjson", ".json")))
COLUMNAR = {".parquet": "parquet", ".arrow": "arrow"}
FLAT = ".bin"
# What `datasets` writes beside rows that it saves: the first lists the files that hold them, in the folder of a
# dataset; the second names the datasets in a folder of several.
_STATE, _SPLITS = "state.json", "dataset_dict.json"


@dataclass(frozen=True)
class SourceConfig:
    """A named training corpus: documents on disk (`path`) or on the hub (`hf`), one of the two."""

    path: str | None = None
    """A file, a folder (read recursively), a flat .bin, or a prepared folder."""
    hf: str | None = None
    """A dataset on the hub, NAME or NAME:CONFIGURATION; its split "train" is read."""
    format: Literal["text", "messages", "completion"] = "text"
    """What a row of JSONL, parquet, arrow or the hub is: a text; or, with loss on answers only, a list of messages
    {role, content}, or a `prompt` and its `completion`, two texts or two lists of messages. For a prepared folder:
    what it was made from."""
    text_key: str | None = None
    """The key or column that holds the text or the messages; by default `text` or `messages`, according to `format`.
    If it is given, files without rows are refused."""
    glob: str = "**/*"
    """Which files of a folder to read, relative to it."""
    dtype: Literal["u16", "u32"] | None = None
    """Type of the ids in a flat .bin; by default u16 for a vocabulary of up to 65,536 ids, else u32."""
    held_out: str | float | None = None
    """Share of the tokens kept out of training: "1%", 0.01, or 0."""
    max_epochs: float | None = None
    """How often the source may be read before `on_exhaust` applies."""
    on_exhaust: OnExhaust = "error"
    """What happens before the step that would exceed `max_epochs`: `error` refuses the config, `stop` ends the run,
    `renormalise` continues with the phase's other sources, in their proportions, and `repeat` keeps reading, with a
    warning. All of this is decided before step 0, and `plan` shows it.
    """

    def __post_init__(self):
        if (self.path is None) == (self.hf is None):
            raise FieldError("path" if self.hf is None else "hf", "a source needs exactly one of path and hf")
        if self.path == "":
            raise FieldError("path", "path is empty; expected a file or a folder")
        if self.hf is not None and not self.hf.partition(":")[0].strip():
            raise FieldError("hf", f"hf is {self.hf!r}; expected a dataset of the hub, NAME or NAME:CONFIGURATION")
        if self.format == "completion" and self.text_key is not None:
            belongs = "text_key applies to formats text and messages; format completion reads prompt and completion"
            raise FieldError("text_key", belongs)
        rows = f"rows of JSONL, parquet or arrow; got path {self.path!r}"
        if self.format != "text" and self.is_flat:
            raise FieldError("format", f"format {self.format} needs {rows}")
        if self.text_key is not None and self.is_flat:
            raise FieldError("text_key", f"text_key applies to {rows}")
        if self.dtype is not None and not self.is_flat:
            raise FieldError("dtype", f"dtype applies to a flat {FLAT} file only; got path {self.path!r}")
        try:
            parse_share(self.held_out)
        except ValueError as error:
            raise FieldError("held_out", str(error)) from None

    @property
    def local_path(self) -> str | None:
        """`path` with ~ expanded; None for a source of the hub."""
        return None if self.path is None else os.path.expanduser(self.path)

    @property
    def is_missing(self) -> bool:
        """Whether `path` is given and does not exist."""
        return self.path is not None and not os.path.exists(self.local_path)

    @property
    def is_flat(self) -> bool:
        """Whether the source is a flat file of token ids."""
        return self.path is not None and self.path.endswith(FLAT) and not os.path.isdir(self.local_path)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys or columns of a row that hold the document."""
        if self.format == "completion":
            return ("prompt", "completion")
        return (self.format if self.text_key is None else self.text_key,)

    @property
    def location(self) -> str:
        """The source as an error message names it."""
        return self.path if self.path is not None else f"hf:{self.hf}"


class SourceFile(NamedTuple):
    """A file of a source as the file system describes it."""

    path: str  # the path to open
    relative: str  # below the source's folder, with forward slashes
    size_bytes: int
    mtime_ns: int
    ctime_ns: int  # moves with every change, and cannot be set back


def suffix_of(path: str) -> str:
    """The suffix that decides how a file is read, in lower case: `.parquet`, `.jsonl`, `.jsonl.zst`."""
    rest, suffix = os.path.splitext(path.lower())
    return os.path.splitext(rest)[1] + suffix if suffix in COMPRESSED else suffix


def source_files(source: SourceConfig) -> list[SourceFile]:
    """The files of a `path` source, sorted by relative path, from file-system metadata and the notes of `datasets`.

    Hidden files and folders are skipped and links are followed. A folder that can be reached twice, as in a loop of
    links, is read once: at its own place if that lies in the source, else through the first link. Of a folder that
    `datasets` saved, only the files with its rows are read. Raises InputError if the path is missing, unreadable or
    without matching files, and if a saved dataset lacks a file or has several splits.
    """
    root = source.local_path
    try:
        if not stat.S_ISDIR(os.stat(root).st_mode):
            return [_describe(root, os.path.basename(root))]
        read = _without_notes(root, sorted(_walk(root)), _glob_pattern(source.glob).fullmatch)
        files = [_describe(os.path.join(root, relative), relative) for relative in read]
    except OSError as error:
        where = error.filename or source.path
        link = " (a link to a file that is not there)" if os.path.islink(where) and not os.path.exists(where) else ""
        out = ", or leave it out with glob:" if where != root else ""
        raise InputError(f"{where}: {error.strerror}{link}; expected a readable path{out}") from error
    if any(file.relative.endswith(".arrow") for file in files):
        # The cache of `datasets` keeps it beside its arrow files, without the note that a saved dataset has.
        files = [file for file in files if os.path.basename(file.relative) != "dataset_info.json"]
    if not files:
        raise InputError(
            f"{source.path}: no file in this folder matches glob {source.glob!r}; name another glob or path"
        )
    return files


def _without_notes(root: str, names: Sequence[str], wanted: Callable[[str], object]) -> list[str]:
    """The names of files below `root` that are `wanted`, without the notes of `datasets` and the caches of its `map`.

    Raises InputError as `source_files` does, and OSError if a note cannot be read.
    """
    listed: dict[str, set[str]] = {}  # by folder
    splits: dict[str, list[str]] = {}  # by note
    for name in names:
        folder, base = os.path.split(name)
        if base == _STATE:
            rows = _noted(root, name, lambda state: [file["filename"] for file in state["_data_files"]])
            if rows is None:
                continue
            listed[folder] = {os.path.join(folder, row) for row in rows}
            if missing := sorted(listed[folder].difference(names)):
                where = os.path.join(root, name)
                raise InputError(
                    f"{where}: lists {missing[0]}, which is not there; expected the whole folder; save it again"
                )
        elif base == _SPLITS and (noted := _noted(root, name, lambda note: list(note["splits"]))):
            splits[name] = noted
    kept = (name for name in names if name not in splits and wanted(name))
    read = [name for name in kept if name in listed.get(os.path.dirname(name), (name,))]
    for name, noted in splits.items():
        _check_one_split(root, os.path.dirname(name), noted, read)
    return read


def _check_one_split(root: str, folder: str, splits: Sequence[str], read: Sequence[str]) -> None:
    """Raise InputError if several splits that were saved together would be read as one text."""
    within = {split: os.path.join(folder, split) for split in splits}
    found = [split for split, inside in within.items() if any(path.startswith(f"{inside}/") for path in read)]
    if len(found) > 1:
        one = os.path.join(root, within["train" if "train" in found else found[0]])
        raise InputError(
            f"{os.path.join(root, folder).rstrip('/')}: holds several splits ({', '.join(found)}), which would be "
            f"read as one text; give the folder of one of them, such as {one}"
        )


def _noted(root: str, name: str, part: Callable[[dict], list[str]]) -> list[str] | None:
    """The names that a note of `datasets` lists; None if the file is another one of its name."""
    try:
        with open(os.path.join(root, name), "rb") as stream:
            names = part(json.load(stream))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return names if all(isinstance(name, str) for name in names) else None


def would_read(source: SourceConfig, path: str | os.PathLike) -> bool:
    """Whether a file written to `path` would become one of a source's files; ignores links inside the source."""
    root = source.local_path
    if root is None or not os.path.isdir(root):
        return False
    relative = os.path.relpath(os.path.realpath(path), os.path.realpath(root)).replace(os.sep, "/")
    hidden = any(part.startswith(".") for part in relative.split("/"))  # or ..: outside of the folder
    return not hidden and _glob_pattern(source.glob).fullmatch(relative) is not None


def _describe(path: str, relative: str) -> SourceFile:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: neither a file nor a folder; expected files of text")
    return SourceFile(path, relative, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _walk(root: str) -> Iterator[str]:
    def refuse(error: OSError):
        raise error

    seen, starts = set(), [root]
    while starts:  # folders before links to them, wherever those lie: adding a link renames no other file
        links = []
        for start in starts:
            for folder, subfolders, names in os.walk(start, onerror=refuse):
                status = os.stat(folder)
                if (status.st_dev, status.st_ino) in seen:
                    subfolders.clear()
                    continue
                seen.add((status.st_dev, status.st_ino))
                inside = os.path.relpath(folder, root).replace(os.sep, "/")  # slow, so once per folder
                for name in names:
                    if not name.startswith("."):
                        yield name if inside == "." else f"{inside}/{name}"
                subfolders[:] = [name for name in subfolders if not name.startswith(".")]
                links += filter(os.path.islink, (os.path.join(folder, name) for name in subfolders))
        starts = sorted(links, key=lambda path: path.split(os.sep))


def _glob_pattern(glob: str) -> re.Pattern:
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    return re.compile("".join(tokens.get(part) or re.escape(part) for part in parts), re.DOTALL)
