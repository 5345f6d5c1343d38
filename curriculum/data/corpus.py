"""All the data of a run: a training stream for each source, and the eval sets, which are kept out of the streams."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from curriculum.config import Config
from curriculum.data.chat import CHATML, CHATML_TURN
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
from curriculum.data.documents import empty_warnings, file_warnings
from curriculum.data.held_out import eval_documents, first_eval_documents, measured_hashes, num_first_windows
from curriculum.data.packing import Bins, PackingFacts, find_packing, prepare_packing
from curriculum.data.prepare import find_tokenizer, is_prepared, prepare_store, prepare_tokenizer
from curriculum.data.sources import SourceConfig, source_files
from curriculum.data.split import LARGEST_OVERLAP, Split, overlapping
from curriculum.data.store import Store, TokenView
from curriculum.data.tokenizers.chat_template import own_template
from curriculum.data.tokenizers.tokenizer import Tokenizer
from curriculum.errors import FROM_WORKING_FOLDER, check_folder
from curriculum.model.presets import resolve_model
from evalsets.evalset import EvalSet, cut_windows
from phases.batches import TokenStream, epoch_tokens

MANY_COPIES = 0.1  # share of the documents of a source


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
            *_overlap_warnings(dropped),
            *_copies_warnings(stores, kept),
            *size_warnings(config, evalsets),
            *_text_warnings(config, stores, tokenizer),
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
    warnings = _overlap_warnings(dropped) + (*_copies_warnings(stores, kept), *_foreseen(config, stores, tokenizer))
    warnings += (*_text_warnings(config, stores, tokenizer), *_shared_files(config, stores))
    if stores.sources and (missing := [name for name in own_sources(config) if name not in stores.evalsets]):
        warnings += (f"not prepared yet, so overlap with training is not counted: eval sets {', '.join(missing)}",)
    return Sizes(
        tokenizer=tokenizer,
        tokens_per_epoch={
            name: details[name]["tokens_per_epoch"] if name in details else None for name in config.sources
        },
        evalset_tokens={name: _evalset_tokens(config, name, stores) for name in config.eval_sources},
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
        evalset = replace(evalset, num_left_out=max(0, _num_documents(store, split) - evalset.num_documents))
    return evalset


def _num_documents(store: Store, split: Split) -> int:
    """How many documents with text to score a split holds out, the tail of a divided one included."""
    return int((store.documents["scored_bytes"][split.held_out] > 0).sum()) + (split.cut is not None)


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


def _overlap_warnings(dropped: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    return tuple(
        f"{count} document{'s' if count > 1 else ''} of {name} dropped from training: eval set {evalset} has them too"
        for name, counts in dropped.items()
        for evalset, count in counts.items()
    )


def _text_warnings(config: Config, stores: Stores, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    texts = _called(config.sources, own_sources(config))
    there = {place: source for place, source in texts.items() if not source.is_missing}
    warnings = empty_warnings(_called(stores.sources, stores.evalsets)) + file_warnings(there)
    has_turns = any(source.format == "messages" for source in texts.values())
    if has_turns and config.chat == CHATML and tokenizer is not None:
        if CHATML_TURN not in (own_template(tokenizer) or CHATML_TURN):
            warnings += (
                "conversations are written as ChatML, not by the chat template that the tokenizer brings along; to "
                "train on its turns, write them into the section chat",
            )
    return warnings


def _shared_files(config: Config, stores: Stores) -> Iterator[str]:
    """A warning for each eval set with files of a source, unless both are prepared, so that documents are counted."""
    root, files = cache(_root), cache(_real_files)  # asked for in each pair
    for evalset, own in own_sources(config).items():
        for name, source in config.sources.items():
            if evalset in stores.evalsets and name in stores.sources:
                continue
            one, other = root(own), root(source)
            if one is None or other is None or not (one.startswith(other) or other.startswith(one)):
                continue
            measured = files(own)
            if shared := measured & files(source):
                yield (
                    f"source {name} has {len(shared):,} of the {len(measured):,} files of eval set {evalset} too, such "
                    f"as {min(shared)}: their documents will be dropped from training, and refused if they are more "
                    f"than {LARGEST_OVERLAP:.0%} of the source's; leave them out there with glob, or move them"
                )


def _root(source: SourceConfig) -> str | None:
    """The real path of a source, with a separator at its end; None if that holds no text."""
    if source.path is None or source.is_missing or is_prepared(source):
        return None
    return os.path.join(os.path.realpath(source.local_path), "")


def _real_files(source: SourceConfig) -> set[str]:
    root = os.path.realpath(source.local_path)
    return {os.path.join(root, file.relative) for file in source_files(source)} if os.path.isdir(root) else {root}


def _called(of_sources: Mapping[str, Any], of_evalsets: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings in one, keyed by the names that warnings use."""
    called = {f"source {name}": item for name, item in of_sources.items()}
    return called | {f"eval set {name}": item for name, item in of_evalsets.items()}


