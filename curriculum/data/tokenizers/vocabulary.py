"""Where vocabularies come from: the characters of texts, byte pairs trained on them, published encodings."""

import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np

from curriculum.data.chat import ChatConfig, Template
from curriculum.data.pieces import parts_of, read_pieces
from curriculum.data.progress import ConsoleProgress, Progress
from curriculum.data.sources import SourceConfig
from curriculum.data.tokenizers.hf_definition import byte_level_letters
from curriculum.data.tokenizers.tokenizer import END_OF_TEXT, SMALLEST_BPE, Tokenizer, TokenizerConfig
from curriculum.errors import InputError, nearest

_TRAINING = "training a tokenizer"  # the name of a thread
TRAIN_BYTES = 1 << 27  # with more text `tokenizers` would hold over a gigabyte
# Each merge costs `tokenizers` the lengths of the stretches that it is made in. No word is as long, but a stretch of
# Chinese is a whole sentence or page. A multiple of 2, 3 and 4, the bytes of most letters.
LONGEST_STRETCH_BYTES = 1200


def make_tokenizer(config: TokenizerConfig, sources: list[SourceConfig], chat: ChatConfig) -> Tokenizer:
    """The tokenizer of a config of kind char, bpe or tiktoken that has no `path`."""
    if config.kind == "tiktoken":
        return tiktoken_tokenizer(config.name)
    if config.kind == "char":
        return char_tokenizer(piece.text for source in sources for piece in read_pieces(source, Template(chat)))
    progress = ConsoleProgress(f"training a tokenizer of {config.vocab_size:,} ids")
    return train_bpe(_sample(sources, TRAIN_BYTES, progress, chat), config.vocab_size)


def _sample(sources: list[SourceConfig], limit_bytes: int, progress: Progress, chat: ChatConfig) -> Iterator[str]:
    """Texts of all sources, up to a limit; the source that has given the fewest bytes is always next.

    They come in parts: of one long text `tokenizers` would hold eighty times its size.
    """

    def texts_of(source: SourceConfig) -> Iterator[str]:
        return (part for piece in read_pieces(source, Template(chat)) for part in parts_of(piece.text))

    readers = {i: texts_of(source) for i, source in enumerate(sources)}
    given_bytes = dict.fromkeys(readers, 0)
    while readers and sum(given_bytes.values()) < limit_bytes:
        turn = min(readers, key=lambda i: (given_bytes[i], i))
        text = next(readers[turn], None)
        if text is None:
            del readers[turn]
            continue
        given_bytes[turn] += len(text.encode())
        progress(sum(given_bytes.values()), None)
        yield text
    progress(sum(given_bytes.values()), sum(given_bytes.values()))


def char_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """The distinct characters of `texts` in code-point order, then end-of-text."""
    seen = np.zeros(0x110000, bool)
    for text in texts:
        seen[np.frombuffer(text.encode("utf-32-le"), "<u4")] = True
    characters = [chr(code).encode() for code in np.flatnonzero(seen)]
    return Tokenizer("char", (*characters, b""), {END_OF_TEXT: len(characters)})


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level byte pairs with the pattern of GPT-2, trained by `tokenizers`; end-of-text is the last id.

    Pairs are counted in parts of LONGEST_STRETCH_BYTES where the pattern cuts less often. The same texts give the same
    tokenizer. Raises InputError if they hold too few pairs to merge for `vocab_size`.
    """
    from tiktoken_ext.openai_public import r50k_pat_str
    from tokenizers import Tokenizer as Trained
    from tokenizers import models, pre_tokenizers, trainers

    letters = pre_tokenizers.ByteLevel.alphabet()
    trained = Trained(models.BPE())
    stretches = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cut = pre_tokenizers.FixedLength(length=LONGEST_STRETCH_BYTES)  # of letters that stand for bytes
    trained.pre_tokenizer = pre_tokenizers.Sequence([stretches, cut])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=letters, special_tokens=[], show_progress=False
    )
    _train(trained, texts, trainer)
    vocabulary = trained.get_vocab()
    possible = len(vocabulary) + 1
    if possible != vocab_size:
        raise InputError(
            f"tokenizer.vocab_size: got {vocab_size}, but the sources yield only {possible} (256 bytes, "
            f"{possible - SMALLEST_BPE} merges, end-of-text); set vocab_size: {possible}, or give more text"
        )
    byte_of_letter = byte_level_letters()
    tokens = [b""] * vocab_size
    for name, token_id in vocabulary.items():
        tokens[token_id] = bytes(byte_of_letter[letter] for letter in name)
    return Tokenizer("bpe", tuple(tokens), {END_OF_TEXT: vocab_size - 1}, r50k_pat_str)


def _train(trained: Any, texts: Iterable[str], trainer: Any) -> None:
    """Train in a thread, so that Ctrl-C ends the wait for it: all merges are one call, of up to half a minute.

    Raises what training raises. If the wait is ended, no more texts are read, but merges go on, as `is_training` tells.
    """
    done: Future[None] = Future()
    ended = threading.Event()

    def read() -> Iterator[str]:
        for text in texts:
            if ended.is_set():
                raise InterruptedError
            yield text

    def called() -> None:
        try:
            done.set_result(trained.train_from_iterator(read(), trainer))
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=called, name=_TRAINING, daemon=True)
    thread.start()
    try:
        done.result()
    except BaseException:
        ended.set()
        thread.join(0.1)  # until it no longer calls Python, which would crash an interpreter that ends
        raise


def is_training() -> bool:
    """Whether a thread still trains a tokenizer after its caller was interrupted."""
    return any(thread.name == _TRAINING for thread in threading.enumerate())


def check_tiktoken_name(name: str) -> None:
    """Raise InputError if tiktoken has no encoding of that name; nothing is fetched."""
    import tiktoken

    names = tiktoken.list_encoding_names()
    if name not in names:
        near = nearest(name, names)
        has = f"it has {', '.join(sorted(names))}"
        hint = f"did you mean {near!r}? ({has})" if near else has
        raise InputError(f"tokenizer.name: tiktoken has no {name!r}; {hint}")


def tiktoken_tokenizer(name: str) -> Tokenizer:
    """A published encoding, from tiktoken's cache or the network. Raises InputError without it or end-of-text."""
    import tiktoken

    check_tiktoken_name(name)
    try:
        encoding = tiktoken.get_encoding(name)
    except OSError as error:
        folder = os.environ.get("TIKTOKEN_CACHE_DIR")
        missing = f", and TIKTOKEN_CACHE_DIR ({folder}) does not hold it" if folder else ""
        raise InputError(
            f"tokenizer.name: tiktoken could not fetch {name!r} ({type(error).__name__}){missing}; it needs the network"
            " once. Without one, set TIKTOKEN_CACHE_DIR to a folder that was filled elsewhere by"
            f" `TIKTOKEN_CACHE_DIR=folder python -c \"import tiktoken; tiktoken.get_encoding('{name}')\"`, or"
            " give tokenizer.path, a folder where a run or `curriculum prepare` saved it"
        ) from error
    if END_OF_TEXT not in encoding._special_tokens:
        raise InputError(f"tokenizer.name: {name!r} has no {END_OF_TEXT}, which ends documents; choose another")
    tokens = [b""] * encoding.n_vocab
    for token, token_id in encoding._mergeable_ranks.items():
        tokens[token_id] = token
    return Tokenizer("tiktoken", tuple(tokens), dict(encoding._special_tokens), encoding._pat_str, name)
