"""The stores of a config's sources and eval sets, and the part of each source that is left for training."""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from curriculum.config import Config
from curriculum.data.chat import NO_SPECIAL, Template
from curriculum.data.held_out import held_out_piece, split_store
from curriculum.data.packing import PackingConfig
from curriculum.data.pieces import check_beginning
from curriculum.data.prepare import find_store, is_prepared, prepare_store
from curriculum.data.sources import SourceConfig
from curriculum.data.split import Split, drop_overlap, parse_share
from curriculum.data.store import Store
from curriculum.data.tokenizers.tokenizer import Tokenizer
from evalsets.evalset import PRIMARY


class Stores(NamedTuple):
    """Open stores of a config. `splits` parts each source's text into training and held out, whatever the eval sets.

    `texts`: for each eval set the store that its documents are in, and the split that holds them out of it.
    """

    sources: dict[str, Store]
    evalsets: dict[str, Store]  # of the sets that have text of their own
    splits: dict[str, Split]
    texts: dict[str, tuple[Store, Split]]


def own_sources(config: Config) -> dict[str, SourceConfig]:
    """The text of each eval set that has text of its own, instead of being held out of a source."""
    sources = {name: evalset.own_source() for name, evalset in config.eval_sources.items()}
    return {name: source for name, source in sources.items() if source is not None}


def place_of(evalset: str) -> str:
    """The config's path of an eval set; its own text is prepared and reported under this name."""
    return "evalsets.primary" if evalset == PRIMARY else f"evalsets.sets.{evalset}"


def check_edges(config: Config, tokenizer: Tokenizer, stores: Mapping[str, Store] | None = None) -> None:
    """Raise InputError if special tokens within conversations of the sources would be taken for edges of documents.

    Or if other programs would find one that the template spells in another way. Before there are stores, of sources of
    format messages; with them, of all whose template was used.
    """
    if stores is None:
        used = any(source.format == "messages" for source in config.sources.values())
    else:
        marks = ((store.facts.chat or {}).get("special_tokens") for store in stores.values())
        used = any(mark not in (None, NO_SPECIAL) for mark in marks)
    if not used:
        return
    special = Template.of(config.chat, tokenizer.special_tokens).special
    if problems := [*_found_elsewhere(special, tokenizer), *_taken_for_edges(special, config.packing, tokenizer)]:
        raise config.error(problems)


