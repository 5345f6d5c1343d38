"""A fixed, named, ordered list of held-out windows."""

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

PRIMARY = "primary"  # the name of the set whose loss is the validation loss of a run


@dataclass(frozen=True, eq=False)
class EvalSet:
    """Held-out documents cut into windows; `cut_windows` makes one. The arrays are read-only.

    tokens_NT1: int32 [N, T+1]. Inputs are [:, :-1], targets [:, 1:]; past the document's last token a row is
      padding (the id that opens documents), which no result may depend on.
    scored_NT: bool, the targets that count: all of a document, or the answers of a conversation; never padding.
    num_tokens_N: int32, scored targets of each window, 1..T.
    num_bytes_N: int64, UTF-8 bytes of those targets; over a fully scored document they sum to its bytes.
    document_N: int32, the document of each window, 0..D-1, non-decreasing.
    opens_N: bool, whether it is the first window of its document.
    origin_N: int64, the unit that standard errors may take as independent: as `document_N`, but ~n (below 0) for a
      window of a copied document, which repeats window n. A copy has the same tokens as an earlier document, and the
      same ones scored.
    text_D: uint64, a hash of each document's whole text, whatever the tokenizer; of its tokens if no hashes were given.
    content_hash: hexadecimal hash of the documents' tokens in order, T, the id that opens documents and, unless all
      tokens are scored, which of them are. Two sets can be compared window by window if and only if their hashes are
      equal; their names play no part.
    num_left_out: documents among those given that `max_sequences` has left out.
    """

    name: str
    tokens_NT1: np.ndarray
    scored_NT: np.ndarray
    num_tokens_N: np.ndarray
    num_bytes_N: np.ndarray
    document_N: np.ndarray
    opens_N: np.ndarray
    origin_N: np.ndarray
    text_D: np.ndarray
    content_hash: str
    num_left_out: int = 0

    @property
    def seq_len(self) -> int:
        return self.tokens_NT1.shape[1] - 1

    @property
    def num_windows(self) -> int:
        return self.tokens_NT1.shape[0]

    @property
    def num_documents(self) -> int:
        return int(self.document_N[-1]) + 1

    @property
    def num_distinct_documents(self) -> int:
        """Documents that are not copies of an earlier one."""
        return len(np.unique(self.document_N[self.origin_N >= 0]))

    @property
    def num_tokens(self) -> int:
        """Scored tokens of the whole set."""
        return int(self.num_tokens_N.sum(dtype=np.int64))

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the scored tokens of the whole set."""
        return int(self.num_bytes_N.sum())


def cut_windows(
    name: str,
    documents: Iterable[np.ndarray],
    token_bytes_V: np.ndarray,
    bos: int,
    seq_len: int,
    max_sequences: int | None = None,
    document_hashes: np.ndarray | None = None,
    scored: Sequence[np.ndarray | None] | None = None,
    document_bytes: Sequence[int] | None = None,
) -> EvalSet:
    """Cut documents into disjoint windows that score every token, or every token of the answers, exactly once.

    Each document is prefixed by `bos`, the id that opens documents (usually end-of-text); with that prefix, its
    window k holds the tokens [k*T .. (k+1)*T], T = `seq_len`. So the first token is predicted from `bos`, the first
    token of a later window from the last token of the window before it, and every other token from all the tokens
    before it in its window. A closing end-of-text is not scored: `documents` come without one. Documents without a
    scored token, such as empty ones, are skipped, and neither counted nor hashed. Windows without a scored token are
    left out too.

    A window belongs to one document, so a document of n tokens costs ceil(n / T) rows: with documents of 100
    tokens and T = 1,024 nine tenths of an eval go to padding. That is the price of results that depend on
    nothing but the document, and of errors clustered by document; a smaller `seq_len` is the cure.

    documents: 1-D integer arrays, in the order that the set keeps.
    token_bytes_V: UTF-8 bytes of each id of the vocabulary, 0 for special tokens.
    max_sequences: the maximum number of windows. Whole documents are taken in ascending hash order up to the first
      that does not fit (so a smaller set is a subset of a larger one), and stay in the order of `documents`. The first
      document in hash order is always taken, even if it alone has more windows.
    document_hashes: one for each document, empty ones included, uint64 pairs [D, 2]; default: computed from the tokens.
    scored: one for each document, empty ones included: whether each of its tokens is scored, or None for all of them.
      Default: all tokens of all documents.
    document_bytes: one for each document, empty ones included: UTF-8 bytes of its scored text. They differ from the
      bytes of its tokens if the tokenizer normalises text or adds to it, and are divided among its windows in
      proportion to the bytes of their tokens. Default: the bytes of its tokens.

    Raises ValueError for: nothing to score; an id outside the vocabulary; a document that is not 1-D integers;
    hashes, `scored` or `document_bytes` that do not match the documents; seq_len or max_sequences below 1; a bad name.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError(f"eval set name {name!r}: expected letters (a-z, A-Z), digits, '_' and '-' only")
    where = f"eval set '{name}'"
    if seq_len < 1:
        raise ValueError(f"{where}: seq_len is {seq_len}, expected at least 1")
    if max_sequences is not None and max_sequences < 1:
        raise ValueError(f"{where}: max_sequences is {max_sequences}, expected at least 1")
    vocab_size = len(token_bytes_V)
    if not 0 <= bos < vocab_size:
        raise ValueError(f"{where}: the id that opens documents is {bos}, expected 0 to {vocab_size - 1}")
    documents = [np.asarray(document) for document in documents]
    _check_documents(where, documents, document_hashes, document_bytes)
    scored = _checked_scored(where, documents, scored)

    # Windows with a scored token; a document that has none is skipped.
    windows = np.array([num_scored_windows(scored_t, seq_len) for scored_t in scored], np.int64)
    chosen_D = np.flatnonzero(windows)
    num_documents = len(chosen_D)
    if not chosen_D.size:
        raise ValueError(
            f"{where}: no tokens to score in {len(documents)} documents, expected at least one; "
            "give it text, or remove the set"
        )
    if document_hashes is None:
        digests = b"".join(_hash_document(document) for document in documents)
        document_hashes = np.frombuffer(digests, ">u8").reshape(-1, 2)
    document_hashes = np.asarray(document_hashes, np.uint64)
    if max_sequences is not None:
        chosen_D = smallest_hashes(document_hashes, windows, max_sequences)
    length_D = np.array([len(documents[i]) for i in chosen_D], np.int64)
    targets = np.concatenate([documents[i] for i in chosen_D])
    _check_ids(where, targets, vocab_size, chosen_D, length_D)
    targets = targets.astype(np.int32, copy=False)
    scored_targets = np.concatenate([scored[i] for i in chosen_D])

    tokens_NT1, scored_NT, document_N, opens_N = _rows(targets, length_D, bos, seq_len)
    if not scored_targets.all():
        scored_NT[scored_NT] = scored_targets
        kept_N = scored_NT.any(axis=1)
        tokens_NT1, scored_NT = tokens_NT1[kept_N], scored_NT[kept_N]
        document_N, opens_N = document_N[kept_N], opens_N[kept_N]
    origin_N = _origins(document_N, _first_alike(documents, scored, chosen_D))
    num_tokens_N = scored_NT.sum(axis=1, dtype=np.int32)
    num_bytes_N = _window_bytes(np.asarray(token_bytes_V), tokens_NT1[:, 1:], scored_NT)
    if document_bytes is not None:
        num_bytes_N = _shared_bytes(num_bytes_N, document_N, np.asarray(document_bytes, np.int64)[chosen_D])

    text_D = document_hashes[chosen_D, 0]
    for array in (tokens_NT1, scored_NT, num_tokens_N, num_bytes_N, document_N, opens_N, origin_N, text_D):
        array.flags.writeable = False
    return EvalSet(
        name,
        tokens_NT1,
        scored_NT,
        num_tokens_N,
        num_bytes_N,
        document_N,
        opens_N,
        origin_N,
        text_D,
        _content_hash(targets, scored_targets, length_D, bos, seq_len),
        num_left_out=num_documents - len(length_D),
    )


