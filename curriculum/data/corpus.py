"""All the data of a run: a training stream for each source, and the eval sets, which are kept out of the streams."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from curriculum.config import Config
from curriculum.data.config_stores import (
    Stores,
    check_edges,
    check_unprepared,
    divided_document,
    drop_evals,
    find_stores,
    own_sources,
    place_of,
    prepare_stores,
    split_stores,
)
from curriculum.data.corpus_warnings import (
    copies_warnings,
    overlap_warnings,
    shared_file_warnings,
    size_warnings,
    size_warnings_ahead,
    text_warnings,
)
from curriculum.data.held_out import eval_documents, first_eval_documents, measured_hashes, num_documents
from curriculum.data.packing import Bins, PackingFacts, find_packing, prepare_packing
from curriculum.data.prepare import find_tokenizer, prepare_store, prepare_tokenizer
from curriculum.data.split import Split, overlapping
from curriculum.data.store import Store, TokenView
from curriculum.data.tokenizers.tokenizer import Tokenizer
from curriculum.errors import FROM_WORKING_FOLDER, check_folder
from curriculum.model.presets import resolve_model
from evalsets.evalset import EvalSet, cut_windows
from phases.batches import TokenStream, epoch_tokens


@dataclass(frozen=True)
class Corpus:
    """The training data and the eval sets of a run.

    `streams`: what the data plan reads of each source, packed if the config says so.

    `details`, for each source: `tokens` and `documents` left for training; `kept_out_tokens`, held out or dropped;
    `dropped_documents`, counted for each eval set that contains them; `stream`, a hash of the stream's content;
    `tokens_per_epoch`; and `utilization`, the share of an epoch's slots that hold a token. If the source has documents
    without text, also `empty_documents`, their number. For conversations also `scored_share`, the share of the source's
    tokens, held-out ones included, that lie in answers.
    """

    tokenizer: Tokenizer
    streams: dict[str, TokenView | TokenStream | Bins]
    evalsets: dict[str, EvalSet]
    details: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]

    @property
    def tokens_per_epoch(self) -> dict[str, int]:
        """Slots of one epoch of each source, in whole sequences."""
        return {name: details["tokens_per_epoch"] for name, details in self.details.items()}


@dataclass(frozen=True)
class Sizes:
    """What is known of a corpus without preparing it; None for what is not prepared yet."""

    tokenizer: Tokenizer | None
    tokens_per_epoch: dict[str, int | None]
    evalset_tokens: dict[str, int | None]  # at most
    details: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]


def load_corpus(config: Config, store_dir: str | Path, tokenizer: Tokenizer | None = None) -> Corpus:
    """Prepare what is not prepared yet, and open everything. `tokenizer` replaces the config's.

    Raises InputError. A model vocabulary that does not fit the tokenizer is reported before any source is prepared.
    """
    check_folder("store_dir", store_dir)
    if tokenizer is None:
        tokenizer = prepare_tokenizer(config.tokenizer, config.sources, store_dir, config.chat)
    if config.model is not None:
        resolve_model(config.model, tokenizer.vocab_size)
    check_edges(config, tokenizer)
    stores = prepare_stores(config, tokenizer, store_dir)
    check_edges(config, tokenizer, stores.sources)
    kept, dropped = drop_evals(config, tokenizer, stores)
    evalsets = {name: _evalset(config, name, tokenizer, stores) for name in config.eval_sources}
    streams, details = {}, {}
    for name, store in stores.sources.items():
        stream = store.view(kept[name].keep_N, kept[name].cut)
        scored = store.scored_view(kept[name].keep_N, kept[name].cut)
        streams[name] = stream if scored is None else TokenStream(stream, tokenizer.eot, scored, tokenizer.bos)
        held, packing = _details(store, kept[name], dropped[name]), None
        if config.packing.mode == "best_fit" and held["tokens"]:
            tokens_N, opening = _kept_tokens(store, kept[name]), store.facts.opening_tokens
            packing, pieces, bins = prepare_packing(
                held["stream"], tokens_N, config.longest_seq_len, store_dir, opening
            )
            streams[name] = Bins(stream, tokenizer.eot, packing.block_tokens, pieces, bins, scored, tokenizer.bos)
        details[name] = held | _epoch(config, held, packing)
    return Corpus(
        tokenizer=tokenizer,
        streams=streams,
        evalsets=evalsets,
        details=details,
        warnings=(
            *overlap_warnings(dropped),
            *copies_warnings(stores, kept),
            *size_warnings(config, evalsets),
            *text_warnings(config, stores, tokenizer),
        ),
    )


def load_evalsets(
    config: Config, store_dir: str | Path, tokenizer: Tokenizer, names: Iterable[str]
) -> dict[str, EvalSet]:
    """Only the named eval sets, as `load_corpus` gives them; reads no source but those that they are held out of.

    Raises InputError naming the set if its text is missing.
    """
    check_folder("store_dir", store_dir)
    problems, sources, evalsets = [], {}, {}
    wanted = {name: config.eval_sources[name] for name in names}
    for name, evalset in wanted.items():
        held_out_of, own = evalset.held_out_of, evalset.own_source()
        source = config.sources[held_out_of] if own is None else own
        if source.is_missing:
            whose = f"source {held_out_of}, which it is held out of, " if own is None else ""
            missing = f"{whose}{source.path!r} is not there ({FROM_WORKING_FOLDER})"
            problems.append((place_of(name), f"{missing}; restore it, or measure other sets"))
        elif own is not None:
            evalsets[name] = prepare_store(place_of(name), own, tokenizer, store_dir, chat=config.chat)
        elif held_out_of not in sources:
            sources[held_out_of] = prepare_store(held_out_of, source, tokenizer, store_dir, chat=config.chat)
    if problems:
        raise config.error(problems)
    stores = split_stores(config, tokenizer, sources, evalsets)
    return {name: _evalset(config, name, tokenizer, stores) for name in wanted}


def find_evalsets(config: Config, store_dir: str | Path, tokenizer: Tokenizer) -> dict[str, EvalSet]:
    """The eval sets whose text is prepared already, as `load_corpus` gives them. Raises InputError."""
    stores = find_stores(config, tokenizer, store_dir)
    return {name: _evalset(config, name, tokenizer, stores) for name in stores.texts}


def find_trained_on(
    config: Config,
    names: Iterable[str],
    base: Config,
    streams: Mapping[str, str],
    store_dir: str | Path,
    tokenizer: Tokenizer,
    its_tokenizer: Tokenizer | None = None,
) -> tuple[dict[str, tuple[int, dict[str, int]]], list[str]]:
    """What a run was trained on of the eval sets of `config` with these names, as far as both are prepared here.

    `streams`: by source of the run's config, `base`, that it has read, its `stream` in `Corpus.details`.
    `its_tokenizer`: the run's, if it has another; texts are compared, not ids. Returns by eval set the number of
    documents that it measures, and by source how many of them are in its stream; and the sources whose text is no
    longer that, or is not prepared here.
    """
    its_tokenizer = its_tokenizer or tokenizer
    of_base = find_stores(base, its_tokenizer, store_dir)
    read = _hashes_read(base, streams, of_base, its_tokenizer)
    stores = find_stores(config, tokenizer, store_dir)
    found = {}
    for name in names:
        if name not in stores.texts:
            continue
        evalset, (store, split) = config.eval_sources[name], stores.texts[name]
        own = store.documents["hash"][split.held_out]
        tail = None if split.cut is None else divided_document(stores, evalset.held_out_of)
        if evalset.max_sequences is not None:
            own, measures_tail = measured_hashes(store, tokenizer, split, config.eval_seq_len, evalset.max_sequences)
            tail = tail if measures_tail else None
        counts = {source: int(overlapping(own, hashes).sum()) for source, hashes in read.items()}
        if tail is not None:
            for source, hashes in read.items():
                counts[source] += int(_reads_on(tail, hashes, divided_document(of_base, source)))
        num_documents = len(own) + (tail is not None)
        found[name] = num_documents, {source: count for source, count in counts.items() if count}
    return found, [name for name in streams if name not in read]


def _reads_on(tail: tuple[np.ndarray, int], read: np.ndarray, divided: tuple[np.ndarray, int] | None) -> bool:
    """Whether a run that reads documents with the hashes `read`, the last of which it may divide, reads of a tail."""
    document, first_token = tail
    if divided is not None and np.array_equal(document, divided[0]):
        return first_token < divided[1]
    return bool(overlapping(document, read).any())


def _hashes_read(
    config: Config, streams: Mapping[str, str], stores: Stores, tokenizer: Tokenizer
) -> dict[str, np.ndarray]:
    """The content hashes [N, 2] of the documents that training with `config` reads, by source.

    Those held out of a source, or dropped from it because an eval set of the config has them, are not read. Only of
    sources whose stream is the one in `streams`.
    """
    kept, dropped = drop_evals(config, tokenizer, stores)
    return {
        name: stores.sources[name].documents["hash"][kept[name].keep_N]
        for name, stream in streams.items()
        if name in kept and _details(stores.sources[name], kept[name], dropped[name])["stream"] == stream
    }


def find_sizes(config: Config, store_dir: str | Path, tokenizer: Tokenizer | None = None) -> Sizes:
    """The sizes of what is prepared already, from file times and stores; of other text only the first row is read.

    `tokenizer` replaces the config's. Raises InputError as `load_corpus` does, as far as is known.
    """
    check_folder("store_dir", store_dir)
    tokenizer = tokenizer or find_tokenizer(config.tokenizer, config.sources, store_dir, config.chat)
    stores = Stores({}, {}, {}, {})
    if tokenizer is not None:
        check_edges(config, tokenizer)
        stores = find_stores(config, tokenizer, store_dir)
        check_edges(config, tokenizer, stores.sources)
    kept, dropped = drop_evals(config, tokenizer, stores)
    check_unprepared(config, stores)
    details = {}
    for name, store in stores.sources.items():
        held, packing = _details(store, kept[name], dropped[name]), None
        if config.packing.mode == "best_fit" and held["tokens"]:
            packing = find_packing(held["stream"], config.longest_seq_len, store_dir)
        details[name] = held | _epoch(config, held, packing)
    evalset_tokens = {name: _evalset_tokens(config, name, stores) for name in config.eval_sources}
    warnings = (
        *overlap_warnings(dropped),
        *copies_warnings(stores, kept),
        *size_warnings_ahead(config, stores, tokenizer, evalset_tokens),
        *text_warnings(config, stores, tokenizer),
        *shared_file_warnings(config, stores),
    )
    if stores.sources and (missing := [name for name in own_sources(config) if name not in stores.evalsets]):
        warnings += (f"not prepared yet, so overlap with training is not counted: eval sets {', '.join(missing)}",)
    return Sizes(
        tokenizer=tokenizer,
        tokens_per_epoch={
            name: details[name]["tokens_per_epoch"] if name in details else None for name in config.sources
        },
        evalset_tokens=evalset_tokens,
        details=details,
        warnings=warnings,
    )


def _evalset_tokens(config: Config, name: str, stores: Stores) -> int | None:
    if name not in stores.texts:
        return None
    source, (store, split) = config.eval_sources[name], stores.texts[name]
    num_tokens = store.facts.num_tokens
    if source.held_out_of is not None:
        num_tokens -= len(store.view(split.keep_N, split.cut))
    if source.max_sequences is None:
        return num_tokens
    # No document is cut. The first by hash is measured whole, however long; the tail of a divided one may be it.
    first, lengths_N = 0, store.document_tokens_N[documents := split.held_out]
    if len(documents):
        first = int(lengths_N[store.documents["hash"][documents][:, 0].argmin()])
    if split.cut is not None:
        first = max(first, num_tokens - int(lengths_N.sum()))
    return min(num_tokens, max(first, source.max_sequences * config.eval_seq_len))


def _evalset(config: Config, name: str, tokenizer: Tokenizer, stores: Stores) -> EvalSet:
    source, (store, split) = config.eval_sources[name], stores.texts[name]
    if source.max_sequences is None:
        documents = list(eval_documents(store, tokenizer, split))
    else:
        documents = first_eval_documents(store, tokenizer, split, config.eval_seq_len, source.max_sequences)
    try:
        evalset = cut_windows(
            name,
            [document.tokens for document in documents],
            tokenizer.token_bytes_V,
            tokenizer.bos,
            config.eval_seq_len,
            source.max_sequences,
            np.array([document.hash for document in documents], np.uint64).reshape(-1, 2),
            [document.scored for document in documents],
            [document.num_bytes for document in documents],
        )
    except ValueError as error:
        raise config.error([(place_of(name), str(error))]) from None
    if source.max_sequences is not None:  # nor were the documents beyond it read
        evalset = replace(evalset, num_left_out=max(0, num_documents(store, split) - evalset.num_documents))
    return evalset


def _details(store: Store, split: Split, dropped: Mapping[str, int]) -> dict[str, Any]:
    stream = xxhash.xxh3_128()
    for part in (store.facts.content_hash, store.facts.tokenizer_fingerprint, split.cut):
        stream.update(repr(part).encode())
    stream.update(np.packbits(split.keep_N))
    num_tokens = len(store.view(split.keep_N, split.cut))
    scored = {}
    if store.facts.num_scored is not None:
        scored["scored_share"] = store.facts.num_scored / store.facts.num_tokens
    empty = {"empty_documents": store.facts.num_empty} if store.facts.num_empty else {}
    return {
        "tokens": num_tokens,
        "documents": int(split.keep_N.sum()),
        "kept_out_tokens": store.facts.num_tokens - num_tokens,
        "dropped_documents": dict(dropped),
        "stream": stream.hexdigest(),
        **empty,
        **scored,
    }


def _kept_tokens(store: Store, split: Split) -> np.ndarray:
    """Tokens of each document that training reads, in the order of its stream."""
    tokens_N = store.document_tokens_N.copy()
    if split.cut is not None:
        tokens_N[split.cut[0]] = split.cut[1]
    return tokens_N[split.keep_N]


def _epoch(config: Config, details: Mapping[str, Any], packing: PackingFacts | None) -> dict[str, Any]:
    """The size of an epoch of a source; None if it depends on a packing that is not made yet."""
    if config.packing.mode == "stream":
        return {"tokens_per_epoch": epoch_tokens(details["tokens"], config.longest_seq_len), "utilization": 1.0}
    if details["tokens"] == 0:  # nothing to pack; a schedule that draws from it is refused
        return {"tokens_per_epoch": 0, "utilization": 0.0}
    if packing is None:
        return {"tokens_per_epoch": None, "utilization": None}
    return {"tokens_per_epoch": packing.tokens_per_epoch, "utilization": packing.utilization}
