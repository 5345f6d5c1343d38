"""Token stores: the documents of a source as flat token ids on disk, memory-mapped, with an index of documents.

A store is a folder:
    tokens-00000.bin ...  little-endian u16 or u32 ids: each document's tokens, then end-of-text; if the tokenizer has a
                          bos that is not end-of-text, each document begins with it
    scored-00000.bin ...  conversations only, one beside each tokens file: a byte per token, 1 in an answer, else 0
    documents.bin         one DOCUMENT record per document
    store.json            the sidecar, with checksums of the .bin files; written last: without it there is no store
"""

import json
import mmap
import os
from bisect import bisect_right
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from curriculum.data.sidecar import check_size, map_file, read_sidecar
from curriculum.data.tokenizers.tokenizer import DTYPES
from curriculum.disk.manifest import file_checksum
from curriculum.errors import InputError, readable

SIDECAR_NAME = "store.json"
DOCUMENTS_NAME = "documents.bin"
# Of the files of a store; the second if each document begins with a bos that is not end-of-text. For another format
# raise both, past each other. If source files are read differently, add to `_reading` in `prepare.py` instead: else
# the stores of before are reused.
FORMAT_VERSION = 3
OPENED_VERSION = 4
SCORED_DTYPE = np.dtype("u1")
DAMAGED = "delete the folder, and it is prepared again"

# `end`: where the document's tokens end in the stream, its end-of-text included. `bytes`: size of its UTF-8 text.
# `scored_bytes`: size of its answers, or of the whole text if all of it is scored. `hash`: high and low half of the
# text's xxh3_128.
DOCUMENT = np.dtype([("end", "<u8"), ("bytes", "<u8"), ("scored_bytes", "<u8"), ("hash", "<u8", 2)])


class TokenView:
    """One-dimensional read-only array of tokens: chosen spans of a stream of several files, end to end.

    Supports `len` and contiguous slices. A slice inside one span of one file is a view of the memory map; any
    other is a copy. Finding a slice is one bisection of the span table.
    """

    def __init__(self, shards: list[np.ndarray], starts: np.ndarray, stops: np.ndarray):
        """The spans [starts[i], stops[i]) of the concatenated shards; sorted, disjoint, none empty."""
        shard_stops = np.cumsum([len(shard) for shard in shards], dtype=np.int64)
        shard_starts = np.concatenate([[0], shard_stops[:-1]])
        # A span that crosses the start of a file is split there.
        before = np.searchsorted(starts, shard_starts, side="left") - 1
        inside = shard_starts[(before >= 0) & (shard_starts < np.append(stops, 0)[before])]
        starts = np.sort(np.concatenate([starts, inside]))
        stops = np.sort(np.concatenate([stops, inside]))
        lengths = stops - starts

        shard = np.searchsorted(shard_starts, starts, side="right") - 1
        self.dtype = shards[0].dtype
        # Plain lists: bisecting and indexing them is several times faster than numpy on single numbers.
        span_stops = np.cumsum(lengths)
        self._starts: list[int] = (span_stops - lengths).tolist()
        # For each span: its end in the view, its file, and what to add to a position in the view for that in the file.
        shifts = starts - shard_starts[shard] - (span_stops - lengths)
        files = [shards[i] for i in shard.tolist()]
        self._spans = list(zip(span_stops.tolist(), files, shifts.tolist(), strict=True))
        self._len = int(lengths.sum())

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop = index.start, index.stop
        if index.step is not None or start is None or stop is None or not 0 <= start < stop <= self._len:
            start, stop, step = index.indices(self._len)
            if step != 1:
                raise ValueError(f"step {step}; a view of tokens gives contiguous slices only")
            if start >= stop:
                return np.empty(0, self.dtype)
        return self.between(start, stop)

    def between(self, start: int, stop: int) -> np.ndarray:
        """The slice of 0 <= start < stop <= len, unchecked: a check takes as long as reading a row of a batch."""
        span = bisect_right(self._starts, start) - 1
        end, file, shift = self._spans[span]
        if stop <= end:
            return file[start + shift : stop + shift]
        parts = [file[start + shift : end + shift]]
        while end < stop:
            start, span = end, span + 1
            end, file, shift = self._spans[span]
            parts.append(file[start + shift : min(stop, end) + shift])
        return np.concatenate(parts)


