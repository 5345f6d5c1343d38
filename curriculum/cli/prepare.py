"""`curriculum prepare`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from curriculum.cli.options import config_options
from curriculum.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from curriculum.data.store import Store

MANY_EMPTY = 0.1  # of the documents of a source; fewer may be stray blank rows


@click.command()
@config_options(config_required=False)
@click.option("--text", "texts", metavar="PATH", multiple=True, help="A file or folder of text; repeatable.")
@click.option(
    "--format",
    "text_format",
    type=click.Choice(["text", "messages", "completion"]),
    help="What a row of the --text is: a text, or a conversation, which ChatML renders.",
)
@click.option("--text-key", metavar="KEY", help="The key or column of the text or of the messages.")
@click.option("--tokenizer", metavar="T", help="byte, the name of a tiktoken encoding (gpt2), or a tokenizer's folder.")
@click.option("--output", metavar="DIR", help="A new folder for the tokenizer and the tokens.")
def command(config_path, changes, store_dir, texts, text_format, text_key, tokenizer, output):
    """Turn the sources and eval sets of CONFIG into token stores; `train` does the same on first use.

    Without CONFIG: turn the --text into one folder of tokens that the `path` of a source accepts.
    """
    if (config_path is None) == (not texts):
        raise InputError("prepare: expected either CONFIG, or --text PATH with --tokenizer and --output")
    if config_path is not None and (tokenizer or output):
        raise InputError("prepare: --tokenizer and --output go with --text; the stores of CONFIG lie in --store-dir")
    if config_path is not None and (text_format or text_key):
        raise InputError("prepare: --format and --text-key go with --text; in CONFIG they are keys of each source")
    if config_path is None:
        if any(changes.values()):
            options = "--set, --dataset-dir, --eval-dataset-dir, --init-from and --keep-optimizer"
            raise InputError(f"prepare: {options} go with CONFIG, not with --text")
        if tokenizer is None or output is None:
            raise InputError("prepare: --text needs --tokenizer T and --output DIR")
        _prepare_folder(texts, text_format or "text", text_key, tokenizer, output)
        return

    from curriculum.config import load_config
    from curriculum.data.corpus import load_corpus
    from curriculum.data.prepare import find_store
    from curriculum.scheduling import check_schedule

    config = load_config(config_path, **changes)
    check_schedule(config)
    corpus = load_corpus(config, store_dir)
    click.echo(f"tokenizer {config.tokenizer.kind}: {corpus.tokenizer.vocab_size:,} ids")
    texts = {f"source {name}": (name, source) for name, source in config.sources.items()}
    texts |= {f"eval set {name}": (name, own) for name, e in config.eval_sources.items() if (own := e.own_source())}
    stores = {
        place: find_store(name, source, corpus.tokenizer, store_dir, config.chat)
        for place, (name, source) in texts.items()
    }
    for name, details in corpus.details.items():
        empty = _empty(stores[f"source {name}"])
        kept_out = f", {details['kept_out_tokens']:,} tokens kept out" if details["kept_out_tokens"] else ""
        packed = ""
        if config.packing.mode == "best_fit":
            num_bins = details["tokens_per_epoch"] // config.longest_seq_len
            packed = f", packed into {num_bins:,} bins, {details['utilization']:.2%} full"
        scored = f", {details['scored_share']:.2%} scored" if "scored_share" in details else ""
        counts = f"{details['documents']:,} documents, {details['tokens']:,} tokens"
        click.echo(f"source {name}: {counts}{empty}{scored}{kept_out}{packed}")
    for name, evalset in corpus.evalsets.items():
        click.echo(
            f"eval set {name}: {evalset.num_documents:,} documents, {evalset.num_windows:,} windows, "
            f"{evalset.num_tokens:,} tokens{_empty(stores.get(f'eval set {name}'))}"
        )
    for warning in (*corpus.warnings, *_many_empty(stores)):
        click.echo(f"warning: {warning}")


def _empty(store: Store | None) -> str:
    """What was left out of a store, as its line says it."""
    return f", {store.facts.num_empty:,} empty documents left out" if store and store.facts.num_empty else ""


def _many_empty(stores: Mapping[str, Store | None]) -> Iterator[str]:
    """A warning for each store of whose documents a large part was left out."""
    for place, store in stores.items():
        empty = store.facts.num_empty if store else 0
        if empty and empty >= MANY_EMPTY * (num_all := empty + store.facts.num_documents):
            share = f"{empty:,} of {num_all:,} documents are empty ({empty / num_all:.0%})"
            yield f"{place}: {share}; does the text lie in another key or column? name it with text_key"


def _prepare_folder(texts, text_format: str, text_key: str | None, tokenizer: str, output: str) -> None:
    from pathlib import Path

    from curriculum.data.prepare import prepare_folder
    from curriculum.data.progress import ConsoleProgress
    from curriculum.data.tokenizers.tokenizer import byte_tokenizer, load_tokenizer
    from curriculum.data.tokenizers.vocabulary import tiktoken_tokenizer

    if tokenizer == "byte":
        chosen = byte_tokenizer()
    elif Path(tokenizer).is_dir():
        chosen = load_tokenizer(tokenizer)
    else:
        chosen = tiktoken_tokenizer(tokenizer)
    store = prepare_folder(list(texts), chosen, output, text_key, progress=ConsoleProgress(output), format=text_format)
    facts = store.facts
    scored = "" if facts.num_scored is None else f", {facts.num_scored / facts.num_tokens:.2%} scored"
    counts = f"{facts.num_documents:,} documents, {facts.num_tokens:,} tokens of {facts.dtype}"
    click.echo(f"{output}: {counts}{_empty(store)}{scored}")
    for warning in _many_empty({output: store}):
        click.echo(f"warning: {warning}")