def _rows(
    targets: np.ndarray, length_D: np.ndarray, bos: int, seq_len: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [N, T+1], which targets are tokens [N, T], document, whether it opens one) of the windows of documents.

    `targets` are the tokens of all documents, one after the other.
    """
    windows_D = -(-length_D // seq_len)
    document_N = np.repeat(np.arange(len(length_D), dtype=np.int32), windows_D)
    first_D = np.cumsum(windows_D) - windows_D
    k_N = np.arange(len(document_N)) - first_D[document_N]
    tokens_NT1 = np.full((len(document_N), seq_len + 1), bos, np.int32)
    is_token_NT = np.arange(seq_len) < (length_D[document_N] - k_N * seq_len)[:, None]  # the rest is padding
    # Row by row, these are the documents' tokens in order.
    tokens_NT1[:, 1:][is_token_NT] = targets
    tokens_NT1[1:, 0] = tokens_NT1[:-1, -1]
    tokens_NT1[first_D, 0] = bos
    return tokens_NT1, is_token_NT, document_N, k_N == 0


def _content_hash(targets: np.ndarray, scored_targets: np.ndarray, length_D: np.ndarray, bos: int, seq_len: int) -> str:
    content = hashlib.blake2b(np.array([seq_len, bos, len(length_D)], "<i8"), digest_size=16)
    content.update(length_D.astype("<i8"))
    content.update(targets.astype("<i4", copy=False))
    if not scored_targets.all():
        content.update(np.packbits(scored_targets))
    return content.hexdigest()


def num_scored_windows(scored_t: np.ndarray, seq_len: int) -> int:
    """The number of a document's windows that hold a scored token."""
    if not len(scored_t):
        return 0
    return int(np.count_nonzero(np.logical_or.reduceat(scored_t, np.arange(0, len(scored_t), seq_len))))


