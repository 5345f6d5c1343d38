"""Build tokenizers and token stores from sources, once; later they are found by the sources' file sizes and times.

Everything lies under one folder, in <store_dir>/tokenizers/<kind>-<key> and <store_dir>/stores/<name>-<key>. The keys
depend on the content of the sources and on the tokenizer; <name> is that of the first source with this content. A
source that already holds tokens (a flat .bin, a prepared folder) is used in place.

Memory does not grow with the source: a bounded number of text groups is in flight (`encode_pieces`), the index of
documents is written record by record, and a tokenizer is trained on at most TRAIN_BYTES of text.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from curriculum.data.cache import build_once, content_of, digest, find_content, is_there, source_signature, writing
from curriculum.data.chat import CHATML, RENDERING_VERSION, ChatConfig, Template
from curriculum.data.documents import documents_of, given_documents, write_store
from curriculum.data.flat import index_flat
from curriculum.data.pieces import check_rows
from curriculum.data.progress import ConsoleProgress, Progress
from curriculum.data.sources import SourceConfig, source_files, would_read
from curriculum.data.store import FORMAT_VERSION as STORE_VERSION
from curriculum.data.store import OPENED_VERSION, SIDECAR_NAME, Store, is_store, open_store
from curriculum.data.tokenizers.tokenizer import FORMAT_VERSION as TOKENIZER_VERSION
from curriculum.data.tokenizers.tokenizer import Tokenizer, TokenizerConfig, byte_tokenizer, load_tokenizer
from curriculum.data.tokenizers.vocabulary import check_tiktoken_name, make_tokenizer
from curriculum.disk.durable import clear_killed, rename_whole, scratch
from curriculum.errors import InputError, check_folder, type_name

# --- tokenizers ---------------------------------------------------------------------------------------------


def find_tokenizer(
    config: TokenizerConfig, sources: dict[str, SourceConfig], store_dir: str | Path, chat: ChatConfig = CHATML
) -> Tokenizer | None:
    """The tokenizer that `prepare_tokenizer` would give; None if it is not made yet.

    Looks only at the sizes and times of the sources' files, and imports no tokenizer library, unless tiktoken has to be
    asked for a name that it may not have. Raises InputError as `prepare_tokenizer` does, as far as is known.
    """
    if config.kind == "byte" or config.path is not None:
        return prepare_tokenizer(config, sources, store_dir, chat)
    store_dir = Path(store_dir)
    ordered = _in_order_of_content(config, sources, chat, lambda name, source: find_content(source, store_dir))
    if ordered is None:
        return None
    directory = _tokenizer_directory(config, ordered, store_dir)
    if is_there(directory):
        return _checked(config, load_tokenizer(directory))
    if config.kind == "tiktoken":
        check_tiktoken_name(config.name)
    return None


def prepare_tokenizer(
    config: TokenizerConfig, sources: dict[str, SourceConfig], store_dir: str | Path, chat: ChatConfig = CHATML
) -> Tokenizer:
    """The tokenizer of a run: made from the sources, fetched or loaded, and kept under `store_dir`.

    Conversations count as the text that `chat` renders, so that a char tokenizer knows the template.

    Raises InputError if the tokenizer cannot be made or loaded, or has another kind or vocab_size than the config.
    """
    store_dir = Path(store_dir)
    if config.kind == "byte":
        tokenizer = byte_tokenizer()
    elif config.path is not None:
        try:
            tokenizer = load_tokenizer(os.path.expanduser(config.path))
        except InputError as error:
            raise InputError(f"tokenizer.path: {error}") from error
    else:
        ordered = _in_order_of_content(config, sources, chat, lambda name, source: _content(name, source, store_dir))
        directory = _tokenizer_directory(config, ordered, store_dir)

        def write(folder: Path) -> None:
            make_tokenizer(config, list(ordered.values()), chat).save(folder)
            for (content, *_), source in ordered.items():
                if find_content(source, store_dir) != content:
                    raise _changed(source, "tokenizer: ")

        build_once(directory, store_dir, write)
        tokenizer = load_tokenizer(directory)
    return _checked(config, tokenizer)


def _in_order_of_content(
    config: TokenizerConfig,
    sources: dict[str, SourceConfig],
    chat: ChatConfig,
    content: Callable[[str, SourceConfig], str | None],
) -> dict[tuple, SourceConfig] | None:
    """The sources of a tokenizer by content key and `_reading`, whatever their names; None if a key is unknown."""
    if config.kind == "tiktoken":
        return {}
    if not sources:
        raise InputError(f"tokenizer: kind {config.kind} is built from the sources, but there are none")
    by_content = {}
    for name, source in sources.items():
        if source.is_flat or is_prepared(source):
            raise InputError(
                f"source {name!r}: {source.location} holds token ids, not text; a {config.kind} tokenizer is built "
                "from text: set tokenizer.path to the folder of the tokenizer that made the ids"
            )
        known = content(name, source)
        if known is None:
            return None
        by_content[known, *_reading(source, chat)] = source
    return dict(sorted(by_content.items(), key=lambda item: item[0]))


def _reading(source: SourceConfig, chat: ChatConfig) -> tuple:
    """What determines a source's text and its scored part, besides the content of its files."""
    return source.keys if source.format == "text" else (*source.keys, source.format, astuple(chat), RENDERING_VERSION)


