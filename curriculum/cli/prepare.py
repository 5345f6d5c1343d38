"""`curriculum prepare`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from curriculum.cli.options import config_options, print_json
from curriculum.errors import InputError
from curriculum.record.wording import counted

if TYPE_CHECKING:
    from curriculum.config import Config
    from curriculum.data.corpus import Corpus


@click.command()
@config_options(config_required=False)
@click.option("--text", "texts", metavar="PATH", multiple=True, help="A file or folder of text; repeatable.")
@click.option(
    "--format",
    "text_format",
    type=click.Choice(["text", "messages", "completion"]),
    help="What a row of --text holds: a text, or a conversation, which ChatML renders.",
)
@click.option("--text-key", metavar="KEY", help="Key or column of the text or the messages.")
@click.option("--tokenizer", metavar="T", help="byte, the name of a tiktoken encoding (gpt2), or a tokenizer's folder.")
@click.option("--output", metavar="DIR", help="A new folder for the tokenizer and the tokens.")
@click.option("--json", "as_json", is_flag=True, help="Print what was prepared as JSON.")
def command(config_path, changes, store_dir, texts, text_format, text_key, tokenizer, output, as_json):
    """Turn the sources and eval sets of CONFIG into token stores; `train` does the same on first use.

    Without CONFIG: turn the --text into one folder of tokens that the `path` of a source accepts.
    """
    if (config_path is None) == (not texts):
        raise InputError("prepare: expected either CONFIG, or --text PATH with --tokenizer and --output")
    if config_path is not None and (tokenizer or output):
        raise InputError("prepare: --tokenizer and --output go with --text; the stores of CONFIG go to --store-dir")
    if config_path is not None and (text_format or text_key):
        raise InputError("prepare: --format and --text-key go with --text; in CONFIG they are keys of each source")
    if config_path is None:
        if any(changes.values()):
            options = "--set, --dataset-dir, --eval-dataset-dir, --init-from and --keep-optimizer"
            raise InputError(f"prepare: {options} go with CONFIG, not with --text")
        if tokenizer is None or output is None:
            raise InputError("prepare: --text needs --tokenizer T and --output DIR")
        _prepare_folder(texts, text_format or "text", text_key, tokenizer, output, as_json)
        return

    from curriculum.config import load_config
    from curriculum.data.corpus import load_corpus
    from curriculum.plan_warnings import evalset_warnings, much_held_out
    from curriculum.scheduling import check_schedule

    config = load_config(config_path, **changes)
    check_schedule(config)
    corpus = load_corpus(config, store_dir)
    held_out = much_held_out(config, corpus.details)
    warnings = [*corpus.warnings, *held_out, *evalset_warnings(corpus.evalsets.values())]
    if as_json:
        print_json({**_facts(corpus), "warnings": warnings})
    else:
        _tell(corpus, config)
        _warn(warnings)


def _facts(corpus: Corpus) -> dict[str, Any]:
    """The tokenizer, the `details` of each source, and the sizes of each eval set, by its name in the config."""
    tokenizer = corpus.tokenizer
    return {
        "tokenizer": {"kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint},
        "sources": corpus.details,
        "evalsets": {
            name: {
                "documents": evalset.num_documents,
                "windows": evalset.num_windows,
                "tokens": evalset.num_tokens,
                "bytes": evalset.num_bytes,
                "content_hash": evalset.content_hash,
            }
            for name, evalset in corpus.evalsets.items()
        },
    }


def _warn(warnings: Iterable[str]) -> None:
    for warning in warnings:
        click.echo(f"warning: {warning}")


def _tell(corpus: Corpus, config: Config) -> None:
    from curriculum.record.events import record_name

    click.echo(f"tokenizer {config.tokenizer.kind}: {corpus.tokenizer.vocab_size:,} ids")
    for name, details in corpus.details.items():
        empty = _empty(details.get("empty_documents", 0))
        kept_out = f", {details['kept_out_tokens']:,} tokens kept out" if details["kept_out_tokens"] else ""
        packed = ""
        if config.packing.mode == "best_fit":
            num_bins = details["tokens_per_epoch"] // config.longest_seq_len
            packed = f", packed into {counted(num_bins, 'bin')}, {details['utilization']:.2%} full"
        scored = f", {details['scored_share']:.2%} scored" if "scored_share" in details else ""
        counts = f"{counted(details['documents'], 'document')}, {counted(details['tokens'], 'token')}"
        click.echo(f"source {name}: {counts}{empty}{scored}{kept_out}{packed}")
    for name, evalset in corpus.evalsets.items():
        click.echo(
            f"eval set {record_name(name)}: {counted(evalset.num_documents, 'document')}, "
            f"{counted(evalset.num_windows, 'window')}, {counted(evalset.num_tokens, 'token')}"
        )


def _empty(num_empty: int) -> str:
    """How many empty documents were left out, to append to the line of their source."""
    return f", {counted(num_empty, 'empty document')} left out" if num_empty else ""


def _prepare_folder(texts, text_format: str, text_key: str | None, tokenizer: str, output: str, as_json: bool) -> None:
    from curriculum.data.documents import empty_warnings, file_warnings
    from curriculum.data.prepare import prepare_folder
    from curriculum.data.progress import ConsoleProgress
    from curriculum.data.sources import SourceConfig
    from curriculum.data.tokenizers.tokenizer import byte_tokenizer, load_tokenizer
    from curriculum.data.tokenizers.vocabulary import tiktoken_tokenizer

    if tokenizer == "byte":
        chosen = byte_tokenizer()
    elif os.path.isdir(tokenizer):
        chosen = load_tokenizer(tokenizer)
    else:
        chosen = tiktoken_tokenizer(tokenizer)
    store = prepare_folder(list(texts), chosen, output, text_key, progress=ConsoleProgress(output), format=text_format)
    facts = store.facts
    sources = {text: SourceConfig(path=text, format=text_format, text_key=text_key) for text in texts}
    warnings = [*empty_warnings({output: store}), *file_warnings(sources)]
    if as_json:
        scored = {} if facts.num_scored is None else {"scored_share": facts.num_scored / facts.num_tokens}
        counts = {"documents": facts.num_documents, "tokens": facts.num_tokens, "empty_documents": facts.num_empty}
        print_json({"output": output, "dtype": facts.dtype, **counts, **scored, "warnings": warnings})
        return
    scored = "" if facts.num_scored is None else f", {facts.num_scored / facts.num_tokens:.2%} scored"
    counts = f"{counted(facts.num_documents, 'document')}, {counted(facts.num_tokens, 'token')} of {facts.dtype}"
    click.echo(f"{output}: {counts}{_empty(facts.num_empty)}{scored}")
    _warn(warnings)