def hash_order(document_hashes: np.ndarray) -> np.ndarray:
    """Indices of the documents in ascending order of their hashes [D, 2]; equal ones keep the documents' order."""
    return np.lexsort(document_hashes.T[::-1])


def _check_documents(
    where: str,
    documents: Sequence[np.ndarray],
    document_hashes: np.ndarray | None,
    document_bytes: Sequence[int] | None,
) -> None:
    for i, document in enumerate(documents):
        if document.ndim != 1 or (document.size and document.dtype.kind not in "iu"):
            raise ValueError(f"{where}: document {i} is {document.dtype}{list(document.shape)}, expected 1-D integers")
    if document_hashes is not None and np.shape(document_hashes) != (len(documents), 2):
        got = f"document hashes {list(np.shape(document_hashes))}"
        raise ValueError(f"{where}: {got}, expected [{len(documents)}, 2], a pair for each document")
    if document_bytes is not None and len(document_bytes) != len(documents):
        raise ValueError(f"{where}: {len(document_bytes)} document_bytes, expected {len(documents)}, one per document")


def _checked_scored(
    where: str, documents: Sequence[np.ndarray], scored: Sequence[np.ndarray | None] | None
) -> list[np.ndarray]:
    """Whether each token of each document is scored, as arrays of bool."""
    scored = [None] * len(documents) if scored is None else list(scored)
    if len(scored) != len(documents):
        raise ValueError(f"{where}: scored is given for {len(scored)} documents, expected {len(documents)}")
    for i, document in enumerate(documents):
        scored[i] = np.ones(len(document), bool) if scored[i] is None else np.asarray(scored[i], bool)
        if scored[i].shape != document.shape:
            raise ValueError(f"{where}: document {i}: scored is {list(scored[i].shape)}, expected {[len(document)]}")
    return scored


