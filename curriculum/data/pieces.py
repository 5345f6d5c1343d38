"""Documents in pieces, as they are read from the files of a source, from the hub, or from an iterator."""

import codecs
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import BinaryIO, NamedTuple

from curriculum.data.chat import AS_TEXT, Stretch, Template, render, render_completion
from curriculum.data.sources import (
    COLUMNAR,
    COMPRESSED,
    FLAT,
    JSON_LINES,
    SourceConfig,
    SourceFile,
    source_files,
    suffix_of,
)
from curriculum.data.tables import ROWS_PER_BATCH, open_table
from curriculum.errors import InputError, checked_text, found_keys, nearest, other_normalization, type_name

# A plain-text file is read in pieces of about this size: with pieces of a megabyte malloc ends up keeping twice the
# memory.
PIECE_BYTES = 1 << 16
MOST_BAD_ROWS = 20  # of a file that an error names
MOST_LOOKED_AT = 100_000  # rows after the first bad one, as nothing tells meanwhile how far it has come

# A place where a text may be cut without changing its ids under any published byte-pair pattern: between two words,
# before the space, or at the start of a line that begins with a letter. Each of those patterns starts a new token
# there, whatever precedes it, and none looks back.
_CUT = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=\S\n)(?=[^\W\d_])")


class Piece(NamedTuple):
    """A stretch of one document. The pieces of a document come in order and concatenate to its text.

    A piece of a conversation lies either inside an answer or outside; all pieces of a text are scored alike.
    """

    text: str  # "" only as the single piece of an empty document
    ends_document: bool
    source_bytes: int  # bytes read from the source since the previous piece, for progress
    where: str  # file, file:line or file:row, for error messages
    scored: bool = True
    special: bool = False  # `text` is the name of a special token, and stands for it


def read_pieces(source: SourceConfig, template: Template = AS_TEXT) -> Iterator[Piece]:
    """The documents of a source in pieces, empty ones included, file by file in sorted order.

    JSONL, parquet and arrow: each row is a document; a null text is an empty document. In a format other than text a
    row is a conversation, which `template` renders, with one piece per stretch. Any other file is one document of plain
    UTF-8 text, and is refused if the source has a text_key or a format other than text. JSONL and plain text may be
    compressed. A byte-order mark at the start of a file is dropped; nothing else is changed.

    Memory: a plain-text file is held one piece at a time (about PIECE_BYTES; more only if that long a stretch has no
    two words), JSONL one line at a time, tables as `open_table` says, the hub's rows as `datasets` streams them.

    Raises InputError with file and line, row or byte offset for text that cannot be read, and for a conversation
    without an answer. After a row that cannot be read the next ones of its file are only checked, so that the error
    names up to MOST_BAD_ROWS of them.
    """
    if source.hf is not None:
        yield from _hub_rows(source, template)
        return
    files = source_files(source)
    check_rows(source, files)
    for file in files:
        yield from _file_pieces(file, source, template)


def _file_pieces(
    file: SourceFile, source: SourceConfig, template: Template, beginning: bool = False
) -> Iterator[Piece]:
    """The pieces of a file; of its `beginning` alone, a row of JSON at most, and of a table only the columns."""
    suffix = suffix_of(file.path)
    try:
        if suffix in JSON_LINES:
            yield from _json_lines(file, source, template, 1 if beginning else None)
        elif suffix in COLUMNAR:
            with open_table(file.path, COLUMNAR[suffix], source.keys) as (names, batches):
                yield from _rows_of(names, () if beginning else batches, source, template, file.path)
        else:
            yield from _plain_text(file)
    except OSError as error:
        raise InputError(f"{file.path}: {error.strerror or error}; expected a readable file") from error


def check_beginning(source: SourceConfig, template: Template) -> None:
    """Raise InputError as `read_pieces` does for the first piece of a source, or for the columns of its first table.

    Reads no other file, no row of a table, whose batches may be large, and nothing of the hub.
    """
    if source.hf is None:
        files = source_files(source)
        check_rows(source, files)
        next(_file_pieces(files[0], source, template, beginning=True), None)


def check_rows(source: SourceConfig, files: Iterable[SourceFile]) -> None:
    """Raise InputError if the format or text_key of a source requires rows and one of its files is plain text."""
    if source.format == "text" and source.text_key is None:
        return
    plain = next((file for file in files if suffix_of(file.path) not in (*JSON_LINES, *COLUMNAR)), None)
    if plain is not None:
        of_text = source.format == "text"
        reads = f"text_key {source.text_key!r} applies to rows of" if of_text else f"format {source.format} reads"
        raise InputError(
            f"{plain.path}: plain text has no rows; {reads} .jsonl, .ndjson, {', '.join(COLUMNAR)}, and JSON lines "
            f"compressed as {' or '.join(COMPRESSED)}; leave the file out with glob:, or "
            f"{'leave text_key out' if of_text else 'set format: text'}"
        )


