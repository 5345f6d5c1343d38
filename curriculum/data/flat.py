"""Flat files of token ids, used in place: only an index of their documents is written."""

from contextlib import closing
from pathlib import Path

import numpy as np

from curriculum.data.progress import Progress
from curriculum.data.sources import SourceConfig, source_files
from curriculum.data.store_writer import StoreWriter
from curriculum.data.tokenizers.tokenizer import DTYPES, Tokenizer
from curriculum.errors import InputError

SCAN_TOKENS = 1 << 20


def _is_wider(ids_N: np.ndarray) -> bool:
    """Whether ids that are read as u16 look like u32 ones below 65,536."""
    return len(ids_N) >= 32 and not ids_N[1::2].any() and bool(ids_N[::2].any())


def index_flat(source: SourceConfig, tokenizer: Tokenizer, directory: Path, progress: Progress) -> None:
    """Write the index and the sidecar of a flat file of ids; the file itself stays where it lies.

    A document ends with end-of-text, or with the last of several in a row. End-of-text at the start of the file belongs
    to the first document. If every document begins with the tokenizer's bos, and that is not end-of-text, the store
    records that bos opens its documents; otherwise bos is an ordinary token of the text. Raises InputError for a size
    or ids that do not fit the tokenizer.
    """
    (file,) = source_files(source)
    path = Path(file.path).resolve()
    dtype_name = source.dtype or tokenizer.dtype_name
    dtype = DTYPES[dtype_name]
    if file.size_bytes == 0 or file.size_bytes % dtype.itemsize:
        raise InputError(
            f"{source.path}: {file.size_bytes:,} bytes; expected a positive multiple of {dtype.itemsize}, the size of "
            f"a {dtype_name} token; set the source's dtype if it is another"
        )
    stream = np.memmap(path, dtype, mode="r").view(np.ndarray)
    if source.dtype is None and dtype_name == "u16" and _is_wider(stream[:SCAN_TOKENS]):
        raise InputError(
            f"{source.path}: every second u16 is 0, which suggests u32 ids; set the source's dtype to u32, or to u16 "
            "if the ids really are u16"
        )
    first_text = _first_text(stream, tokenizer.eot, source)
    document_start = 0

    def text_of(text_start: int, stop: int) -> bytes:
        """Text of the tokens [text_start, stop) of the document that begins at `document_start`."""
        done = stream[document_start:text_start]
        return tokenizer.decode_bytes(stream[text_start:stop], len(done) <= 1 and bool((done == tokenizer.bos).all()))

    with closing(StoreWriter(directory, dtype_name)) as writer:
        writer.add_shard_in_place(path, len(stream))
        writer.opened = tokenizer.has_own_bos
        for start in range(0, len(stream), SCAN_TOKENS):
            stop = min(start + SCAN_TOKENS, len(stream))
            _check_ids(source, stream[start:stop], start, tokenizer)
            following = stream[start + 1 : stop + 1]
            is_end = stream[start:stop] == tokenizer.eot
            is_end[: len(following)] &= following != tokenizer.eot
            if stop == len(stream):
                is_end[-1] = True
            ends = start + np.flatnonzero(is_end) + 1
            text_start = start  # of the text that is not added yet
            for end in ends[ends > first_text].tolist():
                writer.add_text(text_of(text_start, end))
                writer.end_document(end - document_start)
                writer.opened &= bool(stream[document_start] == tokenizer.bos)
                document_start = text_start = end
            writer.add_text(text_of(text_start, stop))
            progress(stop * dtype.itemsize, file.size_bytes)
        writer.finish(source.location, tokenizer)


def _first_text(stream: np.ndarray, eot: int, source: SourceConfig) -> int:
    for start in range(0, len(stream), SCAN_TOKENS):
        is_text = stream[start : start + SCAN_TOKENS] != eot
        if is_text.any():
            return start + int(is_text.argmax())
    raise InputError(f"{source.path}: holds only end-of-text; expected at least one document")


def _check_ids(source: SourceConfig, tokens: np.ndarray, start: int, tokenizer: Tokenizer) -> None:
    if int(tokens.max()) >= tokenizer.vocab_size:
        offset = int(np.argmax(tokens >= tokenizer.vocab_size))
        where = f"token {start + offset:,} (byte {(start + offset) * tokens.itemsize:,})"
        raise InputError(
            f"{source.path}: {where} is id {tokens[offset]}; expected ids below {tokenizer.vocab_size}, the"
            " tokenizer's; check tokenizer and dtype"
        )
