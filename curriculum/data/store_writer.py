"""Writing a token store, as `curriculum.data.store` describes and opens it."""

import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from curriculum.data.sidecar import write_sidecar
from curriculum.data.store import (
    DOCUMENTS_NAME,
    FORMAT_VERSION,
    OPENED_VERSION,
    SCORED_DTYPE,
    SIDECAR_NAME,
    Shard,
    StoreFacts,
    scored_name,
    split_hash,
)
from curriculum.data.tokenizers.tokenizer import DTYPES, Tokenizer
from curriculum.errors import InputError

SHARD_TOKENS = 1 << 28


class StoreWriter:
    """Writes a store into an empty folder, front to back, in bounded memory; `finish` completes it.

    `shard_tokens`: the most tokens of a file, by default SHARD_TOKENS. `marks_scored`: whether the store records which
    tokens are scored. `opened`, to be set before `finish`: whether each document begins with a bos that is not
    end-of-text.
    """

    def __init__(self, directory: Path, dtype: str, shard_tokens: int | None = None, marks_scored: bool = False):
        self.directory = directory
        self.shards: list[Shard] = []
        self.num_tokens = self.num_documents = self.num_bytes = self.num_empty = 0
        self._dtype = dtype
        self._shard_tokens = shard_tokens or SHARD_TOKENS
        self._tokens = self._scored = None
        self.marks_scored = marks_scored
        self.opened = False
        self._num_scored = 0
        self._scored_hash = xxhash.xxh3_128()
        self._checksums: dict[str, xxhash.xxh3_128] = {}
        self._documents = self._open(DOCUMENTS_NAME)
        self._content = xxhash.xxh3_128()
        self._text = xxhash.xxh3_128()
        self._text_bytes = self._scored_bytes = 0

    def add_tokens(self, tokens: np.ndarray, scored: np.ndarray | None = None) -> None:
        """Append ids to the stream, end-of-text included; `scored` marks each of them if the store records that."""
        tokens = np.ascontiguousarray(tokens, DTYPES[self._dtype])
        if self.marks_scored:
            scored = np.ascontiguousarray(scored, SCORED_DTYPE)
            self._num_scored += int(scored.sum(dtype=np.int64))
            self._scored_hash.update(scored.data)
        while len(tokens):
            if self._tokens is None or self.shards[-1].num_tokens == self._shard_tokens:
                self._open_shard()
            room = self._shard_tokens - self.shards[-1].num_tokens
            written, tokens = tokens[:room], tokens[room:]
            self._write(self._tokens, written.data)
            if self.marks_scored:
                self._write(self._scored, scored[:room].data)
                scored = scored[room:]
            self.shards[-1] = Shard(self.shards[-1].path, self.shards[-1].num_tokens + len(written))

    def add_shard_in_place(self, path: Path, num_tokens: int) -> None:
        """Append the tokens of a file to the stream without copying it."""
        self.shards.append(Shard(str(path), num_tokens))

    def add_text(self, utf8: bytes, scored: bool = True) -> None:
        """Append to the text of the document that is being written."""
        self._text.update(utf8)
        self._text_bytes += len(utf8)
        self._scored_bytes += len(utf8) if scored else 0

    def end_document(self, num_tokens: int) -> None:
        """Close the document whose text was added; it has `num_tokens` of the stream, bos and end-of-text included."""
        self.num_tokens += num_tokens
        self.num_documents += 1
        self.num_bytes += self._text_bytes
        sizes = (self._text_bytes, self._scored_bytes)
        record = struct.pack("<5Q", self.num_tokens, *sizes, *split_hash(self._text))
        self._write(self._documents, record)
        self._content.update(self._text.digest())
        self._text.reset()
        self._text_bytes = self._scored_bytes = 0

    def finish(self, source: str, tokenizer: Tokenizer, chat: dict[str, str | None] | None = None) -> None:
        """Write the sidecar, with the templates of conversations. Raises InputError if no document was added."""
        self.close()
        if self.num_documents == 0:
            skipped = f" ({self.num_empty:,} empty documents)" if self.num_empty else ""
            raise InputError(f"{source}: no text in it{skipped}; expected at least one document that is not empty")
        if self.marks_scored:
            self._content.update(self._scored_hash.digest())
        if self.opened:
            self._content.update(bytes([OPENED_VERSION]))
        facts = StoreFacts(
            format_version=OPENED_VERSION if self.opened else FORMAT_VERSION,
            source=source,
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eot=tokenizer.eot,
            dtype=self._dtype,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            num_bytes=self.num_bytes,
            num_empty=self.num_empty,
            content_hash=self._content.hexdigest(),
            shards=self.shards,
            num_scored=self._num_scored if self.marks_scored else None,
            chat=chat,
            checksums={name: checksum.hexdigest() for name, checksum in self._checksums.items()},
        )
        write_sidecar(self.directory / SIDECAR_NAME, replace(facts, checksum=facts.own_checksum()))

    def close(self) -> None:
        """Close the files; without `finish` the folder holds no store."""
        self._documents.close()
        self._close_shard()

    def _open_shard(self) -> None:
        self._close_shard()
        name = f"tokens-{len(self.shards):05d}.bin"
        self._tokens = self._open(name)
        if self.marks_scored:
            self._scored = self._open(scored_name(len(self.shards)))
        self.shards.append(Shard(name, 0))

    def _open(self, name: str) -> BinaryIO:
        self._checksums[name] = xxhash.xxh3_128()
        return open(self.directory / name, "wb")

    def _write(self, stream: BinaryIO, content: bytes | memoryview) -> None:
        stream.write(content)
        self._checksums[os.path.basename(stream.name)].update(content)

    def _close_shard(self) -> None:
        for stream in (self._tokens, self._scored):
            if stream is not None:
                stream.close()
