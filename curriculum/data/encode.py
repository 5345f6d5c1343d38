"""Documents to tokens on all cores, in order and in bounded memory."""

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from curriculum.data.chat import Stretch
from curriculum.data.pieces import Piece
from curriculum.data.tokenizers.tokenizer import NUM_THREADS, Tokenizer
from curriculum.errors import InputError

GROUP_BYTES = 1 << 20  # of UTF-8 that a thread encodes at a time

# Matches a token that can span a place where a text is cut into pieces: between two words, before the space, or at the
# start of a line.
_ACROSS_CUT = re.compile(r"[^\W\d_] ([^\W\d_]|\Z)|(\A|\S)\n[^\W\d_]")


def encode_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[list[Piece], np.ndarray, list[int]]]:
    """Groups of pieces in order, with their tokens and each piece's number of tokens.

    End-of-text follows the last piece of a document; bos precedes the first if it is not end-of-text. Both count as
    tokens of their pieces. An empty document has no tokens.

    A special piece is the token that it names; bos is not written twice where a template spells it first. Cutting a
    text into pieces does not change its ids. If a token of the vocabulary could span a cut, all consecutive pieces of a
    document that are scored alike are joined, and encoded and held as one.

    Memory: at most 2 x NUM_THREADS + 1 groups, each about GROUP_BYTES of text and its tokens (more only if one piece is
    longer), and for byte pairs one encoding per thread, 10 MB with 50,000 ids. Raises InputError naming the place of
    text that cannot be represented.
    """
    pieces = _opened_once(pieces, tokenizer)
    if _crosses_words(tokenizer):
        pieces = _joined(pieces)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        waiting, last = deque(), None
        for group in _groups(pieces):
            before, last = [last, *group[:-1]], group[-1]
            waiting.append((group, pool.submit(_encode_group, group, before, tokenizer)))
            if len(waiting) > 2 * NUM_THREADS:
                done, encoded = waiting.popleft()
                yield done, *encoded.result()
        while waiting:
            done, encoded = waiting.popleft()
            yield done, *encoded.result()


def _opened_once(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[Piece]:
    """The pieces without a bos that a template spells at the beginning of a document, where it is written anyway."""
    opens = True
    for piece in pieces:
        if not (opens and _spells_bos(piece, tokenizer)):
            yield piece
        opens = piece.ends_document


def _crosses_words(tokenizer: Tokenizer) -> bool:
    within = (token for token in tokenizer.tokens if b" " in token[1:] or b"\n" in token[:-1])
    # A token may begin or end within a letter: what cannot be decoded counts as one.
    return any(_ACROSS_CUT.search(token.decode(errors="replace").replace("\ufffd", "a")) for token in within)


def _joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same documents, with consecutive pieces that are scored alike joined into one."""
    waiting: list[Piece] = []
    for piece in pieces:
        cut = waiting and (waiting[-1].ends_document or waiting[-1].scored != piece.scored or waiting[-1].special)
        if cut or (waiting and piece.special):
            yield _one(waiting)
            waiting = []
        waiting.append(piece)
    if waiting:
        yield _one(waiting)


def _one(pieces: list[Piece]) -> Piece:
    text, source_bytes = "".join(piece.text for piece in pieces), sum(piece.source_bytes for piece in pieces)
    return pieces[-1]._replace(text=text, source_bytes=source_bytes)


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    group, size = [], 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text) if piece.text.isascii() else len(piece.text.encode())
        if size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode_group(group: list[Piece], before: list[Piece | None], tokenizer: Tokenizer) -> tuple[np.ndarray, list[int]]:
    opens = [piece is None or piece.ends_document for piece in before]
    prefixed = [
        opens_document or tokenizer.puts_prefix_after(piece.text, piece.special)
        for opens_document, piece in zip(opens, before, strict=True)
    ]
    end_of_text = np.array([tokenizer.eot], tokenizer.dtype)
    opening = np.array([tokenizer.bos] if tokenizer.has_own_bos else [], tokenizer.dtype)
    arrays, counts = [np.empty(0, tokenizer.dtype)], []
    try:
        encoded = _encode(group, prefixed, tokenizer)
    except InputError:
        for piece, has_prefix in zip(group, prefixed, strict=True):  # which one was it?
            try:
                _encode([piece], [has_prefix], tokenizer)
            except InputError as error:
                raise InputError(f"{piece.where}: {error}") from error
        raise
    for piece, opens_document, tokens in zip(group, opens, encoded, strict=True):
        parts = []
        if piece.text:
            parts = [opening] * opens_document + [tokens] + [end_of_text] * piece.ends_document
        arrays += parts
        counts.append(sum(map(len, parts)))
    return np.concatenate(arrays), counts


def encode_beginning(stretches: list[Stretch], tokenizer: Tokenizer) -> np.ndarray:
    """The ids of the beginning of a document, without bos. Raises InputError for text that has none."""
    stretches = stretches[1:] if stretches and _spells_bos(stretches[0], tokenizer) else stretches
    prefixed = [True, *(tokenizer.puts_prefix_after(stretch.text, stretch.special) for stretch in stretches[:-1])]
    return np.concatenate([np.empty(0, tokenizer.dtype), *_encode(stretches, prefixed, tokenizer)])


def _spells_bos(piece: Piece | Stretch, tokenizer: Tokenizer) -> bool:
    return piece.special and tokenizer.special_tokens[piece.text] == tokenizer.bos


def _encode(
    stretches: Sequence[Piece] | Sequence[Stretch], prefixed: Sequence[bool], tokenizer: Tokenizer
) -> list[np.ndarray]:
    named = {name: np.array([token], tokenizer.dtype) for name, token in tokenizer.special_tokens.items()}
    ids = [named[stretch.text] if stretch.special else None for stretch in stretches]
    texts = [number for number, found in enumerate(ids) if found is None]
    encoded = tokenizer.encode_batch([stretches[i].text for i in texts], [prefixed[i] for i in texts])
    for number, found in zip(texts, encoded, strict=True):
        ids[number] = found
    return ids