def _copies_warnings(stores: Stores, kept: Mapping[str, Split]) -> Iterator[str]:
    """A warning for each source with many training documents that repeat others of it."""
    for name, split in kept.items():
        # 64 bits tell the documents of a source apart. np.unique would import a tenth of a plan's time.
        hashes_N = np.sort(stores.sources[name].documents["hash"][:, 0][split.keep_N])
        num_copies = int(np.count_nonzero(hashes_N[1:] == hashes_N[:-1]))
        if num_copies and num_copies >= MANY_COPIES * len(hashes_N):
            yield (
                f"source {name}: {num_copies:,} of {len(hashes_N):,} training documents are exact copies of others in "
                "it, so one epoch reads their text several times; remove the copies if that is not meant"
            )


def size_warnings(config: Config, evalsets: Mapping[str, EvalSet]) -> tuple[str, ...]:
    """A warning for each eval set of which `max_sequences`, as it cuts no document, takes too much or much too little.

    Too much if the first document alone has more windows; much too little if less than half as many are taken.
    """
    warnings = []
    for name, source in config.eval_sources.items():
        most = source.max_sequences
        if most is None or name not in evalsets:
            continue
        num_windows, left_out = evalsets[name].num_windows, evalsets[name].num_left_out
        if num_windows > most:
            warnings.append(_too_long(name, num_windows, most, left_out + 1))
        elif left_out and num_windows < most / 2:
            warnings.append(
                f"{place_of(name)} has {num_windows} of the {most} windows that its max_sequences allows: the "
                "next document has more than the rest, and max_sequences cuts none; raise it, or split long documents"
            )
    return tuple(warnings)


def _too_long(name: str, num_windows: int, most: int, num_documents: int) -> str:
    """The warning that the first document of an eval set alone has more windows than its `max_sequences`, `most`."""
    if num_documents == 1:
        told = f"has {num_windows} windows, more than its max_sequences of {most}, which cuts no document"
        return f"{place_of(name)} {told}: it is a single one; split it"
    first = f"the first alone has {num_windows} windows, more than max_sequences of {most}, which cuts none"
    fix = f"raise it well above {num_windows}, or split long documents"
    return f"{place_of(name)} measures 1 of its {num_documents:,} documents: {first}; {fix}"


def _foreseen(config: Config, stores: Stores, tokenizer: Tokenizer) -> Iterator[str]:
    """The warnings `_too_long` of the sets that are prepared, for which only the first document is read."""
    seq_len = config.eval_seq_len
    for name, source in config.eval_sources.items():
        most = source.max_sequences
        if most is None or name not in stores.texts or _evalset_tokens(config, name, stores) <= most * seq_len:
            continue
        store, split = stores.texts[name]
        num_windows = num_first_windows(store, tokenizer, split, seq_len)
        if num_windows > most:
            yield _too_long(name, num_windows, most, _num_documents(store, split))
