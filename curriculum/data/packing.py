"""Documents packed into bins of one sequence each, so that as few as possible are cut: built once, kept on disk.

A packing is a folder below <store_dir>/packing:
    pieces.bin      one PIECE record per piece, in the order of the bins and, within a bin, of the stream
    bins.bin        one u64 per bin: the number of pieces up to its end
    packing.json    the sidecar, written last
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import xxhash

from curriculum.data.cache import build_once, digest, is_there
from curriculum.data.sidecar import check_size, map_file, read_sidecar, write_sidecar
from curriculum.data.store import TokenView
from curriculum.errors import InputError
from phases.batches import Rows

SIDECAR_NAME, PIECES_NAME, BINS_NAME = "packing.json", "pieces.bin", "bins.bin"
FORMAT_VERSION = 1
DAMAGED = "delete the folder, and it is packed again"

# `start`: index of the piece's first token in the training stream. `opens`: 1 if that token begins a document.
PIECE = np.dtype([("start", "<u8"), ("tokens", "<u4"), ("opens", "<u4")])
BIN = np.dtype("<u8")


@dataclass(frozen=True)
class PackingConfig:
    """How documents become sequences, and which of their tokens are scored."""

    mode: Literal["stream", "best_fit"] = "stream"
    """stream cuts text into sequences as it comes; best_fit packs whole documents and pads the rest of a sequence."""
    mask_boundary_loss: bool = False
    """Do not score the first token of each document."""
    train_on_eos: bool = True
    """Score the end-of-text that closes a document."""
    document_mask: bool = False
    """Restrict attention to a token's own document; positions restart at 0 in each."""