@dataclass(frozen=True)
class Shard:
    """A file of tokens: a name in the store's folder, or the absolute path of a file used in place."""

    path: str
    num_tokens: int


@dataclass(frozen=True)
class StoreFacts:
    """The sidecar of a store."""

    format_version: int
    source: str  # where the text came from
    tokenizer_fingerprint: str
    vocab_size: int
    eot: int
    dtype: Literal["u16", "u32"]
    num_tokens: int  # end-of-text and bos included
    num_documents: int
    num_bytes: int  # of the documents' UTF-8 text
    num_empty: int  # documents left out because they had no text
    content_hash: str  # xxh3_128 of the documents' hashes in order; of scored marks and OPENED_VERSION if they apply
    shards: list[Shard]
    num_scored: int | None  # tokens in answers; None: all tokens are scored
    chat: dict[str, str | None] | None  # the templates that rendered the conversations, by role
    checksums: dict[str, str]  # xxh3_128 of each .bin file in the folder
    checksum: str | None = None  # xxh3_128 of the fields above

    @property
    def opening_tokens(self) -> int:
        """Tokens of each document ahead of its text: 1 if bos opens it, else 0."""
        return int(self.format_version == OPENED_VERSION)

    def own_checksum(self) -> str:
        """The value that `checksum` must have."""
        return xxhash.xxh3_128(json.dumps(asdict(replace(self, checksum=None)), sort_keys=True).encode()).hexdigest()


def scored_name(shard: int) -> str:
    """The file that marks which tokens of a shard are scored."""
    return f"scored-{shard:05d}.bin"


def split_hash(text_hash: xxhash.xxh3_128) -> tuple[int, int]:
    """The high and the low half of a 128-bit hash."""
    return divmod(text_hash.intdigest(), 1 << 64)


