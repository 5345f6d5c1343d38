"""Tables in files, parquet and arrow: the names of their columns, and their rows a few at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from curriculum.errors import InputError

if TYPE_CHECKING:
    import pyarrow

ROWS_PER_BATCH = 256
READ_BYTES = 1 << 20


@contextmanager
def open_table(path: str, kind: str, keys: Sequence[str]) -> Iterator[tuple[list[str], Iterator[dict[str, list]]]]:
    """The names of all columns, and batches of rows: by name the values of the columns `keys`, which must exist.

    `kind`: parquet or arrow. Memory: for parquet a page and READ_BYTES of each column that is read, for arrow one of
    the file's batches. Raises InputError if the file is not of that kind, is cut short, or has two columns of a name in
    `keys`; OSError if it cannot be opened.
    """
    # Not read by `datasets`: its scanner reads 250 MB ahead, and a process that leaves it early may abort.
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with pyarrow.OSFile(os.fsencode(path)) as stream:  # as str the path would have to be UTF-8
        try:
            if kind == "parquet":
                # Without buffer_size a row group's whole column is read at once, and may be the whole file's.
                table = ParquetFile(stream, pre_buffer=False, buffer_size=READ_BYTES)
                schema, batches = table.schema_arrow, table.iter_batches(ROWS_PER_BATCH, columns=list(keys))
            else:
                schema, batches = _arrow(stream, keys)
            if several := [key for key in keys if schema.names.count(key) > 1]:
                count = schema.names.count(several[0])
                raise InputError(f"{path}: {count} columns are named {several[0]!r}; expected one; rename the others")
            yield schema.names, _decoded(batches, schema, keys)
        except InputError:
            raise
        except UnicodeDecodeError as error:
            around = error.object[max(error.start - 20, 0) : error.start + 20]
            got = f"a text of columns {', '.join(keys)} is not valid UTF-8 ({error.reason}: {around!r})"
            raise InputError(f"{path}: {got}; write the file again with valid text") from error
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise InputError(f"{path}: {error}; expected a complete {kind} file") from error


def _arrow(stream: pyarrow.NativeFile, keys: Sequence[str]) -> tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]:
    """The schema and batches of a stream, as `datasets` saves it, or of a file with an index, also called feather."""
    from pyarrow import ArrowInvalid, ipc

    try:
        table = ipc.open_stream(stream)
        whole = iter(table)
    except ArrowInvalid:
        table = ipc.open_file(stream)
        whole = map(table.get_batch, range(table.num_record_batches))
    checked = (_checked(batch.select(list(keys))) for batch in whole if batch.num_rows)
    starts = ((batch, start) for batch in checked for start in range(0, batch.num_rows, ROWS_PER_BATCH))
    return table.schema, (batch.slice(start, ROWS_PER_BATCH) for batch, start in starts)


def _checked(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """The batch; raises ArrowInvalid if it is damaged: `to_pydict` would follow its offsets out of its memory."""
    batch.validate(full=True)  # before slicing: each slice of lists or dictionaries would validate all of them
    return batch


def lacks_end(path: str) -> bool:
    """Whether an arrow file has neither the end mark of a stream, which is optional, nor that of an indexed file."""
    with suppress(OSError), open(path, "rb") as stream:  # too short or unreadable: the reader reports it
        before_0_15 = stream.read(4) not in (b"\xff\xff\xff\xff", b"ARRO")  # of Arrow: messages began with their length
        stream.seek(-8, os.SEEK_END)
        return not stream.read().endswith(b"\0\0\0\0" if before_0_15 else (b"\xff\xff\xff\xff\0\0\0\0", b"ARROW1"))
    return False


def _decoded(batches: Any, schema: pyarrow.Schema, keys: Sequence[str]) -> Iterator[dict[str, list]]:
    """The columns of each batch as Python objects, those that `datasets` stores as JSON text decoded."""
    features = None
    if b'"Json"' in (schema.metadata or {}).get(b"huggingface", b""):
        import datasets

        features = datasets.Features.from_arrow_schema(schema)
    for batch in batches:
        columns = batch.select(list(keys)).to_pydict()
        yield columns if features is None else features.decode_batch(columns)