def _tokenizer_directory(config: TokenizerConfig, ordered: dict[tuple, SourceConfig], store_dir: Path) -> Path:
    key = digest(TOKENIZER_VERSION, config.kind, config.name, config.vocab_size, list(ordered))
    return store_dir / "tokenizers" / f"{config.kind}-{key[:16]}"


def _checked(config: TokenizerConfig, tokenizer: Tokenizer) -> Tokenizer:
    pairs = ("bpe", "tiktoken")
    if tokenizer.kind != config.kind and not (tokenizer.kind in pairs and config.kind in pairs):
        raise InputError(
            f"tokenizer.path: {config.path} holds a tokenizer of kind {tokenizer.kind}; expected"
            f" {config.kind}: set tokenizer.kind: {tokenizer.kind}"
        )
    if config.vocab_size not in (None, tokenizer.vocab_size):
        raise InputError(
            f"tokenizer.vocab_size: {config.vocab_size}; this {tokenizer.kind} tokenizer has"
            f" {tokenizer.vocab_size} ids: leave vocab_size out or set it to {tokenizer.vocab_size}"
        )
    return tokenizer


def find_store(
    name: str, source: SourceConfig, tokenizer: Tokenizer, store_dir: str | Path, chat: ChatConfig = CHATML
) -> Store | None:
    """The store that `prepare_store` would give, found by files' sizes and times; None if it is not made yet.

    Raises InputError for a prepared folder that does not fit the run, for plain text among rows, and for a store whose
    sidecar or file sizes are wrong. The content of the files is not checked.
    """
    if is_prepared(source):
        return open_prepared(name, source, tokenizer, chat)
    if source.text_key is not None and source.path is not None:
        # `text_key: text` has the key of a source without text_key, whose store may include plain-text files.
        check_rows(source, source_files(source))
    content = find_content(source, Path(store_dir))
    if content is None:
        return None
    directory = _store_directory(name, source, tokenizer, Path(store_dir), content, chat)
    return open_store(directory) if is_there(directory) else None


def prepare_store(
    name: str,
    source: SourceConfig,
    tokenizer: Tokenizer,
    store_dir: str | Path,
    progress: Progress | None = None,
    chat: ChatConfig = CHATML,
) -> Store:
    """The token store of a source: opened if it exists, built if it does not or if the content changed.

    `chat` renders the conversations of a source that holds some; another template gives another store. `progress`: by
    default what takes long is shown on the console. Any number of processes may call this at once: one builds the store
    and the others wait. Raises InputError for a source that cannot be read or encoded. Nothing half-written is left.
    """
    found = find_store(name, source, tokenizer, store_dir, chat)
    store_dir = Path(store_dir)
    if found is not None:
        return _verified(found, store_dir)
    content = _content(name, source, store_dir)
    directory = _store_directory(name, source, tokenizer, store_dir, content, chat)
    progress = progress or ConsoleProgress(f"preparing {name}")

    def write(folder: Path) -> None:
        signature = source_signature(source)
        if source.is_flat:
            index_flat(source, tokenizer, folder, progress)
        else:
            write_store(
                folder, documents_of([source], Template.of(chat, tokenizer.special_tokens)), tokenizer, progress
            )
        if source_signature(source) != signature or find_content(source, store_dir) != content:
            raise _changed(source, f"source {name!r}: ")

    build_once(directory, store_dir, write)
    return _verified(open_store(directory), store_dir)


def _content(name: str, source: SourceConfig, store_dir: Path) -> str:
    """`content_of`; raises InputError if files of the store folder would be read as part of the source."""
    if any(would_read(source, store_dir / path) for path in ("contents/x", f"stores/x/{SIDECAR_NAME}")):
        raise InputError(
            f"source {name!r}: the store folder {store_dir} lies in {source.location}, so prepared files would be "
            "read as text; choose another with --store-dir (store_dir=), or leave it out with the source's glob:"
        )
    return content_of(name, source, store_dir)


def _changed(source: SourceConfig, whose: str = "") -> InputError:
    return InputError(f"{whose}{source.location} changed while it was prepared; start again when it is complete")


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


