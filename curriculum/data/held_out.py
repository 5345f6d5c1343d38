"""The two sides of a store: what training keeps of it, and the documents that an eval set measures."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import xxhash

from curriculum.data.split import Split, split_documents
from curriculum.data.store import Store, split_hash
from curriculum.data.tokenizers.tokenizer import Tokenizer
from evalsets.evalset import hash_order, num_scored_windows, smallest_hashes

_RELEASE_EVERY = 500  # documents; about 32 MB of pages


def split_store(store: Store, tokenizer: Tokenizer, share: float, min_tokens: int = 1) -> Split:
    """The split of a store as `split_documents` makes it; a divided document is cut between characters.

    bos does not count as a token, so that what is held out does not depend on it. Conversations, whose store marks
    scored tokens, are never divided: an answer stays with its prompt. Raises ValueError as `split_documents` does.
    """
    document_tokens_N, opening = store.document_tokens_N, store.facts.opening_tokens
    if opening:
        document_tokens_N = document_tokens_N - opening

    def starts_character(document: int, token: int) -> bool:
        start = int(store.documents["end"][document]) - int(document_tokens_N[document])
        return not tokenizer.continues_character_V[store.stream[start + token : start + token + 1][0]]

    marks_scored = store.facts.num_scored is not None
    split = split_documents(
        document_tokens_N, store.documents["hash"], share, min_tokens, starts_character, whole=marks_scored
    )
    return split if split.cut is None else replace(split, cut=(split.cut[0], split.cut[1] + opening))


class EvalDocument(NamedTuple):
    """A document that an eval set measures."""

    tokens: np.ndarray  # without bos and end-of-text
    num_bytes: int  # UTF-8 bytes of its scored text
    hash: tuple[int, int]  # high and low half of its text's hash
    scored: np.ndarray | None = None  # whether each token is scored, u8; None: all are


def held_out_piece(store: Store, tokenizer: Tokenizer, split: Split) -> EvalDocument | None:
    """The tail of the document that `split` divides, decoded from its tokens, as a document of its own, or None."""
    if split.cut is None:
        return None
    document, first_token = split.cut
    stop = int(store.documents["end"][document])
    start = stop - int(store.document_tokens_N[document]) + first_token
    tokens = store.stream[start:stop]
    is_text = tokens != store.facts.eot
    scored = None if store.scored_stream is None else store.scored_stream[start:stop][is_text]
    text = tokenizer.decode_bytes(tokens)
    return EvalDocument(tokens[is_text], len(text), split_hash(xxhash.xxh3_128(text)), scored)


def num_documents(store: Store, split: Split) -> int:
    """How many documents with text to score a split holds out, the tail of a divided one included."""
    return int((store.documents["scored_bytes"][split.held_out] > 0).sum()) + (split.cut is not None)


def eval_documents(store: Store, tokenizer: Tokenizer, split: Split) -> Iterator[EvalDocument]:
    """The documents that `split` holds out of a store, in the store's order.

    The tail of a divided document comes first, as a document of its own. Memory is that of the documents alone, however
    scattered they are: each is a copy, and the pages that it was read from are released.
    """
    if (piece := held_out_piece(store, tokenizer, split)) is not None:
        yield piece
    yield from _read(store, split.held_out)


def first_eval_documents(
    store: Store, tokenizer: Tokenizer, split: Split, seq_len: int, max_sequences: int
) -> list[EvalDocument]:
    """As few of `eval_documents`, in their order, as give the same eval set of at most `max_sequences` windows.

    `cut_windows` takes whole documents in ascending hash order up to the first that does not fit. So documents are read
    in that order until they have `max_sequences` windows; the rest are not read at all.
    """
    documents = split.held_out
    documents = documents[hash_order(store.documents["hash"][documents])]
    read, num_windows = {}, 0
    for number, document in zip(documents.tolist(), _read(store, documents), strict=True):
        read[number] = document
        num_windows += _num_windows(document, seq_len)
        if num_windows >= max_sequences:
            break
    piece = held_out_piece(store, tokenizer, split)
    return [*([] if piece is None else [piece]), *(read[number] for number in sorted(read))]


def measured_hashes(
    store: Store, tokenizer: Tokenizer, split: Split, seq_len: int, max_sequences: int
) -> tuple[np.ndarray, bool]:
    """What an eval set of at most `max_sequences` windows measures.

    Returns the hashes of the whole documents, u64 [D, 2], and whether it measures the tail of a divided one too.
    """
    documents = first_eval_documents(store, tokenizer, split, seq_len, max_sequences)
    hashes, windows = _hashes_and_windows(documents, seq_len)
    measured = smallest_hashes(hashes, windows, max_sequences)
    is_tail = (measured == 0) & (split.cut is not None)  # which comes first
    return hashes[measured[~is_tail]], bool(is_tail.any())


def num_first_windows(store: Store, tokenizer: Tokenizer, split: Split, seq_len: int) -> int:
    """The windows of the document that an eval set measures whatever its `max_sequences`, the first by hash."""
    hashes, windows = _hashes_and_windows(first_eval_documents(store, tokenizer, split, seq_len, 1), seq_len)
    return int(windows[smallest_hashes(hashes, windows, 1)].sum())


def _hashes_and_windows(documents: list[EvalDocument], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    hashes = np.array([document.hash for document in documents], np.uint64).reshape(-1, 2)
    return hashes, np.array([_num_windows(document, seq_len) for document in documents], int)


def _num_windows(document: EvalDocument, seq_len: int) -> int:
    scored = np.ones(len(document.tokens), bool) if document.scored is None else document.scored
    return num_scored_windows(scored, seq_len)


def _read(store: Store, documents: np.ndarray) -> Iterator[EvalDocument]:
    try:
        for count, document in enumerate(documents.tolist(), start=1):
            record = store.documents[document]
            start, stop = store.text_span(document)
            yield EvalDocument(
                store.stream[start:stop].copy(),
                int(record["scored_bytes"]),
                tuple(record["hash"].tolist()),
                None if store.scored_stream is None else store.scored_stream[start:stop].copy(),
            )
            if count % _RELEASE_EVERY == 0:
                store.release()
    finally:
        store.release()
