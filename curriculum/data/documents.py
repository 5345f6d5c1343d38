"""Sources of text: where their documents lie and how they are read, piece by piece."""

import codecs
import glob
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from curriculum.data.chat import CHATML, ChatConfig, Stretch, render, render_completion
from curriculum.data.rows import checked_text, found_keys, similar_key, type_name
from curriculum.data.split import parse_share
from curriculum.errors import InputError

JSON_LINES = (".jsonl", ".ndjson")
COLUMNAR = {".parquet": "parquet", ".arrow": "arrow"}
FLAT = ".bin"

PIECE_BYTES = 1 << 20  # a plain-text file is read and encoded in pieces of about this size
ROWS_PER_BATCH = 256

# A place where a text may be cut without changing the ids of any published byte-pair pattern: between two
# words, before the blank, or at the start of a line that begins with a letter. Each of those patterns starts
# a new token there whatever stands further left, and none looks back.
_CUT = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=\S\n)(?=[^\W\d_])")


@dataclass(frozen=True)
class SourceConfig:
    """A named training corpus: documents on disk (`path`) or on the hub (`hf`), one of the two."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    path: str | None = None
    """A file, a folder (read recursively), a flat .bin, or a prepared folder."""
    hf: str | None = None
    """A dataset of the hub, NAME or NAME:CONFIGURATION, its split "train"."""
    format: Literal["text", "messages", "completion"] = "text"
    """What a row of JSONL, parquet, arrow or the hub is: a text; or, with loss on answers only, a list of messages
    {role, content}, or a `prompt` and its `completion`, two texts or two lists of messages. Of a prepared folder:
    what it was made from."""
    text_key: str | None = None
    """The key or column that holds the text or the messages; by default `text` or `messages`, after the format."""
    glob: str = "**/*"
    """Which files of a folder to read, relative to it."""
    dtype: Literal["u16", "u32"] | None = None
    """Of a flat .bin; default u16 up to 65,536 tokens, else u32."""
    held_out: str | float | None = None
    """Share of the tokens kept out of training: "1%", 0.01, or 0."""
    max_epochs: float | None = None
    """How often the source may be read before `on_exhaust` applies."""
    on_exhaust: Literal["error", "stop", "renormalise", "repeat"] = "error"
    """What happens at `max_epochs`."""

    def __post_init__(self):
        if (self.path is None) == (self.hf is None):
            raise ValueError("a source needs exactly one of path and hf")
        if self.path == "":
            raise ValueError("path is empty; expected a file or a folder")
        if self.hf is not None and not self.hf.partition(":")[0].strip():
            raise ValueError(f"hf is {self.hf!r}; expected a dataset of the hub, NAME or NAME:CONFIGURATION")
        if self.format == "completion" and self.text_key is not None:
            raise ValueError(
                "text_key belongs to the formats text and messages; completion reads prompt and completion"
            )
        if self.format != "text" and self.is_flat:
            raise ValueError(f"format {self.format} needs rows of JSONL, parquet or arrow; got path {self.path!r}")
        if self.dtype is not None and not self.is_flat:
            raise ValueError(f"dtype belongs to a flat {FLAT} file only; got path {self.path!r}")
        parse_share(self.held_out)

    @property
    def is_flat(self) -> bool:
        """Whether the source is a flat file of token ids."""
        return self.path is not None and self.path.endswith(FLAT) and not os.path.isdir(os.path.expanduser(self.path))

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

    path: str  # the way to open it
    relative: str  # below the source's folder, with forward slashes
    size_bytes: int
    mtime_ns: int
    ctime_ns: int  # moves with every change, and cannot be set back


class Piece(NamedTuple):
    """A stretch of one document. The pieces of a document follow each other and join to its text.

    In a conversation a piece is either part of an answer or not; in a text all are scored alike.
    """

    text: str  # "" only as the single piece of an empty document
    ends_document: bool
    source_bytes: int  # what was read from the source since the piece before, for progress
    where: str  # file, file:line or file:row, for error messages
    scored: bool = True


def source_files(source: SourceConfig) -> list[SourceFile]:
    """The files of a `path` source, sorted by relative path, by looking at the file system only.

    Hidden files and folders are passed over, links are followed, and a folder that can be reached twice
    (a loop of links) is read once. Raises InputError where the path is missing, unreadable or without files.
    """
    root = os.path.expanduser(source.path)
    try:
        root_stat = os.stat(root)
        if not stat.S_ISDIR(root_stat.st_mode):
            return [_describe(root, os.path.basename(root))]
        wanted = _glob_pattern(source.glob)
        files = [
            _describe(os.path.join(root, relative), relative)
            for relative in sorted(_walk(root, (root_stat.st_dev, root_stat.st_ino)))
            if wanted.fullmatch(relative)
        ]
    except OSError as error:
        raise InputError(f"{error.filename or source.path}: {error.strerror}; expected a readable path") from error
    if any(file.relative.endswith(".arrow") for file in files):
        # A dataset saved by `datasets` keeps two files of its own beside its arrow files.
        files = [f for f in files if os.path.basename(f.relative) not in ("dataset_info.json", "state.json")]
    if not files:
        raise InputError(
            f"{source.path}: no file in this folder matches glob {source.glob!r}; name another glob or path"
        )
    return files


def _describe(path: str, relative: str) -> SourceFile:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path}: neither a file nor a folder; expected files of text")
    return SourceFile(path, relative, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _walk(root: str, root_identity: tuple[int, int]) -> Iterator[str]:
    def refuse(error: OSError):
        raise error

    seen = {root_identity}
    for folder, subfolders, names in os.walk(root, followlinks=True, onerror=refuse):
        chosen = []
        for name in sorted(subfolders):
            status = os.stat(os.path.join(folder, name))
            if not name.startswith(".") and (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                chosen.append(name)
        subfolders[:] = chosen
        for name in names:
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")


def _glob_pattern(glob: str) -> re.Pattern:
    tokens = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    return re.compile("".join(tokens.get(part) or re.escape(part) for part in parts), re.DOTALL)


def read_pieces(source: SourceConfig, chat: ChatConfig = CHATML) -> Iterator[Piece]:
    """The documents of a source in pieces, empty ones included, a file after the other in sorted order.

    JSONL, parquet and arrow: a row is a document, in a format other than text a conversation as `chat` renders
    it, a piece a stretch; any other file is plain UTF-8 text and one document. A byte-order mark at the start of
    a file is dropped, nothing else is changed. Memory: a plain-text file is held one piece at a time (about
    PIECE_BYTES, more only where that long a stretch has no two words), JSONL one line, parquet and arrow one
    batch of rows as `datasets` streams them.

    Raises InputError with file and line, row or byte offset for text that cannot be read, and for a conversation
    without an answer.
    """
    if source.hf is not None:
        yield from _hub_rows(source, chat)
        return
    for file in source_files(source):
        suffix = os.path.splitext(file.path)[1].lower()
        try:
            if suffix in JSON_LINES:
                yield from _json_lines(file, source, chat)
            elif suffix in COLUMNAR:
                yield from _columnar_rows(file, COLUMNAR[suffix], source, chat)
            elif source.format == "text":
                yield from _plain_text(file)
            else:
                raise InputError(
                    f"{file.path}: plain text has no rows; format {source.format} reads"
                    f" {', '.join((*JSON_LINES, *COLUMNAR))}; leave the file out with glob:, or set format: text"
                )
        except OSError as error:
            raise InputError(f"{file.path}: {error.strerror or error}; expected a readable file") from error


def conversation_pieces(stretches: list[Stretch], source_bytes: int, where: str) -> Iterator[Piece]:
    """A rendered conversation in pieces, a stretch each; raises InputError where none of them is scored."""
    if not any(scored for _, scored in stretches):
        raise InputError(
            f"{where}: no answer in it, so nothing to score; expected an assistant's turn or a completion that is not"
            " empty; take it out of the data"
        )
    last = len(stretches) - 1
    for number, (text, scored) in enumerate(stretches):
        yield Piece(text, number == last, 0 if number else source_bytes, where, scored)


def _plain_text(file: SourceFile) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    parts: list[str] = []  # what has been read and not yet given out
    offset_bytes = unreported_bytes = 0
    with open(file.path, "rb") as stream:
        while True:
            block = stream.read(PIECE_BYTES)
            if (nul := block.find(b"\0")) >= 0:
                raise InputError(
                    f"{file.path}: byte {offset_bytes + nul} is NUL; expected plain UTF-8 text (a binary"
                    f" or compressed file? leave it out with glob:, or give a flat {FLAT} as the path itself)"
                )
            undecoded_bytes = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{file.path}: byte {offset_bytes - undecoded_bytes + error.start} is not valid UTF-8"
                    f" ({error.reason}); convert the file to UTF-8 or leave it out with glob:"
                ) from error
            if offset_bytes == 0:
                text = text.removeprefix("\ufeff")
            offset_bytes += len(block)
            unreported_bytes += len(block)
            if not block:
                yield Piece("".join(parts), True, unreported_bytes, file.path)
                return
            if len(block) == PIECE_BYTES and (cut := _last_cut(text)):
                parts.append(text[:cut])
                yield Piece("".join(parts), False, unreported_bytes, file.path)
                parts, unreported_bytes = [text[cut:]], 0
            else:
                parts.append(text)


def _last_cut(text: str) -> int:
    """The last place where `text` may be cut, 0 where there is none."""
    for start in (max(0, len(text) - 4096), 0):
        cuts = [match.start() for match in _CUT.finditer(text[start:])]
        if cuts:
            return start + cuts[-1]
    return 0


def _json_lines(file: SourceFile, source: SourceConfig, chat: ChatConfig) -> Iterator[Piece]:
    with open(file.path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            where = f"{file.path}:{number}"
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.isspace() or not line:
                continue
            try:
                row = _ROW.decode(line.decode())
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: not JSON ({error}); expected an object a line") from error
            if not isinstance(row, dict):
                keys = " and ".join(map(repr, source.keys))
                raise InputError(f"{where}: {type_name(row)}; expected a JSON object with key {keys}")
            _check_keys(source, row, where)
            yield from _row_pieces(row, source, chat, len(line), where)


def _row_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON; raises ValueError for a key that stands twice, of which readers take the one or the other."""
    row = dict(pairs)
    if len(row) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice!r} stands twice")
    return row


