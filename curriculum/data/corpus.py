"""All the data of a run: a training stream a source, and the eval sets, kept apart from each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from curriculum.config import Config, EvalSource
from curriculum.data.documents import SourceConfig
from curriculum.data.prepare import find_store, find_tokenizer, prepare_store, prepare_tokenizer
from curriculum.data.progress import ConsoleProgress
from curriculum.data.split import Split, drop_overlap, parse_share
from curriculum.data.store import Store, TokenView, eval_documents, split_store
from curriculum.data.tokenizer import Tokenizer
from evalsets.evalset import EvalSet, cut_windows


@dataclass(frozen=True)
class Corpus:
    """What a run trains on and is measured by.

    `tokens` are the training streams by source; `details` say of each what it holds, what was held out and what
    was dropped because an eval set has it, with `stream`, a hash that names the stream's content.
    """

    tokenizer: Tokenizer
    tokens: dict[str, TokenView]
    evalsets: dict[str, EvalSet]
    details: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Sizes:
    """What is known of a corpus without preparing it; None where something is not prepared."""

    vocab_size: int | None
    num_tokens: dict[str, int | None]
    details: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]


def load_corpus(config: Config, store_dir: str | Path) -> Corpus:
    """Prepare what is not prepared yet, and open it all. Raises InputError."""
    tokenizer = prepare_tokenizer(config.tokenizer, config.sources, store_dir)
    stores = {
        name: prepare_store(name, source, tokenizer, store_dir, ConsoleProgress(f"preparing {name}"))
        for name, source in config.sources.items()
    }
    eval_stores = {
        name: prepare_store(f"eval-{name}", _as_source(s), tokenizer, store_dir, ConsoleProgress(f"preparing {name}"))
        for name, s in config.eval_sources.items()
        if s.held_out_of is None
    }
    splits, dropped = _split(config, tokenizer, stores, eval_stores)
    return Corpus(
        tokenizer=tokenizer,
        tokens={name: stores[name].view(splits[name].keep_N, splits[name].cut) for name in stores},
        evalsets={
            name: _evalset(config, name, source, tokenizer, stores, eval_stores, splits)
            for name, source in config.eval_sources.items()
        },
        details={name: _details(stores[name], splits[name], dropped[name]) for name in stores},
        warnings=_overlap_warnings(dropped),
    )


def find_sizes(config: Config, store_dir: str | Path) -> Sizes:
    """The sizes of what is prepared, by looking at file times and sidecars only."""
    tokenizer = find_tokenizer(config.tokenizer, config.sources, store_dir)
    found: dict[str, Store | None] = {
        name: tokenizer and find_store(name, source, tokenizer, store_dir) for name, source in config.sources.items()
    }
    eval_found = {
        name: tokenizer and find_store(f"eval-{name}", _as_source(source), tokenizer, store_dir)
        for name, source in config.eval_sources.items()
        if source.held_out_of is None
    }
    stores = {name: store for name, store in found.items() if store}
    eval_stores = {name: store for name, store in eval_found.items() if store}
    splits, dropped = _split(config, tokenizer, stores, eval_stores)
    details = {name: _details(stores[name], splits[name], dropped[name]) for name in stores}
    warnings = _overlap_warnings(dropped)
    if stores and (missing := [name for name, store in eval_found.items() if not store]):
        warnings += (f"not prepared yet, so overlap with training is not counted: eval sets {', '.join(missing)}",)
    return Sizes(
        vocab_size=tokenizer.vocab_size if tokenizer else None,
        num_tokens={name: details[name]["tokens"] if name in details else None for name in found},
        details=details,
        warnings=warnings,
    )


def _as_source(source: EvalSource) -> SourceConfig:
    return SourceConfig(path=source.path, hf=source.hf, text_key=source.text_key, glob=source.glob)


def _split(
    config: Config, tokenizer: Tokenizer, stores: Mapping[str, Store], eval_stores: Mapping[str, Store]
) -> tuple[dict[str, Split], dict[str, dict[str, int]]]:
    """(split, documents dropped by eval set) of each source: held-out text first, then what an eval set has."""
    splits = {}
    for name, store in stores.items():
        share = parse_share(config.sources[name].held_out)
        try:
            splits[name] = split_store(store, tokenizer, share, config.eval_seq_len if share else 1)
        except ValueError as error:
            raise config.error([(f"sources.{name}.held_out", str(error))]) from None
    hashes = {name: np.asarray(store.documents["hash"]) for name, store in eval_stores.items()}
    for name, source in config.eval_sources.items():
        if source.held_out_of in splits:
            held = splits[source.held_out_of].held_out
            hashes[name] = np.asarray(stores[source.held_out_of].documents["hash"])[held]
    dropped = {}
    for name, store in stores.items():
        splits[name], counts = drop_overlap(splits[name], store.documents["hash"], name, hashes)
        dropped[name] = {evalset: count for evalset, count in counts.items() if count}
    return splits, dropped


def _evalset(config, name, source, tokenizer, stores, eval_stores, splits) -> EvalSet:
    if source.held_out_of is not None:
        documents = list(eval_documents(stores[source.held_out_of], tokenizer, splits[source.held_out_of]))
    else:
        documents = list(eval_documents(eval_stores[name], tokenizer))
    try:
        return cut_windows(
            name,
            [document.tokens for document in documents],
            tokenizer.token_bytes_V,
            tokenizer.eot,
            config.eval_seq_len,
            source.max_sequences,
            np.array([document.hash for document in documents], np.uint64).reshape(-1, 2),
        )
    except ValueError as error:
        path = "evalsets.primary" if source is config.evalsets.primary else f"evalsets.sets.{name}"
        raise config.error([(path, str(error))]) from None


def _details(store: Store, split: Split, dropped: Mapping[str, int]) -> dict[str, Any]:
    stream = xxhash.xxh3_128()
    for part in (store.facts.content_hash, store.facts.tokenizer_fingerprint, split.cut):
        stream.update(repr(part).encode())
    stream.update(np.packbits(split.keep_N))
    num_tokens = len(store.view(split.keep_N, split.cut))
    return {
        "tokens": num_tokens,
        "documents": int(split.keep_N.sum()),
        "bytes": store.facts.num_bytes,
        "kept_out_tokens": store.facts.num_tokens - num_tokens,
        "dropped_documents": dict(dropped),
        "stream": stream.hexdigest(),
    }


def _overlap_warnings(dropped: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    return tuple(
        f"{count} document{'s' if count > 1 else ''} of {name} dropped from training: eval set {evalset} has them too"
        for name, counts in dropped.items()
        for evalset, count in counts.items()
    )