def conversation_pieces(stretches: list[Stretch], source_bytes: int, where: str) -> Iterator[Piece]:
    """A rendered conversation in pieces, one for each stretch; raises InputError if none of them is scored."""
    if not any(stretch.scored for stretch in stretches):
        raise InputError(
            f"{where}: no answer, so nothing to score; expected an assistant turn (without weight: 0) or a "
            "completion that is not empty; remove it from the data"
        )
    last = len(stretches) - 1
    for number, (text, scored, special) in enumerate(stretches):
        yield Piece(text, number == last, 0 if number else source_bytes, where, scored, special)


def _plain_text(file: SourceFile) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    parts: list[str] = []  # what has been read and not yet given out
    offset_bytes = unreported_bytes = 0
    with _opened(file) as stream:
        while True:
            block = stream.read(PIECE_BYTES)
            if (nul := block.find(b"\0")) >= 0:
                raise InputError(
                    f"{file.path}: byte {offset_bytes + nul} is NUL; expected plain UTF-8 text (a binary"
                    f" or compressed file? leave it out with glob:; a flat {FLAT} of tokens? that is no text, but may "
                    "be the path of a source; UTF-16? convert it to UTF-8)"
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


def parts_of(text: str) -> Iterator[str]:
    """A text in parts of about PIECE_BYTES characters, cut between words as files are, or else anywhere."""
    start = 0
    while len(text) - start > PIECE_BYTES:
        end = start + (_last_cut(text[start : start + PIECE_BYTES]) or PIECE_BYTES)
        yield text[start:end]
        start = end
    yield text[start:]


def _last_cut(text: str) -> int:
    """The last place where `text` may be cut; 0 if there is none."""
    for start in (max(0, len(text) - 4096), 0):
        cuts = [match.start() for match in _CUT.finditer(text[start:])]
        if cuts:
            return start + cuts[-1]
    return 0


def _json_lines(file: SourceFile, source: SourceConfig, template: Template, most_rows: int | None) -> Iterator[Piece]:
    with _opened(file) as stream:
        lines = ((number, line.removeprefix(codecs.BOM_UTF8)) for number, line in enumerate(stream, start=1))
        rows = (
            partial(_of_json_row, line, source, template, f"{file.path}:{number}")
            for number, line in lines
            if line and not line.isspace()
        )
        yield from _of_all_rows(islice(rows, most_rows), file.path)


def _of_json_row(line: bytes, source: SourceConfig, template: Template, where: str) -> list[Piece]:
    row = _decoded(line, source, where)
    _check_keys(source, row, where)
    return _row_pieces(row, source, template, len(line), where)


def _of_all_rows(rows: Iterable[Callable[[], list[Piece]]], where: str) -> Iterator[Piece]:
    """The pieces of a file's rows; each is read by a call. A file without rows is an empty document."""
    rows, read = iter(rows), None
    for read in rows:
        try:
            pieces = read()
        except InputError as error:
            raise InputError(*error.problems, *_more_bad_rows(rows, where)) from error
        yield from pieces
    if read is None:
        yield Piece("", True, 0, where)


def _more_bad_rows(rows: Iterator[Callable[[], list[Piece]]], where: str) -> list[str]:
    """What is wrong in the rows of a file that follow a bad one, as far as they are looked at."""
    wrong: list[str] = []
    try:
        for read in islice(rows, MOST_LOOKED_AT):
            try:
                read()
            except InputError as error:
                wrong += error.problems
                if len(wrong) >= MOST_BAD_ROWS - 1:
                    break
        if next(rows, None) is not None:
            wrong.append(f"{where}: its other rows were not looked at")
    except InputError as error:  # of a file that ends badly
        wrong += error.problems
    return wrong


_IN_UTF_8 = "expected one object per line, in UTF-8; convert the file, or leave it out with glob:"


def _decoded(line: bytes, source: SourceConfig, where: str) -> dict:
    try:
        row = _ROW.decode(line.decode())
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not JSON ({error}); {_IN_UTF_8}") from error
    except json.JSONDecodeError as error:
        if b"\0" in line:
            raise InputError(f"{where}: not JSON (NUL bytes: UTF-16?); {_IN_UTF_8}") from error
        # Its own place counts lines within this one.
        why = f"{error.msg.removesuffix(' at')}, column {error.colno}"
        raise InputError(f"{where}: not JSON ({why}); expected one object per line") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error}); expected one object per line") from error
    if not isinstance(row, dict):
        keys = " and ".join(map(repr, source.keys))
        raise InputError(f"{where}: {type_name(row)}; expected a JSON object with key {keys}")
    return row