_ROW = json.JSONDecoder(object_pairs_hook=_row_of)  # kept: to make one costs as much as to read a row


def _columnar_rows(file: SourceFile, builder: str, source: SourceConfig, chat: ChatConfig) -> Iterator[Piece]:
    # `datasets` takes a file's name for a pattern, and the size of the first row group, even 0, for a batch's.
    options = {"data_files": glob.escape(file.path)}
    if builder == "parquet":
        options["batch_size"] = ROWS_PER_BATCH
    return _dataset_rows((builder,), options, source, chat, file.path, f"expected a whole {builder} file")


def _hub_rows(source: SourceConfig, chat: ChatConfig) -> Iterator[Piece]:
    name, _, configuration = source.hf.partition(":")
    remedy = "check the name and the network, or fetch it where there is one and give its folder as path:"
    return _dataset_rows((name, configuration or None), {}, source, chat, source.location, remedy)


def _dataset_rows(
    arguments: tuple, options: dict, source: SourceConfig, chat: ChatConfig, where: str, remedy: str
) -> Iterator[Piece]:
    import datasets

    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # what it logs it raises too
    number = 0
    try:
        rows = datasets.load_dataset(*arguments, split="train", streaming=True, **options)
        if rows.column_names:  # none at all: a table without rows
            _check_keys(source, rows.column_names, where)
            rows = rows.select_columns(list(source.keys))
        for batch in rows.iter(batch_size=ROWS_PER_BATCH):
            _check_keys(source, batch, where)
            for values in zip(*(batch[key] for key in source.keys), strict=True):
                number += 1
                row = dict(zip(source.keys, values, strict=True))
                yield from _row_pieces(row, source, chat, None, f"{where}: row {number}")
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:  # RuntimeError: a script
        raise InputError(f"{where}: {error}; {remedy}") from error