def best_fit_decreasing(lengths_N: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each item, counted from 0: int64.

    Longest item first, each goes into the bin with the least room that still fits it, or else into a new bin (Johnson
    1973; for documents, Ding et al. 2024, arXiv:2404.10830). Lengths are 1 to `capacity`. Items of equal length are
    placed bin by bin: as long as the bin that took the last one fits the next, no other bin that fits it has less room.
    """
    order_N = np.argsort(-lengths_N, kind="stable")
    descending_N = lengths_N[order_N]
    bin_N = np.empty(len(lengths_N), np.int64)  # in descending order
    with_room: dict[int, list[int]] = {}  # room -> the bins that have it
    rooms: list[int] = []  # the keys of with_room, ascending
    num_bins = 0

    def put(room: int, bins: list[int]) -> None:
        if bins:
            if room not in with_room:
                with_room[room] = []
                insort(rooms, room)
            with_room[room] += bins

    bounds = [*np.flatnonzero(np.diff(descending_N, prepend=0)).tolist(), len(descending_N)]
    for placed, end in pairwise(bounds):
        length = int(descending_N[placed])
        while placed < end:
            least = bisect_left(rooms, length)
            room = rooms[least] if least < len(rooms) else capacity
            per_bin = room // length
            wanted = -(-(end - placed) // per_bin)
            if least < len(rooms):
                bins = with_room[room][-wanted:]
                del with_room[room][-wanted:]
                if not with_room[room]:
                    del with_room[room], rooms[least]
            else:
                bins = list(range(num_bins, num_bins + wanted))
                num_bins += wanted
            count = min(len(bins) * per_bin, end - placed)
            bin_N[placed : placed + count] = np.repeat(bins, per_bin)[:count]
            placed += count
            put(room - per_bin * length, bins[:-1])
            put(room - (count - per_bin * (len(bins) - 1)) * length, bins[-1:])
    out_N = np.empty_like(bin_N)
    out_N[order_N] = bin_N
    return out_N


def pack(document_tokens_N: np.ndarray, block_tokens: int, opening_tokens: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(pieces, bins) of a stream's documents, given in order, in the format of the files.

    The first `opening_tokens` of each document, its bos, are in no piece: they are not predicted (`Bins` puts bos there
    itself). A document of more than `block_tokens` tokens is split into full bins and a rest; all full bins come first.
    Depends on the arguments only; takes about 100 bytes of memory per document while it runs.
    """
    document_tokens_N = np.asarray(document_tokens_N, np.int64)
    starts_N = np.cumsum(document_tokens_N) - document_tokens_N + opening_tokens
    document_tokens_N = document_tokens_N - opening_tokens
    full_N, rest_N = np.divmod(document_tokens_N, block_tokens)
    num_full = int(full_N.sum())
    rest = np.flatnonzero(rest_N)
    rest_bin = best_fit_decreasing(rest_N[rest], block_tokens)
    order = np.argsort(rest_bin, kind="stable")
    rest = rest[order]

    pieces = np.empty(num_full + len(rest), PIECE)
    full, partial = pieces[:num_full], pieces[num_full:]
    nth = np.arange(num_full) - np.repeat(np.cumsum(full_N) - full_N, full_N)  # of the document's full bins
    full["start"] = np.repeat(starts_N, full_N) + nth * block_tokens
    full["tokens"] = block_tokens
    full["opens"] = nth == 0
    partial["start"] = starts_N[rest] + full_N[rest] * block_tokens
    partial["tokens"] = rest_N[rest]
    partial["opens"] = full_N[rest] == 0
    ends = num_full + np.cumsum(np.bincount(rest_bin)) if len(rest) else np.empty(0)
    return pieces, np.concatenate([np.arange(1, num_full + 1), ends]).astype(BIN)


@dataclass(frozen=True)
class PackingFacts:
    """The sidecar of a packing."""

    format_version: int
    block_tokens: int  # slots of a bin
    num_bins: int
    num_pieces: int
    num_tokens: int  # of the stream, without each document's bos; each token lies in one bin
    content_hash: str  # xxh3_128 of pieces.bin and bins.bin

    @property
    def tokens_per_epoch(self) -> int:
        """Slots of all bins, padding included."""
        return self.num_bins * self.block_tokens

    @property
    def utilization(self) -> float:
        """The share of slots that hold a document's token."""
        return self.num_tokens / self.tokens_per_epoch


@dataclass(frozen=True, eq=False)
class Bins:
    """A `RowStream` whose block b is bin b of a packing.

    A document of n tokens, with its end-of-text but without bos, takes n slots. Its tokens are the targets; the input
    of each is the token before it, for the first `bos` (None: end-of-text). Each piece is a segment. The rest of a bin
    is padding: end-of-text, not scored, segment -1. `scored` marks the tokens that are scored (None: all).
    """

    tokens: TokenView
    eot: int
    block_tokens: int
    pieces: np.ndarray
    bins: np.ndarray
    scored: TokenView | None = None
    bos: int | None = None

    def read(self, offsets_R: np.ndarray, length: int) -> Rows:
        """For each offset the `length` slots from there on, all of one bin."""
        index_R, within_R = np.divmod(offsets_R, self.block_tokens)
        stops_R = self.bins[index_R].astype(np.int64)
        firsts_R = np.where(index_R > 0, self.bins[index_R - 1], 0).astype(np.int64)
        counts_R = stops_R - firsts_R  # at least 1
        ahead_R = np.cumsum(counts_R) - counts_R
        row_P = np.repeat(np.arange(len(offsets_R)), counts_R)
        pieces_P = self.pieces[np.arange(len(row_P)) + (firsts_R - ahead_R)[row_P]]
        tokens_P = pieces_P["tokens"].astype(np.int64)
        slot_P = np.cumsum(tokens_P) - tokens_P
        slot_P -= (slot_P[ahead_R] + within_R)[row_P]  # within the row; negative if the piece begins before it

        low_P, high_P = np.maximum(slot_P, 0), np.minimum(slot_P + tokens_P, length)
        kept = np.flatnonzero(low_P < high_P)
        row_P, pieces_P, slot_P, low_P, high_P = (a[kept] for a in (row_P, pieces_P, slot_P, low_P, high_P))
        num_kept_R = np.bincount(row_P, minlength=len(offsets_R))
        number_P = np.arange(len(kept)) - (np.cumsum(num_kept_R) - num_kept_R)[row_P]
        opens_P = (pieces_P["opens"] > 0) & (low_P == slot_P)
        begin_P = pieces_P["start"].astype(np.int64) + low_P - slot_P
        at_P, stop_P = row_P * length + low_P, row_P * length + high_P  # in the rows, one after the other

        shape = len(offsets_R), length
        targets_RT = np.full(shape, self.eot, np.int32)
        segment_ids_RT = np.full(shape, -1, np.int32)
        scored_RT = np.zeros(shape, bool)
        targets, segment_ids, scored = (array.reshape(-1) for array in (targets_RT, segment_ids_RT, scored_RT))
        first_P = []
        columns = (a.tolist() for a in (at_P, stop_P, begin_P, opens_P, number_P))
        for at, stop, begin, opens, number in zip(*columns, strict=True):
            end = begin + stop - at
            if opens:
                first_P.append(self.eot if self.bos is None else self.bos)
                targets[at:stop] = self.tokens[begin:end]
            else:
                with_context = self.tokens[begin - 1 : end]
                first_P.append(with_context[0])
                targets[at:stop] = with_context[1:]
            segment_ids[at:stop] = number
            scored[at:stop] = True if self.scored is None else self.scored[begin:end]
        inputs_RT = np.empty(shape, np.int32)
        inputs = inputs_RT.reshape(-1)
        inputs[1:] = targets[:-1]
        used_R = np.bincount(row_P, high_P - low_P, minlength=len(offsets_R)).astype(np.int64)
        padded_R = np.flatnonzero(used_R < length)
        inputs_RT[padded_R, used_R[padded_R]] = self.eot  # the token before the padding need not be end-of-text
        inputs[at_P] = first_P
        return Rows(inputs_RT, targets_RT, scored_RT, segment_ids_RT)


def find_packing(stream: str, block_tokens: int, store_dir: str | Path) -> PackingFacts | None:
    """The facts of a packing that `prepare_packing` made, or None. Raises InputError naming a wrong or missing file."""
    directory = _directory(stream, block_tokens, Path(store_dir))
    return _open(directory)[0] if is_there(directory) else None


def prepare_packing(
    stream: str, document_tokens_N: np.ndarray, block_tokens: int, store_dir: str | Path, opening_tokens: int = 0
) -> tuple[PackingFacts, np.ndarray, np.ndarray]:
    """(facts, pieces, bins) of a stream, memory-mapped: opened if they exist, made if they do not.

    `stream` identifies the stream's content; `document_tokens_N` and `opening_tokens` are as for `pack`. Any number of
    processes may call this at once: one does the work and the others wait. Raises InputError for a damaged packing.
    """
    store_dir = Path(store_dir)
    directory = _directory(stream, block_tokens, store_dir)
    build_once(directory, store_dir, lambda folder: _write(folder, document_tokens_N, block_tokens, opening_tokens))
    facts, pieces, bins = _open(directory)
    if _content_hash(pieces, bins) != facts.content_hash:
        raise InputError(f"{directory}: {PIECES_NAME} or {BINS_NAME} does not match the sidecar's checksum; {DAMAGED}")
    return facts, pieces, bins


def _directory(stream: str, block_tokens: int, store_dir: Path) -> Path:
    return store_dir / "packing" / f"{block_tokens}-{digest(FORMAT_VERSION, stream, block_tokens)[:16]}"


def _write(directory: Path, document_tokens_N: np.ndarray, block_tokens: int, opening_tokens: int) -> None:
    pieces, bins = pack(document_tokens_N, block_tokens, opening_tokens)
    pieces.tofile(directory / PIECES_NAME)
    bins.tofile(directory / BINS_NAME)
    facts = PackingFacts(
        format_version=FORMAT_VERSION,
        block_tokens=block_tokens,
        num_bins=len(bins),
        num_pieces=len(pieces),
        num_tokens=int(pieces["tokens"].sum(dtype=np.int64)),
        content_hash=_content_hash(pieces, bins),
    )
    write_sidecar(directory / SIDECAR_NAME, facts)


def _open(directory: Path) -> tuple[PackingFacts, np.ndarray, np.ndarray]:
    facts = read_sidecar(directory / SIDECAR_NAME, PackingFacts, DAMAGED, (FORMAT_VERSION,))
    pieces = _map_records(directory / PIECES_NAME, PIECE, facts.num_pieces)
    return facts, pieces, _map_records(directory / BINS_NAME, BIN, facts.num_bins)


def _map_records(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """A file as a read-only array. Raises InputError if it cannot be read or is not `count` records long."""
    check_size(path, count * dtype.itemsize, DAMAGED)
    return map_file(path, dtype)


def _content_hash(pieces: np.ndarray, bins: np.ndarray) -> str:
    content = xxhash.xxh3_128(pieces.data)
    content.update(bins.data)
    return content.hexdigest()
