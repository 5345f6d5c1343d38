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


@contextmanager
def open_table(path: str, kind: str, keys: Sequence[str]) -> Iterator[tuple[list[str], Iterator[dict[str, list]]]]:
    """The names of all columns, and batches of rows: the values of the columns `keys`, which must be there, by name.

    `kind`: parquet or arrow. Memory: of parquet a page of each column that is read, of arrow one of the file's batches.
    Raises InputError where the file is none of that kind, or not whole; OSError where it cannot be opened.
    """
    # Not by `datasets`: its scanner reads 250 MB ahead, and a process that leaves it early may end with an abort.
    import pyarrow
    from pyarrow.parquet import ParquetFile

    with pyarrow.OSFile(os.fsencode(path)) as stream:  # of text it would take UTF-8 only
        try:
            if kind == "parquet":
                table = ParquetFile(stream, pre_buffer=False)
                schema, batches = table.schema_arrow, table.iter_batches(ROWS_PER_BATCH, columns=list(keys))
            else:
                schema, batches = _arrow(stream, keys)
            if several := [key for key in keys if schema.names.count(key) > 1]:
                count = schema.names.count(several[0])
                raise InputError(f"{path}: {count} columns are named {several[0]!r}; expected one; rename the others")
            yield schema.names, _decoded(batches, schema, keys)
        except InputError:
            raise
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise InputError(f"{path}: {error}; expected a whole {kind} file") from error


def _arrow(stream: pyarrow.NativeFile, keys: Sequence[str]) -> tuple[pyarrow.Schema, Iterator[pyarrow.RecordBatch]]:
    """A stream, as `datasets` saves it, or a file with an index of its batches, also called feather."""
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
    """The batch; raises ArrowInvalid where it is damaged: `to_pydict` would follow its offsets out of its memory."""
    batch.validate(full=True)  # before it is cut into slices: of lists and dictionaries each slice has all to validate
    return batch


def lacks_end(path: str) -> bool:
    """Whether an arrow file has neither the mark that ends a stream, which may be left out, nor that of an index."""
    with suppress(OSError), open(path, "rb") as stream:  # too short, or unreadable: whoever reads it is told
        before_0_15 = stream.read(4) not in (b"\xff\xff\xff\xff", b"ARRO")  # of Arrow: a message began with its length
        stream.seek(-8, os.SEEK_END)
        return not stream.read().endswith(b"\0\0\0\0" if before_0_15 else (b"\xff\xff\xff\xff\0\0\0\0", b"ARROW1"))
    return False


def _decoded(batches: Any, schema: pyarrow.Schema, keys: Sequence[str]) -> Iterator[dict[str, list]]:
    """The columns of each batch as Python's objects: what `datasets` keeps as JSON text, too."""
    features = None
    if b'"Json"' in (schema.metadata or {}).get(b"huggingface", b""):
        import datasets

        features = datasets.Features.from_arrow_schema(schema)
    for batch in batches:
        columns = batch.select(list(keys)).to_pydict()
        yield columns if features is None else features.decode_batch(columns)