@contextmanager
def _opened(file: SourceFile) -> Iterator[BinaryIO]:
    compression = COMPRESSED.get(os.path.splitext(file.path.lower())[1])
    if compression is None:
        with open(file.path, "rb") as stream:
            yield stream
        return
    import pyarrow

    with (
        pyarrow.OSFile(os.fsencode(file.path)) as packed,
        pyarrow.CompressedInputStream(packed, compression) as stream,
        io.BufferedReader(stream, PIECE_BYTES) as lines,
    ):
        try:
            yield lines
        except OSError as error:
            raise InputError(f"{file.path}: {error}; expected a complete {compression} file") from error


# Made once: making a decoder costs as much as decoding a row. Numbers are parsed as float, since no document is a
# number and int refuses one of 4,301 digits.
_ROW = json.JSONDecoder(parse_int=float)


def _hub_rows(source: SourceConfig, template: Template) -> Iterator[Piece]:
    import datasets

    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # what it logs it raises too
    name, _, configuration = source.hf.partition(":")
    try:
        rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
        columns = rows.column_names or []
        if set(source.keys) <= set(columns):
            rows = rows.select_columns(list(source.keys))
        yield from _rows_of(columns, rows.iter(batch_size=ROWS_PER_BATCH), source, template, source.location)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:  # RuntimeError: a script
        remedy = "check the name and the network, or download it elsewhere and give its folder as path:"
        raise InputError(f"{source.location}: {error}; {remedy}") from error


def _rows_of(
    names: Sequence[str], batches: Iterable[Mapping[str, list]], source: SourceConfig, template: Template, where: str
) -> Iterator[Piece]:
    """The pieces of a table's rows. `names`: its columns; empty if it has no rows or does not name them."""
    if names:
        _check_keys(source, names, where)

    def rows() -> Iterator[Callable[[], list[Piece]]]:
        number = 0
        for batch in batches:
            _check_keys(source, batch, where)
            for values in zip(*(batch[key] for key in source.keys), strict=True):
                number += 1
                row = dict(zip(source.keys, values, strict=True))
                yield partial(_row_pieces, row, source, template, None, f"{where}: row {number}")

    yield from _of_all_rows(rows(), where)


def _row_pieces(
    row: Mapping, source: SourceConfig, template: Template, source_bytes: int | None, where: str
) -> list[Piece]:
    """The pieces of a row that has all keys. `source_bytes`: bytes read for it; None: count its characters instead."""
    values = [row[key] for key in source.keys]
    try:
        if source.format == "text":
            text = "" if values[0] is None else checked_text(values[0], repr(source.keys[0]))
            stretches = [Stretch(text, True)]
        elif source.format == "messages":
            stretches = render(values[0], template, source.keys[0])
        else:
            stretches = render_completion(*values, template)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    if source_bytes is None:
        source_bytes = sum(len(stretch.text) for stretch in stretches)
    if source.format == "text":
        return [Piece(stretches[0].text, True, source_bytes, where)]
    return list(conversation_pieces(stretches, source_bytes, where))


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
    elif near := nearest(missing, keys):
        hint = f"did you mean text_key: {near}?{other_normalization(missing, near)}"
    else:
        hint = f"name the key of the {source.format} with text_key:"
    raise InputError(f"{where}: no key {missing!r}; found {found_keys(keys)}; {hint}")


def document_pieces(documents: Iterable[str] | Iterable[list[dict]], template: Template | None) -> Iterator[Piece]:
    """Documents from an iterator in pieces: texts, or with `template` conversations, which it renders.

    Raises InputError naming the document (counted from 1) if it is not of this kind, and if the iterator raises
    OSError.
    """
    number = 0
    try:
        for number, document in enumerate(documents, start=1):
            where = f"document {number}"
            if template is None:
                if isinstance(document, list):
                    expected = "expected text; for conversations give their template as chat"
                    raise InputError(f"{where} holds a list; {expected}")
                text = checked_text(document, where)
                yield Piece(text, True, len(text), where)
                continue
            if isinstance(document, Mapping) and "messages" in document:
                raise InputError(f"{where} holds an object; expected a list of messages: give its 'messages'")
            try:
                stretches = render(document, template)
            except InputError as error:
                raise InputError(f"{where}: {error}") from error
            yield from conversation_pieces(stretches, sum(len(stretch.text) for stretch in stretches), where)
    except OSError as error:  # else the caller would report an error of writing
        raise InputError(
            f"documents: after {number:,} documents: {error}; expected all of them to be readable"
        ) from error