def prepare_folder(
    texts: list[str],
    tokenizer: Tokenizer,
    output_dir: str | Path,
    text_key: str | None = None,
    progress: Progress | None = None,
    *,
    format: str = "text",
) -> Store:
    """Tokenize files and folders of text into a new folder, which can be the `path` of a source and of a tokenizer.

    `format` and `text_key` are those of a source; conversations are rendered as ChatML. Raises InputError if the output
    folder is not empty, is the working folder or lies in one of the texts, and if a text cannot be read or encoded or
    changes meanwhile.
    """
    _check_new(output_dir)
    try:
        sources = [SourceConfig(path=str(path), format=format, text_key=text_key) for path in texts]
    except ValueError as error:
        raise InputError(f"text: {error}") from None
    for source in sources:
        if would_read(source, Path(output_dir) / SIDECAR_NAME):
            raise InputError(
                f"{output_dir}: the output lies in {source.location} and would be read as text; name a new folder "
                "outside it"
            )
    signatures = [source_signature(source) for source in sources]
    template = Template.of(CHATML, tokenizer.special_tokens)

    def write(folder: Path) -> None:
        write_store(folder, documents_of(sources, template), tokenizer, progress)
        for source, signature in zip(sources, signatures, strict=True):
            if source_signature(source) != signature:
                raise _changed(source)

    return _write_folder(output_dir, tokenizer, write)


def prepare_documents(
    documents: Iterable[str] | Iterable[list[dict]],
    tokenizer: Tokenizer,
    output_dir: str | Path,
    *,
    chat: ChatConfig | None = None,
    progress: Progress | None = None,
) -> Store:
    """Tokenize documents from any iterator into a new folder, as `prepare_folder` does.

    Without `chat` a document is a text. With `chat` it is a conversation, a list of {"role", "content"} messages, which
    `chat` renders and of which the answers are scored. The iterator is read once and its documents are not kept. Raises
    InputError naming the document (counted from 1) if it is not of this kind, if the iterator raises OSError, and as
    `prepare_folder` does. Nothing half-written is left.
    """
    if not isinstance(tokenizer, Tokenizer):
        raise InputError(
            f"tokenizer: {type_name(tokenizer)}; expected a Tokenizer, such as byte_tokenizer() or "
            "load_tokenizer(folder)"
        )
    given = given_documents(documents, None if chat is None else Template.of(chat, tokenizer.special_tokens))
    _check_new(output_dir)
    return _write_folder(output_dir, tokenizer, lambda folder: write_store(folder, given, tokenizer, progress))


def _check_new(output_dir: str | Path) -> None:
    check_folder("--output", output_dir)
    output_dir = Path(output_dir)
    with writing(output_dir):
        if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
            fix = "name a new folder with --output (in Python output_dir), or delete this one first"
            raise InputError(f"{output_dir}: exists already; {fix}")
        if output_dir.exists() and os.path.samefile(output_dir, os.curdir):  # it is replaced once all is written
            raise InputError(f"{output_dir}: is the working folder; name a new folder for the output")


def _write_folder(output_dir: str | Path, tokenizer: Tokenizer, write: Callable[[Path], None]) -> Store:
    """A new folder with the tokenizer and the store that `write` puts there; where a link leads to, if it is one."""
    output_dir = Path(output_dir)
    output_dir = Path(os.path.realpath(output_dir)) if output_dir.is_symlink() else output_dir
    place = output_dir.parent
    with writing(output_dir):
        place.mkdir(parents=True, exist_ok=True)
        clear_killed(place, output_dir)
        with scratch(place, output_dir) as folder:
            tokenizer.save(folder)
            write(folder)
            _check_new(output_dir)  # another process may have written it meanwhile
            rename_whole(folder, output_dir)
    return open_store(output_dir)


def _verified(store: Store, store_dir: Path) -> Store:
    """The store, with its files checked against their checksums, unless they were since they last changed."""
    known = store_dir / "verified" / source_signature(SourceConfig(path=str(store.directory)))
    if not is_there(known):
        store.verify()
        with suppress(OSError):  # a read-only store folder: they are checked again next time
            known.parent.mkdir(parents=True, exist_ok=True)
            known.touch()
    return store


def _store_directory(
    name: str, source: SourceConfig, tokenizer: Tokenizer, store_dir: Path, content: str, chat: ChatConfig
) -> Path:
    # The store of a flat file points to where the file lies, which is therefore part of the key.
    place = os.path.realpath(source.local_path) if source.is_flat else None
    version = OPENED_VERSION if tokenizer.has_own_bos else STORE_VERSION
    reading = _reading(source, chat)
    if source.format != "text" and (special := Template.of(chat, tokenizer.special_tokens).special):
        reading = *reading, special
    key = digest(version, content, tokenizer.fingerprint, *reading, source.dtype, place)
    directory = store_dir / "stores" / f"{name}-{key[:16]}"
    if is_there(directory):
        return directory
    # The name is for people: a store with this key serves any source or eval set, under whatever name it was made.
    others = sorted(directory.parent.glob(f"*-{key[:16]}"))
    return next(filter(is_store, others), directory)
