"""Warnings about the text of a run: overlap, copies, files that look like something else, eval sets cut short."""

import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np

from curriculum.config import Config
from curriculum.data.chat import CHATML, CHATML_TURN
from curriculum.data.config_stores import Stores, own_sources, place_of
from curriculum.data.documents import empty_warnings, file_warnings
from curriculum.data.held_out import num_documents, num_first_windows
from curriculum.data.prepare import is_prepared
from curriculum.data.sources import SourceConfig, source_files
from curriculum.data.split import LARGEST_OVERLAP, Split
from curriculum.data.tokenizers.chat_template import own_template
from curriculum.data.tokenizers.tokenizer import Tokenizer
from evalsets.evalset import EvalSet

MANY_COPIES = 0.1  # share of the documents of a source


def overlap_warnings(dropped: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    return tuple(
        f"{count} document{'s' if count > 1 else ''} of {name} dropped from training: eval set {evalset} has them too"
        for name, counts in dropped.items()
        for evalset, count in counts.items()
    )


def copies_warnings(stores: Stores, kept: Mapping[str, Split]) -> Iterator[str]:
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


def text_warnings(config: Config, stores: Stores, tokenizer: Tokenizer | None) -> tuple[str, ...]:
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


def _called(of_sources: Mapping[str, Any], of_evalsets: Mapping[str, Any]) -> dict[str, Any]:
    """Both mappings in one, keyed by the names that warnings use."""
    called = {f"source {name}": item for name, item in of_sources.items()}
    return called | {f"eval set {name}": item for name, item in of_evalsets.items()}


def shared_file_warnings(config: Config, stores: Stores) -> Iterator[str]:
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


def size_warnings_ahead(
    config: Config, stores: Stores, tokenizer: Tokenizer, most_tokens: Mapping[str, int | None]
) -> Iterator[str]:
    """The warnings `_too_long` of the sets that are prepared, of which only the first document is read.

    `most_tokens`: by set, an upper bound of its tokens.
    """
    seq_len = config.eval_seq_len
    for name, source in config.eval_sources.items():
        most = source.max_sequences
        if most is None or name not in stores.texts or most_tokens[name] <= most * seq_len:
            continue
        store, split = stores.texts[name]
        num_windows = num_first_windows(store, tokenizer, split, seq_len)
        if num_windows > most:
            yield _too_long(name, num_windows, most, num_documents(store, split))


def _too_long(name: str, num_windows: int, most: int, num_held_out: int) -> str:
    """The warning that the first document of an eval set alone has more windows than its `max_sequences`, `most`."""
    if num_held_out == 1:
        told = f"has {num_windows} windows, more than its max_sequences of {most}, which cuts no document"
        return f"{place_of(name)} {told}: it is a single one; split it"
    first = f"the first alone has {num_windows} windows, more than max_sequences of {most}, which cuts none"
    fix = f"raise it well above {num_windows}, or split long documents"
    return f"{place_of(name)} measures 1 of its {num_held_out:,} documents: {first}; {fix}"
