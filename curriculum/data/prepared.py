"""Sources that are prepared folders, as `prepare_folder` writes them: used in place if they fit the run."""

from curriculum.data.chat import ChatConfig, Template
from curriculum.data.sources import SourceConfig
from curriculum.data.store import Store, is_store, open_store
from curriculum.data.tokenizers.tokenizer import Tokenizer
from curriculum.errors import InputError


def is_prepared(source: SourceConfig) -> bool:
    """Whether the `path` of a source is a prepared folder."""
    return source.path is not None and is_store(source.local_path)


def open_prepared(name: str, source: SourceConfig, tokenizer: Tokenizer, chat: ChatConfig) -> Store:
    """The store of a prepared folder.

    Raises InputError if the run's tokenizer, chat templates or format do not match the folder's, and if the source sets
    a key that says how text is read.
    """
    store = open_store(source.local_path)
    if store.facts.tokenizer_fingerprint != tokenizer.fingerprint:
        raise InputError(
            f"source {name!r}: {source.path} was prepared with tokenizer {store.facts.tokenizer_fingerprint}, the "
            f"run's is {tokenizer.fingerprint}; prepare it again, or set tokenizer.path to the tokenizer that it was "
            "prepared with"
        )
    for key in ("text_key", "glob"):
        if getattr(source, key) != getattr(SourceConfig, key):
            raise InputError(
                f"source {name!r}: {key} {getattr(source, key)!r} says how files are read, but {source.path} holds "
                f"tokens already; leave {key} out"
            )
    if source.format != "text" and store.facts.num_scored is None:
        raise InputError(
            f"source {name!r}: format {source.format}, but {source.path} was prepared from plain text, all of which "
            "is scored; prepare it from conversations, or leave format out"
        )
    if source.format == "text" and store.facts.num_scored is not None:
        raise InputError(
            f"source {name!r}: format text, but {source.path} was prepared from conversations, where only answers are "
            "scored; set format: messages or completion"
        )
    saved = store.facts.chat or {}  # empty if the folder holds text
    template = Template.of(chat, tokenizer.special_tokens).to_json()
    special = template.pop("special_tokens", None)
    for role, turn in template.items():
        if saved.get(role, turn) != turn:
            raise InputError(
                f"source {name!r}: chat.{role} is {turn!r}, but {source.path} was prepared with {saved[role]!r}; "
                f"set chat.{role} to that, or prepare it again"
            )
    if special is not None and source.format == "messages" and "special_tokens" not in saved:
        raise InputError(
            f"source {name!r}: {special} of the chat section stand for special tokens, but {source.path} was prepared "
            "with their names as ordinary text; prepare it again"
        )
    return store