def _row_pieces(
    row: Mapping, source: SourceConfig, chat: ChatConfig, source_bytes: int | None, where: str
) -> Iterator[Piece]:
    """The pieces of a row that has the keys; by default its characters count as what was read."""
    values = [row[key] for key in source.keys]
    try:
        if source.format == "text":
            stretches = [(checked_text(values[0], repr(source.keys[0])), True)]
        elif source.format == "messages":
            stretches = render(values[0], chat, source.keys[0])
        else:
            stretches = render_completion(*values, chat)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    if source_bytes is None:
        source_bytes = sum(len(text) for text, _ in stretches)
    if source.format == "text":
        yield Piece(stretches[0][0], True, source_bytes, where)
    else:
        yield from conversation_pieces(stretches, source_bytes, where)


def _check_keys(source: SourceConfig, keys: Iterable[str], where: str) -> None:
    missing = next((key for key in source.keys if key not in keys), None)
    if missing is None:
        return
    if source.format != "messages" and "messages" in keys:
        hint = "is a row a conversation? set format: messages"
    elif {"prompt", "completion"} <= set(keys):
        hint = "is a row a prompt and its completion? set format: completion"
    elif source.format == "completion":
        hint = "rename the keys of the data to 'prompt' and 'completion'"
    elif guess := similar_key(missing, keys):
        hint = f"did you mean text_key: {guess}?"
    else:
        hint = f"name the key of the {source.format} with text_key:"
    raise InputError(f"{where}: no key {missing!r}; found {found_keys(keys)}; {hint}")
