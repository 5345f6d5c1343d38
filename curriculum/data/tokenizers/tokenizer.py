"""Tokenizers, text to ids and back: byte, char, byte pairs trained here, tiktoken's by name, and Hugging Face's.

Every kind is a list of the bytes of each id. Byte pairs also have a pattern, which cuts text into the stretches inside
which pairs are merged. tiktoken encodes byte pairs; the `tokenizers` library encodes those of a Hugging Face folder.
"""

import base64
import binascii
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from curriculum.data.sidecar import read_sidecar, write_sidecar
from curriculum.data.tokenizers.hf_definition import LARGEST_VOCAB
from curriculum.data.tokenizers.hf_files import HfFiles, is_hf_folder, load_hf_files, read_hf_files, save_hf_files
from curriculum.errors import FieldError, InputError

END_OF_TEXT = "<|endoftext|>"
DTYPES = {"u16": np.dtype("<u2"), "u32": np.dtype("<u4")}  # what ids are stored as, on disk and in arrays
SIDECAR_NAME = "tokenizer.json"
RANKS_NAME = "ranks.tiktoken"  # tiktoken's own format: a token in base64, a space, its id
HF_FOLDER = "hf"  # in a saved tokenizer of kind hf: the files of Hugging Face, one of which has the sidecar's name
FORMAT_VERSION = 1
SMALLEST_BPE = 257  # the 256 bytes and end-of-text
# An encoding's matcher is fastest for the thread that used it first: for others it takes 1.24x as long. So each thread
# gets its own encoding, but only once it has encoded this much text: making one takes as long as encoding 0.4 MB with
# 50,000 ids, or 1.5 MB with 200,000, and takes 10 or 40 MB of memory.
SHARED_CHARACTERS = 1 << 21
NUM_THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer the run uses."""

    kind: Literal["byte", "char", "bpe", "tiktoken", "hf"] = "byte"
    """bpe is trained on the sources, or read from `path`; tiktoken is a published encoding, given by `name`; hf is the
    tokenizer of a Hugging Face folder, `path`."""
    vocab_size: int | None = None
    """For bpe: size of the vocabulary to train, including the 256 bytes and end-of-text."""
    name: str | None = None
    """For tiktoken: the published encoding, such as gpt2."""
    path: str | None = None
    """The folder of a saved tokenizer to use instead of training one; for hf, a folder with a tokenizer.json."""

    def __post_init__(self):
        if self.kind == "hf" and self.path is None:
            raise FieldError("kind", "kind hf needs path, a folder with a tokenizer.json")
        if self.kind == "tiktoken" and (self.name is None) == (self.path is None):
            raise FieldError("kind", "kind tiktoken needs name (such as gpt2), or path to a saved tokenizer")
        if self.kind != "tiktoken" and self.name is not None:
            raise FieldError("name", f"name applies to kind tiktoken only; got kind {self.kind}")
        if self.kind == "byte" and self.path is not None:
            raise FieldError("path", "kind byte has nothing to load; leave path out")
        if self.kind != "bpe" and self.vocab_size is not None:
            raise FieldError(
                "vocab_size",
                f"vocab_size applies to kind bpe only, other kinds determine their own; got kind {self.kind}",
            )
        if self.kind == "bpe" and self.path is None:
            if self.vocab_size is None:
                raise FieldError("kind", "kind bpe needs vocab_size to train one, or path to a saved tokenizer")
            if self.vocab_size < SMALLEST_BPE:
                raise FieldError(
                    "vocab_size",
                    f"vocab_size {self.vocab_size} is too small: the 256 bytes and end-of-text take {SMALLEST_BPE}",
                )
            if self.vocab_size > LARGEST_VOCAB:
                raise FieldError(
                    "vocab_size", f"vocab_size {self.vocab_size} is too large; expected at most {LARGEST_VOCAB}"
                )


@dataclass(frozen=True)
class TokenizerFacts:
    """The sidecar of a saved tokenizer: everything but the ranks."""

    format_version: int
    kind: Literal["byte", "char", "bpe", "tiktoken", "hf"]
    name: str | None
    vocab_size: int
    eot: int
    fingerprint: str
    pattern: str | None
    special_tokens: dict[str, int]
    characters: list[str] | None
    bos: int | None = None  # of kind hf: the one that its files name
    files: dict[str, str] | None = None  # of kind hf: sha256 of each
    stops: list[int] | None = None  # of kind hf, if there are any


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids and back. `tokens[i]` is the text of id i, b"" for special and unused ids.

    Lossless, except that kind hf may normalise text, and put a space before it and behind its added tokens.
    """

    kind: str
    tokens: tuple[bytes, ...] = field(repr=False)
    special_tokens: dict[str, int] = field(repr=False)
    pattern: str | None = field(default=None, repr=False)
    name: str | None = None
    hf: HfFiles | None = field(default=None, repr=False)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def eot(self) -> int:
        """The id that ends each document; no text encodes to it."""
        return self.special_tokens[END_OF_TEXT] if self.hf is None else self.hf.eot

    @property
    def bos(self) -> int:
        """The id that opens a document; no text encodes to it.

        For kind hf the one that its files name, else end-of-text, which then also closes the document before.
        """
        return self.eot if self.hf is None or self.hf.bos is None else self.hf.bos

    @property
    def has_own_bos(self) -> bool:
        """Whether the id that opens documents is not end-of-text."""
        return self.bos != self.eot

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids besides `eot` that end a text of the model that a Hugging Face tokenizer came with."""
        return () if self.hf is None else self.hf.stops

    @property
    def dtype_name(self) -> str:
        """The key in DTYPES of the smallest type that holds all ids."""
        return "u16" if self.vocab_size <= 1 << 16 else "u32"

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.dtype_name]

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest of everything that determines ids: equal if and only if all ids are."""
        if self.hf is not None:
            return self.hf.fingerprint
        digest = hashlib.sha256()
        for part in (repr(self.pattern).encode(), repr(sorted(self.special_tokens.items())).encode()):
            digest.update(len(part).to_bytes(8, "little") + part)
        digest.update(self.token_bytes_V.astype("<u4").tobytes())
        digest.update(b"".join(self.tokens))
        return digest.hexdigest()[:32]

    @property
    def facts(self) -> TokenizerFacts:
        return TokenizerFacts(
            format_version=FORMAT_VERSION,
            kind=self.kind,
            name=self.name,
            vocab_size=self.vocab_size,
            eot=self.eot,
            fingerprint=self.fingerprint,
            pattern=self.pattern,
            special_tokens=self.special_tokens,
            characters=[token.decode() for token in self.tokens if token] if self.kind == "char" else None,
            bos=None if self.hf is None else self.hf.bos,
            files=None if self.hf is None else self.hf.file_digests,
            stops=list(self.stops) or None,
        )

    @cached_property
    def token_bytes_V(self) -> np.ndarray:
        """UTF-8 bytes of each id, int64; 0 for end-of-text and the other ids that stand for no text."""
        return np.array([len(token) for token in self.tokens], np.int64)

    @cached_property
    def continues_character_V(self) -> np.ndarray:
        """Whether the text of an id begins inside a UTF-8 character."""
        return np.array([token[:1] >= b"\x80" and token[:1] < b"\xc0" for token in self.tokens], bool)

    @cached_property
    def prefix(self) -> bytes:
        """What the tokenizer puts before a document: a space, or nothing."""
        return b"" if self.hf is None else self.hf.parsed.prefix

    @cached_property
    def _token_text(self) -> tuple[np.ndarray, np.ndarray]:
        starts_V = np.cumsum(self.token_bytes_V) - self.token_bytes_V
        return np.frombuffer(b"".join(self.tokens), np.uint8), starts_V

    @cached_property
    def _encode(self) -> Callable[[Sequence[str]], list[np.ndarray]]:
        if self.pattern is not None:
            return _byte_pair_encoder(self)
        if self.kind == "char":
            encode = _character_encoder(self)
            return lambda texts: [encode(text).astype(self.dtype) for text in texts]
        return lambda texts: [np.frombuffer(text.encode(), np.uint8).astype(self.dtype) for text in texts]

    def encode(self, text: str, opens_document: bool = True) -> np.ndarray:
        """The ids of `text`, all of it ordinary: the string "<|endoftext|>" in it is not end-of-text.

        `opens_document` False: the text lies inside a document, so a tokenizer that puts a space before a document puts
        none before it (but see `puts_prefix_after`). For kind hf, added tokens that are not special are found wherever
        their text stands. Safe to call from several threads. Raises InputError for text that the tokenizer cannot
        represent.
        """
        return self.encode_batch([text], [opens_document])[0]

    def encode_batch(self, texts: Sequence[str], opens_document: Sequence[bool]) -> list[np.ndarray]:
        """`encode` of each text; kind hf uses all cores."""
        if self.hf is not None:
            return [ids.astype(self.dtype) for ids in self.hf.encoder(texts, opens_document)]
        return self._encode(texts)

    def puts_prefix_after(self, text: str, special: bool) -> bool:
        """Whether what follows `text`, or the `special` token of that name, is encoded as if it opened a document."""
        if self.hf is None or special:
            return special and self.hf is not None and self.hf.parsed.prefixes_each
        pattern = self.hf.parsed.before_prefix
        return pattern is not None and any(found.end() == len(text) for found in pattern.finditer(text))

    def decode_bytes(self, ids: np.ndarray, opens_document: bool = False) -> bytes:
        """The text of `ids` as UTF-8 bytes (which may begin or end inside a character).

        `opens_document`: leave out the space that the tokenizer put before the document. Raises ValueError for an id
        outside the vocabulary.
        """
        ids = np.asarray(ids, np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(f"ids from {ids.min()} to {ids.max()}; expected 0 to {self.vocab_size - 1}")
        text, starts_V = self._token_text
        lengths = self.token_bytes_V[ids]
        ends = np.cumsum(lengths)
        # A token's bytes begin at ends - lengths in the output and at starts_V in `text`: shift by the difference.
        shift = np.repeat(starts_V[ids] - (ends - lengths), lengths)
        decoded = text[np.arange(len(shift)) + shift].tobytes()
        return decoded.removeprefix(self.prefix) if opens_document else decoded

    def save(self, directory: str | Path) -> None:
        """Write SIDECAR_NAME and RANKS_NAME (byte pairs) or HF_FOLDER (kind hf): all that `load_tokenizer` needs."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if self.pattern is not None:
            with open(directory / RANKS_NAME, "wb") as stream:
                for token_id, token in enumerate(self.tokens):
                    if token:
                        stream.write(b"%b %d\n" % (base64.b64encode(token), token_id))
        if self.hf is not None:
            save_hf_files(directory / HF_FOLDER, self.hf)
        write_sidecar(directory / SIDECAR_NAME, self.facts)


def _byte_pair_encoder(tokenizer: Tokenizer) -> Callable[[Sequence[str]], list[np.ndarray]]:
    import tiktoken

    ranks = {token: token_id for token_id, token in enumerate(tokenizer.tokens) if token}
    name, special_tokens = tokenizer.name or tokenizer.kind, tokenizer.special_tokens

    def new_encoding() -> tiktoken.Encoding:
        settings = {"pat_str": tokenizer.pattern, "mergeable_ranks": ranks, "special_tokens": special_tokens}
        return tiktoken.Encoding(name, **settings)

    shared, of_thread = new_encoding(), threading.local()

    def encoding_for(text: str) -> tiktoken.Encoding:
        """The thread's own encoding, once the thread has encoded enough text for making one to pay."""
        of_thread.characters = getattr(of_thread, "characters", 0) + len(text)
        if of_thread.characters <= SHARED_CHARACTERS:
            return shared
        if not hasattr(of_thread, "encoding"):
            of_thread.encoding = new_encoding()
        return of_thread.encoding

    def encode(text: str, special: frozenset[str] = frozenset()) -> np.ndarray:
        try:
            ids = encoding_for(text).encode_to_numpy(text, allowed_special=special, disallowed_special=())
        except ValueError as error:
            # The pattern backtracks over white space; its matcher gives up near a million characters.
            raise InputError(f"{error}; shorten any very long run of spaces or empty lines") from error
        return ids.astype(tokenizer.dtype)

    def encode_all(texts: Sequence[str]) -> list[np.ndarray]:
        """One call for many short texts: each call has to reacquire the interpreter lock, which a reader may hold.

        The texts are joined by end-of-text, taken as special: tiktoken encodes each stretch between as if it stood
        alone.
        """
        if any(END_OF_TEXT in text for text in texts):
            return [encode(text) for text in texts]
        ids = encode(END_OF_TEXT.join(texts), between)
        at = np.flatnonzero(ids == tokenizer.eot).tolist()
        return [ids[start:stop] for start, stop in zip([0, *(i + 1 for i in at)], [*at, len(ids)], strict=True)]

    between = frozenset([END_OF_TEXT])
    return encode_all


def _character_encoder(tokenizer: Tokenizer) -> Callable[[str], np.ndarray]:
    unknown = -1
    ids = np.full(0x110000, unknown, np.int32)
    for token_id, token in enumerate(tokenizer.tokens):
        if token:
            ids[ord(token.decode())] = token_id

    def encode(text: str) -> np.ndarray:
        encoded = ids[np.frombuffer(text.encode("utf-32-le"), "<u4")]
        if encoded.size and encoded.min() == unknown:
            character = text[int(encoded.argmin())]
            raise InputError(
                f"character {character!r} (U+{ord(character):04X}) is not among the {tokenizer.vocab_size - 1} of the "
                "char tokenizer, which knows only those of the sources; use tokenizer kind byte or bpe"
            )
        return encoded

    return encode


def byte_tokenizer() -> Tokenizer:
    """The 256 bytes, then end-of-text."""
    return Tokenizer("byte", (*(bytes([byte]) for byte in range(256)), b""), {END_OF_TEXT: 256})


def hf_tokenizer(files: HfFiles) -> Tokenizer:
    return Tokenizer("hf", files.tokens, files.special_tokens, hf=files)


def load_tokenizer(directory: str | Path) -> Tokenizer:
    """The tokenizer that `save` wrote, or that of a Hugging Face folder.

    Raises InputError if it is missing, damaged, altered or not supported. Imports no tokenizer library.
    """
    directory = Path(directory)
    if is_hf_folder(directory) or (directory / "tokenizer.model").exists():
        return hf_tokenizer(read_hf_files(directory))
    path = directory / SIDECAR_NAME
    facts = read_sidecar(path, TokenizerFacts, "expected a tokenizer's folder, saved by curriculum or by Hugging Face")
    if facts.format_version != FORMAT_VERSION:
        raise InputError(f"{path}: format_version {facts.format_version}; expected {FORMAT_VERSION}; save it again")
    damaged = InputError(
        f"{directory}: the tokenizer's files do not match its fingerprint {facts.fingerprint}; restore them"
    )
    if facts.kind == "byte":
        tokenizer = byte_tokenizer()
    elif facts.kind == "hf":
        tokenizer = hf_tokenizer(load_hf_files(directory / HF_FOLDER, facts.eot, facts.bos, facts.stops or ()))
    else:
        if not 0 < facts.vocab_size <= LARGEST_VOCAB:
            raise damaged
        tokens = [b""] * facts.vocab_size
        try:
            for token_id, token in _saved_tokens(directory, facts):
                tokens[token_id] = token
        except InputError:
            raise
        except (ValueError, IndexError) as error:
            raise damaged from error
        tokenizer = Tokenizer(facts.kind, tuple(tokens), facts.special_tokens, facts.pattern, facts.name)
    has_eot = tokenizer.hf is not None or END_OF_TEXT in tokenizer.special_tokens
    if not has_eot or tokenizer.facts != facts:
        raise damaged
    return tokenizer


def _saved_tokens(directory: Path, facts: TokenizerFacts) -> Iterable[tuple[int, bytes]]:
    if facts.characters is not None:
        yield from ((token_id, text.encode()) for token_id, text in enumerate(facts.characters))
        return
    path = directory / RANKS_NAME
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected the ranks saved with the tokenizer") from error
    for line in lines:
        token, token_id = line.split()
        yield int(token_id), binascii.a2b_base64(token)
