"""Documents of any origin, and how they become a token store: in bounded memory, a group of pieces at a time."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from curriculum.data.chat import NO_SPECIAL, Template
from curriculum.data.encode import encode_pieces
from curriculum.data.pieces import Piece, document_pieces, read_pieces
from curriculum.data.progress import Progress
from curriculum.data.sources import COLUMNAR, COMPRESSED, JSON_LINES, SourceConfig, SourceFile, source_files, suffix_of
from curriculum.data.store import Store
from curriculum.data.store_writer import StoreWriter
from curriculum.data.tables import lacks_end
from curriculum.data.tokenizers.tokenizer import Tokenizer
from curriculum.errors import InputError, type_name

MANY_EMPTY = 0.1  # share of a source's documents; fewer may be stray empty rows
# Files that often hold rows, but are read as plain text.
ROWS_AS_TEXT = {".json", *(rows + end for end in ("", *COMPRESSED) for rows in (".csv", ".tsv"))}


class Documents(NamedTuple):
    """Documents to be written as a store."""

    pieces: Iterable[Piece]
    template: Template | None  # renders the conversations; None: the documents are texts
    origin: str  # where they come from, for the sidecar and error messages
    total_bytes: int | None  # that reading them will report; None if unknown


def documents_of(sources: Sequence[SourceConfig], template: Template) -> Documents:
    """The documents of sources of one format."""
    return Documents(
        pieces=(piece for source in sources for piece in read_pieces(source, template)),
        template=template if any(source.format != "text" for source in sources) else None,
        origin=", ".join(source.location for source in sources),
        total_bytes=_size_bytes(sources),
    )


def given_documents(documents: Iterable[str] | Iterable[list[dict]], template: Template | None) -> Documents:
    """Documents from an iterator. Raises InputError for a single text, a mapping, or what cannot be iterated over."""
    if isinstance(documents, str):
        raise InputError("documents: a single text; expected an iterable of documents, such as a list with this one")
    if isinstance(documents, Mapping) or not np.iterable(documents):
        raise InputError(f"documents: {type_name(documents)}; expected an iterable of documents, such as a list")
    return Documents(document_pieces(documents, template), template, "documents", None)


def write_store(directory: Path, documents: Documents, tokenizer: Tokenizer, progress: Progress | None) -> None:
    """Encode documents into a store in an empty folder. Raises InputError for text that cannot be read or encoded."""
    pieces, template, origin, total_bytes = documents
    done_bytes = document_tokens = 0
    spells = False
    with closing(StoreWriter(directory, tokenizer.dtype_name, marks_scored=template is not None)) as writer:
        writer.opened = tokenizer.has_own_bos
        for group, tokens, counts in encode_pieces(pieces, tokenizer):
            scored = None
            if writer.marks_scored:
                scored = np.repeat([piece.scored for piece in group], counts)
                if writer.opened:
                    scored &= tokens != tokenizer.bos
            writer.add_tokens(tokens, scored)
            for piece, count in zip(group, counts, strict=True):
                done_bytes += piece.source_bytes
                if not piece.text:
                    writer.num_empty += 1
                    continue
                document_tokens += count
                spells |= piece.special
                writer.add_text(piece.text.encode(), piece.scored)
                if piece.ends_document:
                    writer.end_document(document_tokens)
                    document_tokens = 0
            if progress is not None:
                progress(done_bytes, total_bytes)
        if progress is not None and done_bytes != total_bytes:
            progress(done_bytes, done_bytes)
        rendered_by = None if template is None else template.to_json()
        if rendered_by and template.special and not spells:  # prompts and completions that are texts have no turns
            rendered_by["special_tokens"] = NO_SPECIAL
        writer.finish(origin, tokenizer, rendered_by)


def empty_warnings(stores: Mapping[str, Store]) -> tuple[str, ...]:
    """A warning for each store with many empty documents; `stores` are keyed by the names that warnings use."""
    found = []
    for place, store in stores.items():
        empty, num_all = store.facts.num_empty, store.facts.num_empty + store.facts.num_documents
        if empty and empty >= MANY_EMPTY * num_all:
            share = f"{empty:,} of {num_all:,} documents are empty ({empty / num_all:.0%})"
            found.append(f"{place}: {share}; is the text in another key or column? name it with text_key")
    return tuple(found)


def file_warnings(sources: Mapping[str, SourceConfig]) -> tuple[str, ...]:
    """Warnings about the sources' files, under the names that key `sources`; raises as `source_files` does."""
    about_text, about_ends = [], []
    doubt = "has no end mark: its writer may have been stopped; if rows are missing, write it again"
    for place, source in sources.items():
        files = [] if source.path is None else source_files(source)
        if files and source.format == "text" and source.text_key is None and (told := _rows_as_text(files)):
            about_text.append(f"{place}: {told}")
        arrow = [file.path for file in files if file.path.lower().endswith(".arrow")]
        about_ends += [f"{place}: {path} {doubt}" for path in arrow if lacks_end(path)]
    return (*about_text, *about_ends)


def _rows_as_text(files: Sequence[SourceFile]) -> str | None:
    """The warning that all files look like rows but are read as plain text, or that some lie beside rows."""
    suffixes = {file.relative: suffix_of(file.path) for file in files}
    if of_rows := sorted({*suffixes.values()} & {*JSON_LINES, *COLUMNAR}):
        plain = [name for name, suffix in suffixes.items() if suffix not in of_rows]
        spellings = {name[-len(suffix) :] for name, suffix in suffixes.items() if suffix in of_rows}
        return _beside_rows(plain, spellings) if plain else None
    if not {*suffixes.values()} <= ROWS_AS_TEXT:
        return None
    read = f"each {' or '.join(sorted({*suffixes.values()}))} file is read as one document of plain text"
    return f"{read}; if it holds rows, convert them to .jsonl (one object per line) or .parquet"


def _beside_rows(plain: Sequence[str], of_rows: set[str]) -> str:
    glob = f'a glob such as "**/*{min(of_rows)}"' if len(of_rows) == 1 else "a glob that only the files of rows match"
    if len(plain) == 1:
        return f"{plain[0]} is plain text beside rows and is read as a document; {glob} leaves it out"
    others = plain[1] if len(plain) == 2 else f"{len(plain) - 1:,} more files"
    return f"{plain[0]} and {others} are plain text beside rows and are read as a document each; {glob} leaves them out"


def _size_bytes(sources: Sequence[SourceConfig]) -> int | None:
    """Bytes that reading the sources will report; None if they are compressed, columnar or on the hub."""
    if any(source.hf is not None for source in sources):
        return None
    files = [file for source in sources for file in source_files(source)]
    if any(file.path.lower().endswith((*COLUMNAR, *COMPRESSED)) for file in files):
        return None
    return sum(file.size_bytes for file in files)