@dataclass(frozen=True, eq=False)
class Store:
    """An open store. Each file is mapped on first use."""

    directory: Path
    facts: StoreFacts

    @cached_property
    def documents(self) -> np.ndarray:
        """The index, N records of DOCUMENT."""
        return map_file(self.directory / DOCUMENTS_NAME, DOCUMENT)

    @cached_property
    def shards(self) -> list[np.ndarray]:
        """The stream as one array per file."""
        dtype = DTYPES[self.facts.dtype]
        return [map_file(self.directory / shard.path, dtype) for shard in self.facts.shards]

    @cached_property
    def _scored_shards(self) -> list[np.ndarray]:
        return [map_file(self.directory / scored_name(i), SCORED_DTYPE) for i in range(len(self.facts.shards))]

    @cached_property
    def document_tokens_N(self) -> np.ndarray:
        """Tokens of each document, bos and end-of-text included; raises InputError if the index is damaged."""
        tokens_N = np.diff(self.documents["end"].astype(np.int64), prepend=0)
        if tokens_N.min() < 1:
            document = int(np.argmax(tokens_N < 1))
            raise InputError(f"{self.directory / DOCUMENTS_NAME}: document {document} has no tokens; {DAMAGED}")
        return tokens_N

    @cached_property
    def stream(self) -> TokenView:
        """All tokens as one array."""
        return self.view()

    @cached_property
    def scored_stream(self) -> TokenView | None:
        """Marks of the scored tokens of `stream`, as in `scored_view`."""
        return self.scored_view()

    def verify(self) -> None:
        """Check the store's files against the sidecar; raises InputError if one is unreadable or differs."""
        for name, expected in self.facts.checksums.items():
            with readable(self.directory / name):
                found = file_checksum(self.directory / name)
            if found != expected:
                raise InputError(f"{self.directory / name}: checksum {found}; the sidecar says {expected}; {DAMAGED}")

    def document_tokens(self, document: int) -> np.ndarray:
        """The tokens of a document's text, without bos and end-of-text."""
        start, stop = self.text_span(document)
        return self.stream[start:stop]

    def release(self) -> None:
        """Release the memory of the token pages read so far; reading them again goes to the page cache or the disk.

        Each read of a document maps the 64 KB around it, so reading scattered documents would map most of a file.
        """
        for shard in [*self.shards, *(self._scored_shards if self.facts.num_scored is not None else ())]:
            shard.base.base.madvise(mmap.MADV_DONTNEED)  # the np.memmap below the array, and its mmap

    def text_span(self, document: int) -> tuple[int, int]:
        """(start, stop) in the stream of the tokens of a document's text, without bos and end-of-text."""
        stop = int(self.documents["end"][document])
        start = stop - int(self.document_tokens_N[document]) + self.facts.opening_tokens
        if self.facts.num_scored is not None:  # end-of-text may also close turns of a conversation
            return start, stop - 1
        tokens = self.stream[start:stop]
        # A flat file from elsewhere may lack the last end-of-text, or have several, or begin with one.
        first, last = 0, len(tokens)
        while last > first and tokens[last - 1] == self.facts.eot:
            last -= 1
        while last > first and tokens[first] == self.facts.eot:
            first += 1
        return start + first, start + last

    def view(self, keep_N: np.ndarray | None = None, cut: tuple[int, int] | None = None) -> TokenView:
        """The kept documents (by default all), concatenated; of document cut[0] only the first cut[1] tokens."""
        return TokenView(self.shards, *self._spans(keep_N, cut))

    def scored_view(self, keep_N: np.ndarray | None = None, cut: tuple[int, int] | None = None) -> TokenView | None:
        """Whether each token of `view(keep_N, cut)` is scored, u8 1 or 0; None if all are."""
        if self.facts.num_scored is None:
            return None
        return TokenView(self._scored_shards, *self._spans(keep_N, cut))

    def _spans(self, keep_N: np.ndarray | None, cut: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
        ends_N = self.documents["end"].astype(np.int64)
        keep_N = np.ones(len(ends_N), bool) if keep_N is None else np.asarray(keep_N, bool)
        edges = np.flatnonzero(np.diff(keep_N.astype(np.int8), prepend=0, append=0))
        first, last = edges[::2], edges[1::2] - 1
        starts = ends_N[first] - self.document_tokens_N[first]
        stops = ends_N[last]
        if cut is not None:
            document, token = cut
            end = int(ends_N[document])
            head_end = end - int(self.document_tokens_N[document]) + token
            starts, stops = _remove_span(starts, stops, head_end, end)
        return starts, stops


def _remove_span(starts, stops, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Remove [start, stop), which lies inside one span, from a sorted table of spans."""
    starts, stops = np.sort(np.append(starts, stop)), np.sort(np.append(stops, start))
    return starts[starts < stops], stops[starts < stops]


def is_store(directory: str | Path) -> bool:
    """Whether a folder claims to be a token store."""
    return os.path.isfile(os.path.join(directory, SIDECAR_NAME))  # False also if permission is denied


def open_store(directory: str | Path) -> Store:
    """Open a store; check its sidecar and the sizes of its files. Raises InputError naming a wrong or missing file."""
    directory = Path(directory)
    path = directory / SIDECAR_NAME
    facts = read_sidecar(path, StoreFacts, DAMAGED, (FORMAT_VERSION, OPENED_VERSION))
    if facts.checksum != facts.own_checksum():
        raise InputError(f"{path}: its checksum does not match its content; {DAMAGED}")
    token_bytes = DTYPES[facts.dtype].itemsize
    for number, shard in enumerate(facts.shards):
        check_size(directory / shard.path, shard.num_tokens * token_bytes, DAMAGED)
        if facts.num_scored is not None:
            check_size(directory / scored_name(number), shard.num_tokens * SCORED_DTYPE.itemsize, DAMAGED)
    check_size(directory / DOCUMENTS_NAME, facts.num_documents * DOCUMENT.itemsize, DAMAGED)
    store = Store(directory, facts)
    last_end = int(store.documents["end"][-1])
    if last_end != facts.num_tokens:
        raise InputError(
            f"{directory / DOCUMENTS_NAME}: the last document ends at token {last_end:,}; expected"
            f" {facts.num_tokens:,}, the end of the stream; {DAMAGED}"
        )
    return store