def _found_elsewhere(special: Sequence[str], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Special tokens of a template that other programs would not find where it spells them."""
    if tokenizer.hf is None:
        return
    definition = tokenizer.hf.parsed.definition
    for token in definition["added_tokens"]:
        flags = [flag for flag in ("lstrip", "rstrip", "single_word") if token.get(flag)]
        if token.get("normalized") and definition["normalizer"]:
            flags.append("normalized")
        if flags and token["content"] in special:
            where = f"added token {token['content']!r} of the tokenizer has {' and '.join(flags)}"
            why = "other programs would find it elsewhere, or drop what stands beside it"
            yield "chat", f"{where}: {why}; set it to false there"


def _taken_for_edges(special: Sequence[str], packing: PackingConfig, tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Settings that would take special tokens within conversations for the edges of documents."""
    for name in special:
        token = tokenizer.special_tokens[name]
        if token not in (tokenizer.eot, tokenizer.bos):
            continue
        why = f"takes {name} for the edge of a document, which the chat section also spells within conversations"
        if packing.document_mask and packing.mode == "stream":
            yield "packing.document_mask", f"in mode stream {why}; use mode best_fit"
        if packing.mask_boundary_loss:
            yield "packing.mask_boundary_loss", f"{why}; leave it out"
        if not packing.train_on_eos and token == tokenizer.eot:
            yield "packing.train_on_eos", f"false {why}; leave it out"


def check_unprepared(config: Config, stores: Stores) -> None:
    """Raise InputError if preparing what is not in `stores` will be refused, as far as this is seen at once.

    That is in the first row of a source or eval set, and in an eval set that has the text of a source.
    """
    own = own_sources(config)
    for name, source in config.sources.items():
        if same := [evalset for evalset, text in own.items() if _text_read(text) == _text_read(source)]:
            several = f"eval set{'s' * (len(same) > 1)} {', '.join(map(repr, same))}"
            what = f"{source.location} is the text of {several} too, so nothing is left to train on"
            raise config.error([(f"sources.{name}", f"{what}; use held_out_of: {name} there, or name other text")])
    made = {*stores.sources, *map(place_of, stores.evalsets)}
    for name, source in {**config.sources, **{place_of(name): source for name, source in own.items()}}.items():
        if not (name in made or source.is_missing or source.is_flat or is_prepared(source)):
            check_beginning(source, Template(config.chat))


def _text_read(source: SourceConfig) -> tuple:
    """What is equal only for sources with the same documents."""
    path = None if source.path is None else os.path.realpath(source.local_path)
    return path, source.hf, source.glob, source.keys, source.format


def prepare_stores(config: Config, tokenizer: Tokenizer, store_dir: str | Path) -> Stores:
    """The stores of all sources and eval sets; builds those that do not exist. Raises InputError.

    Prepared folders are opened first, and eval sets come before sources, which take the longest: their errors are
    reported before the sources are read.
    """
    texts = {place_of(name): source for name, source in own_sources(config).items()} | config.sources
    in_turn = sorted(texts, key=lambda name: not is_prepared(texts[name]))
    made = {name: prepare_store(name, texts[name], tokenizer, store_dir, chat=config.chat) for name in in_turn}
    evalsets = {name: made[place_of(name)] for name in own_sources(config)}
    return split_stores(config, tokenizer, {name: made[name] for name in config.sources}, evalsets)


def find_stores(config: Config, tokenizer: Tokenizer, store_dir: str | Path) -> Stores:
    """What `prepare_stores` would give, without the stores that are not built yet."""

    def find(name: str, source: SourceConfig) -> Store | None:
        return None if source.is_missing else find_store(name, source, tokenizer, store_dir, config.chat)

    sources = {name: find(name, source) for name, source in config.sources.items()}
    evalsets = {name: find(place_of(name), source) for name, source in own_sources(config).items()}
    return split_stores(
        config,
        tokenizer,
        {name: store for name, store in sources.items() if store},
        {name: store for name, store in evalsets.items() if store},
    )


def split_stores(config: Config, tokenizer: Tokenizer, sources: dict[str, Store], evalsets: dict[str, Store]) -> Stores:
    """These open stores with the split of each source. Raises InputError naming the source that cannot be split."""
    splits = {}
    for name, store in sources.items():
        share = parse_share(config.sources[name].held_out)
        try:
            splits[name] = split_store(store, tokenizer, share, config.eval_seq_len if share else 1)
        except ValueError as error:
            raise config.error([(f"sources.{name}.held_out", str(error))]) from None
    texts = {}
    for name, evalset in config.eval_sources.items():
        if evalset.held_out_of in sources:
            texts[name] = sources[evalset.held_out_of], splits[evalset.held_out_of]
        elif name in evalsets:  # all of it is held out
            texts[name] = evalsets[name], Split(np.zeros(evalsets[name].facts.num_documents, bool))
    return Stores(sources, evalsets, splits, texts)


def divided_document(stores: Stores, source: str) -> tuple[np.ndarray, int] | None:
    """(content hash [1, 2], first token held out) of the document that the split of a source divides, if it does."""
    cut = stores.splits[source].cut
    return None if cut is None else (stores.sources[source].documents["hash"][cut[0] : cut[0] + 1], cut[1])


def drop_evals(
    config: Config, tokenizer: Tokenizer, stores: Stores
) -> tuple[dict[str, Split], dict[str, dict[str, int]]]:
    """(the split left for training, the number of documents dropped for each eval set), both by source."""
    hashes = {name: store.documents["hash"] for name, store in stores.evalsets.items()}
    divided = {}  # by eval set, the hash of the whole document whose tail it measures
    for name, (store, split) in stores.texts.items():
        if name in stores.evalsets:
            continue
        hashes[name] = store.documents["hash"][split.held_out]
        if (piece := held_out_piece(store, tokenizer, split)) is not None:
            hashes[name] = np.append(hashes[name], np.array([piece.hash], np.uint64), axis=0)
            divided[name], _ = divided_document(stores, config.eval_sources[name].held_out_of)
    kept, dropped = {}, {}
    for name, store in stores.sources.items():
        # A source trains on the head of its own divided document; other sources must not have that document.
        others = {e: h for e, h in divided.items() if config.eval_sources[e].held_out_of != name}
        seen = {e: np.append(h, others[e], axis=0) if e in others else h for e, h in hashes.items()}
        try:
            kept[name], counts = drop_overlap(stores.splits[name], store.documents["hash"], name, seen)
        except ValueError as error:
            raise config.error([(f"sources.{name}", str(error))]) from None
        dropped[name] = {evalset: count for evalset, count in counts.items() if count}
    return kept, dropped
