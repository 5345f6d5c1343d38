"""Which documents of a source are held out of training, and which are dropped because an eval set has them.

Pure arithmetic on arrays; N documents, M documents of eval sets. A content hash is a row of two u64.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phases.clocks import percentage

HASHED_FROM_DOCUMENTS = 100  # a source with fewer holds out its tail
MANY_DOCUMENTS = 300  # a source with at least this many holds out at least FEWEST_DOCUMENTS
FEWEST_DOCUMENTS = 30
LARGEST_OVERLAP = 0.01  # share of a source's documents that may be dropped because an eval set has them
_NONE = "set held_out: 0 if no eval set is held out of it"
_TABLE_BITS = 22  # a table of 4 MB, which a cache holds


@dataclass(frozen=True)
class Split:
    """The part of a source that training reads: the documents kept, one of them perhaps only up to a cut.

    The rest is held out: the documents not kept and, with `cut` = (document, token), the tokens of that kept document
    from `token` on.
    """

    keep_N: np.ndarray
    cut: tuple[int, int] | None = None

    @property
    def held_out(self) -> np.ndarray:
        """The indices of the documents held out whole, ascending."""
        return np.flatnonzero(~self.keep_N)


def parse_share(held_out: str | float | None) -> float:
    """`held_out` as a share: "1%" is 0.01, None is 0. Raises ValueError for other values and shares outside [0, 1)."""
    if held_out is None:
        return 0.0
    expected = f'expected a share such as "1%" or 0.01, at least 0 and below 1; got {held_out!r}'
    if isinstance(held_out, bool):
        raise ValueError(expected)
    try:
        percent = percentage(held_out) if isinstance(held_out, str) else None
        share = float(held_out if percent is None else percent)
    except ValueError:
        raise ValueError(expected) from None
    if not 0 <= share < 1:  # false for NaN too
        raise ValueError(expected)
    return share


def split_documents(
    document_tokens_N: np.ndarray,
    document_hashes_N2: np.ndarray,
    share: float,
    min_tokens: int = 1,
    starts_character: Callable[[int, int], bool] | None = None,
    *,
    whole: bool = False,
) -> Split:
    """Hold out `share` of the tokens of a source.

    From HASHED_FROM_DOCUMENTS documents on: those with the smallest content hashes, until the share is reached (at
    least FEWEST_DOCUMENTS if there are MANY_DOCUMENTS). With fewer: the last tokens of the stream. The document that
    straddles the cut is divided where a character starts (`starts_character(document, token)`); with `whole` it is held
    out undivided, unless it is the first, which stays in training.

    Copies of a document stay on one side, so that more than the share may be held out. Share 0 keeps everything. If a
    source grows, the share is reached at another hash: documents held out before may then be kept, and the other way
    round.

    `document_tokens_N` includes the end-of-text of each document. Raises ValueError if the held-out part has fewer than
    `min_tokens` tokens, if training keeps no document, or if with `whole` there is only one document.
    """
    num_documents = len(document_tokens_N)
    if share == 0:
        return Split(np.ones(num_documents, bool))
    total_tokens = int(document_tokens_N.sum())
    if total_tokens <= min_tokens:
        raise ValueError(
            f"held_out of {share:.4g}: the source has only {total_tokens:,} tokens, and one eval window needs "
            f"{min_tokens:,}; give more text, shorten evalsets.seq_len, or {_NONE}"
        )
    if whole and num_documents == 1:
        raise ValueError(
            f"held_out of {share:.4g} would cut the only conversation; give more conversations, or {_NONE}"
        )
    if num_documents < HASHED_FROM_DOCUMENTS:
        tail = _tail(document_tokens_N, math.ceil(share * total_tokens), starts_character, whole)
        split = _with_copies(tail, document_hashes_N2)
    else:
        split = _smallest_hashes(document_tokens_N, document_hashes_N2, share * total_tokens)

    held_tokens = int(document_tokens_N[~split.keep_N].sum())
    if split.cut is not None:
        held_tokens += int(document_tokens_N[split.cut[0]]) - split.cut[1]
    if held_tokens < min_tokens:
        raise ValueError(
            f"held_out of {share:.4g} gives {held_tokens:,} of {total_tokens:,} tokens, but one eval window needs "
            f"{min_tokens:,}; hold out more, shorten evalsets.seq_len, or {_NONE}"
        )
    if not split.keep_N.any():
        what = f"held_out of {share:.4g} leaves no document for training"
        if num_documents > 1 and (document_hashes_N2 == document_hashes_N2[0]).all():
            raise ValueError(f"{what}, as all {num_documents:,} are copies of one; give different ones, or {_NONE}")
        raise ValueError(f"{what}; hold out less, or {_NONE}")
    return split


def _smallest_hashes(document_tokens_N, document_hashes_N2, wanted_tokens: float) -> Split:
    num_documents = len(document_tokens_N)
    fewest = FEWEST_DOCUMENTS if num_documents >= MANY_DOCUMENTS else 1
    high_N = np.ascontiguousarray(document_hashes_N2[:, 0])
    # Sorting the few smallest is enough; if they do not reach the share, twice as many are taken.
    guess = max(fewest, int(2 * wanted_tokens / max(document_tokens_N.mean(), 1)))
    while True:
        guess = min(guess, num_documents)
        chosen = np.flatnonzero(high_N <= np.partition(high_N, guess - 1)[guess - 1])
        order = chosen[np.lexsort((document_hashes_N2[chosen, 1], high_N[chosen]))]
        count = max(fewest, int(np.searchsorted(np.cumsum(document_tokens_N[order]), wanted_tokens)) + 1)
        if count <= len(order) or guess == num_documents:
            break
        guess *= 2
    # All copies of a document are in `order`, which holds every document with the same high half.
    last = document_hashes_N2[order[min(count, len(order)) - 1]]
    while count < len(order) and (document_hashes_N2[order[count]] == last).all():
        count += 1
    keep_N = np.ones(num_documents, bool)
    keep_N[order[:count]] = False
    return Split(keep_N)


def _tail(document_tokens_N, wanted_tokens: int, starts_character, whole: bool) -> Split:
    ends_N = np.cumsum(document_tokens_N)
    first_token = int(ends_N[-1]) - wanted_tokens
    document = int(np.searchsorted(ends_N, first_token, side="right"))
    if whole:
        return Split(np.arange(len(ends_N)) < max(document, 1))
    length = int(document_tokens_N[document])
    token = first_token - (int(ends_N[document]) - length)
    if token > 0 and starts_character is not None:
        while token < length and not starts_character(document, token):
            token += 1
    keep_N = np.arange(len(ends_N)) < document
    if token == 0:
        return Split(keep_N)
    keep_N[document] = True
    # With only its end-of-text left there would be nothing to score: the document stays whole.
    return Split(keep_N, (document, token) if token < length - 1 else None)


def _with_copies(split: Split, document_hashes_N2: np.ndarray) -> Split:
    """The split that holds out copies too; a divided document that has copies is held out whole, with them."""
    reached_N, cut = ~split.keep_N, split.cut
    if cut is not None:
        reached_N[cut[0]] = True
    held_N = overlapping(document_hashes_N2, document_hashes_N2[reached_N])
    if cut is not None:
        its_copies_N = (document_hashes_N2 == document_hashes_N2[cut[0]]).all(axis=1)
        if its_copies_N.sum() == 1:
            held_N[cut[0]] = False
        else:
            cut = None
    return Split(~held_N, cut)


def overlapping(document_hashes_N2: np.ndarray, other_hashes_M2: np.ndarray) -> np.ndarray:
    """A mask over N documents: those whose hash is among those of M others.

    Two rounds, each on different bits of the hashes, leave C documents and K others whose bits occur on the other side:
    all that are equal, and few more. Only these are compared by their whole hashes.
    """
    overlap_N = np.zeros(len(document_hashes_N2), bool)
    documents_C, hashes_C2, others_K2 = np.arange(len(overlap_N)), document_hashes_N2, other_hashes_M2
    for shift in (64 - _TABLE_BITS, 64 - 2 * _TABLE_BITS):
        if not len(documents_C) or not len(others_K2):
            return overlap_N
        bits_C, bits_K = (hashes[:, 0] >> shift & (1 << _TABLE_BITS) - 1 for hashes in (hashes_C2, others_K2))
        occurs_C = _is_among(bits_C, bits_K)
        others_K2 = others_K2[_is_among(bits_K, bits_C[occurs_C])]
        documents_C, hashes_C2 = documents_C[occurs_C], hashes_C2[occurs_C]
    known = set(map(tuple, others_K2.tolist()))
    overlap_N[documents_C] = [tuple(both_halves) in known for both_halves in hashes_C2.tolist()]
    return overlap_N


def _is_among(numbers: np.ndarray, others: np.ndarray) -> np.ndarray:
    """A mask of the numbers, of _TABLE_BITS bits, that are among others; a table lookup, while np.isin would sort."""
    table = np.zeros(1 << _TABLE_BITS, bool)
    table[others] = True
    return table[numbers]


def drop_overlap(
    split: Split, document_hashes_N2: np.ndarray, source: str, eval_hashes: dict[str, np.ndarray]
) -> tuple[Split, dict[str, int]]:
    """Drop from training the documents that an eval set has; returns the split and the number dropped for each set.

    `eval_hashes`: name -> hashes [M, 2]. Documents that `split` holds out already do not count. Raises ValueError
    naming the sets if more than LARGEST_OVERLAP of the source's documents, over all sets, would be dropped.
    """
    kept = np.flatnonzero(split.keep_N)
    all_hashes_M2 = np.concatenate([np.empty((0, 2), np.uint64), *eval_hashes.values()])
    # One search over all sets first: usually nothing is found, and the sets need not be searched one by one.
    overlap = kept[overlapping(document_hashes_N2[kept], all_hashes_M2)]
    overlap_hashes = document_hashes_N2[overlap]
    dropped = {name: int(overlapping(overlap_hashes, hashes_M2).sum()) for name, hashes_M2 in eval_hashes.items()}
    keep_N = split.keep_N.copy()
    keep_N[overlap] = False
    if (num_dropped := len(overlap)) > LARGEST_OVERLAP * len(keep_N):
        named = [repr(name) for name, count in dropped.items() if count]
        several = len(named) > 1
        raise ValueError(
            f"{num_dropped:,} of {len(keep_N):,} documents also occur in eval set{'s' * several} {', '.join(named)}, "
            f"more than {LARGEST_OVERLAP:.0%}; remove them from one side, or make the set{'s' * several} from the "
            f"source with held_out_of: {source}"
        )
    return Split(keep_N, split.cut if split.cut and keep_N[split.cut[0]] else None), dropped