def _check_ids(where: str, targets: np.ndarray, vocab_size: int, chosen_D: np.ndarray, length_D: np.ndarray) -> None:
    """Raise ValueError for the first id outside the vocabulary, naming its document and place."""
    if targets.min() < 0 or targets.max() >= vocab_size:
        at = int(np.argmax((targets < 0) | (targets >= vocab_size)))
        before_D = np.cumsum(length_D) - length_D
        d = int(np.searchsorted(before_D, at, side="right")) - 1
        raise ValueError(
            f"{where}: document {chosen_D[d]}, token {at - before_D[d]}: id {targets[at]}, "
            f"expected 0 to {vocab_size - 1}; was it made with another tokenizer?"
        )


def smallest_hashes(document_hashes: np.ndarray, windows: np.ndarray, max_sequences: int) -> np.ndarray:
    """Indices, ascending, of the documents taken for at most `max_sequences` windows; `windows` are each one's."""
    order_D = hash_order(document_hashes)
    order_D = order_D[windows[order_D] > 0]
    windows_so_far = np.cumsum(windows[order_D])
    fitting = np.searchsorted(windows_so_far, max_sequences, side="right")
    return np.sort(order_D[: max(1, fitting)])


def _window_bytes(token_bytes_V: np.ndarray, targets_NT: np.ndarray, scored_NT: np.ndarray) -> np.ndarray:
    """UTF-8 bytes of the scored targets of each window, int64."""
    num_bytes_N = np.zeros(len(targets_NT), np.int64)
    # A few windows at a time: one look-up for all of them would take several times their memory.
    for start in range(0, len(targets_NT), 1024):
        some = slice(start, start + 1024)
        num_bytes_N[some] = np.sum(token_bytes_V[targets_NT[some]], axis=1, where=scored_NT[some])
    return num_bytes_N


def _shared_bytes(num_bytes_N: np.ndarray, document_N: np.ndarray, document_bytes_D: np.ndarray) -> np.ndarray:
    """Each document's bytes divided among its windows in proportion to their tokens' bytes: ints with an exact sum."""
    token_bytes_D = np.bincount(document_N, num_bytes_N, len(document_bytes_D)).astype(np.int64)
    so_far_N = np.cumsum(num_bytes_N) - (np.cumsum(token_bytes_D) - token_bytes_D)[document_N]
    if (token_bytes_D == document_bytes_D).all():
        return num_bytes_N
    is_last_N = np.append(document_N[1:] != document_N[:-1], True)
    # Python's integers: for documents of gigabytes the products exceed 64 bits.
    shares = document_bytes_D[document_N].astype(object) * so_far_N // np.maximum(token_bytes_D, 1)[document_N]
    upto_N = np.where(is_last_N, document_bytes_D[document_N], shares.astype(np.int64))
    before_N = np.concatenate([[0], upto_N[:-1]])
    before_N[1:][is_last_N[:-1]] = 0
    return upto_N - before_N


def _first_alike(documents: Sequence[np.ndarray], scored: Sequence[np.ndarray], chosen_D: np.ndarray) -> np.ndarray:
    """For each chosen document the first chosen one with the same content, [D]: itself unless it is a copy."""
    first: dict[bytes, int] = {}
    contents = (_hash_document(documents[i]) + _hash_document(scored[i]) for i in chosen_D)
    return np.array([first.setdefault(content, d) for d, content in enumerate(contents)], np.int64)


def _origins(document_N: np.ndarray, first_D: np.ndarray) -> np.ndarray:
    """`EvalSet.origin_N`; a copy has the same windows in the same order."""
    start_D = np.searchsorted(document_N, np.arange(len(first_D)))
    repeated_N = np.arange(len(document_N)) + (start_D[first_D] - start_D)[document_N]
    is_copy_N = first_D[document_N] != document_N
    return np.where(is_copy_N, ~repeated_N, document_N)


def _hash_document(document: np.ndarray) -> bytes:
    """A hash of the values alone, whatever their integer type."""
    return hashlib.blake2b(np.ascontiguousarray(document, "<i8"), digest_size=16).digest()
