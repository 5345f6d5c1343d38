"""The parts of a Hugging Face tokenizer that determine its ids, and encoding with the `tokenizers` library."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from curriculum.errors import InputError

DEFINITION_NAME = "tokenizer.json"
BLANK = "\u2581"  # stands for a space in vocabularies made by SentencePiece
_UNTYPABLE = "\U0010ffff"  # put before the name of a special piece, which unigram would otherwise find in text

LARGEST_VOCAB = 1 << 24  # a saved tokenizer with more ids is taken for damaged
# Matches a pattern that matches a single character or none: any other may match more than it is replaced by.
_ONE_CHARACTER = re.compile(r"\\[pP]\{\^?\w+\}|\[(\\.|[^\[\]\\])+\]|\\[^RX]|[^\\]", re.DOTALL)
# Components that drop no text.
_LOSSLESS = {
    "normalizer": "Sequence NFC NFD NFKC NFKD Lowercase Prepend Replace ByteLevel Precompiled".split(),
    "pre_tokenizer": "Sequence ByteLevel Metaspace Split Digits Punctuation UnicodeScripts".split(),
}


def byte_level_letters() -> dict[str, int]:
    """The byte of each letter of a byte-level vocabulary.

    Printable Latin-1 letters stand for themselves, letters from U+0100 on for the other bytes in order (Radford et al.
    2019, GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class ParsedDefinition:
    """The parts of a DEFINITION_NAME that determine ids; `problems` lists those that this program does not support."""

    def __init__(self, definition: dict[str, Any]):
        self.definition = definition
        model = definition["model"]
        self.is_unigram = model.get("type") == "Unigram"
        if self.is_unigram:
            self.vocabulary = {piece: token for token, (piece, _) in enumerate(model["vocab"])}
        else:
            self.vocabulary = dict(model["vocab"])
        self.special_tokens: dict[str, int] = {}
        self.added_tokens: dict[str, int] = {}
        for added in definition["added_tokens"]:
            self.vocabulary[added["content"]] = self.added_tokens[added["content"]] = added["id"]
            if added.get("special"):
                self.special_tokens[added["content"]] = added["id"]
        self.is_byte_level = any(
            part["type"] == "ByteLevel" for key in ("pre_tokenizer", "normalizer") for part in parts(definition[key])
        )
        self.has_bytes = bool(model.get("byte_fallback")) and not self.is_byte_level
        self._letters = byte_level_letters()
        self.unknown: int | None = None
        if self.is_unigram:
            self.unknown = model.get("unk_id")
        elif model.get("unk_token") is not None:
            self.unknown = self.vocabulary.get(model["unk_token"])
        if self.is_byte_level and self._letters.keys() <= self.vocabulary.keys():
            self.unknown = None

    @property
    def prefix(self) -> bytes:
        """What the tokenizer puts before a document; b"" for nothing."""
        return b" " if _without_prefix(self.definition) != self.definition else b""

    @cached_property
    def prefixes_each(self) -> bool:
        """Whether the prefix is put before each stretch of text between added tokens, not only before a document."""
        components = (part for key in ("normalizer", "pre_tokenizer") for part in parts(self.definition[key]))
        return any(map(_prefixes_each, components))

    @cached_property
    def before_prefix(self) -> re.Pattern[str] | None:
        """Matches the added tokens in a text, each followed by the prefix; None if only a document gets the prefix."""
        found = sorted(filter(None, self.added_tokens.keys() - self.special_tokens.keys()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, found))) if found and self.prefixes_each else None

    def text_of(self, name: str) -> bytes:
        """The text of an ordinary token."""
        if self.is_byte_level:
            if name in self.added_tokens or not self._letters.keys() >= set(name):
                return name.encode()
            return bytes(self._letters[letter] for letter in name)
        if self.has_bytes and (byte := byte_of(name)) is not None:
            return bytes([byte])
        return name.replace(BLANK, " ").encode()

    def problems(self) -> Iterator[str]:
        """What keeps this program from giving the same ids and text as the library."""
        model = self.definition["model"]
        kind = model.get("type", "BPE" if "merges" in model else None)
        if kind not in ("BPE", "Unigram"):
            yield f"model.type is {kind!r}; expected BPE or Unigram"
            return
        if model.get("dropout"):
            yield f"model.dropout is {model['dropout']}; expected none: the same text must give the same ids"
        if wrong := self._wrong_token():
            yield wrong
            return
        for key in ("continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                yield f"model.{key} is {model[key]!r}; expected none"
        for key, lossless in _LOSSLESS.items():
            for part in parts(self.definition[key]):
                how = " that removes what it finds" if part.get("behavior") == "Removed" else _shortens(part)
                if part["type"] not in lossless or how:
                    yield f"{key} {part['type']}{how} drops text; expected one that keeps all of it"
        for added in self.definition["added_tokens"]:
            if not added.get("special"):  # which is never looked for in text
                yield from self._flags_of(added)
        if not self.is_byte_level and not self.has_bytes and self.unknown is None:
            yield "it has no byte fallback and no unknown token: some text would be dropped"
        if missing := self._missing_bytes():
            yield (
                f"model.vocab lacks {len(missing)} of the 256 bytes, such as 0x{missing[0]:02X}: some text would be "
                "dropped"
            )

    def _wrong_token(self) -> str | None:
        for name, token in self.vocabulary.items():
            if not isinstance(name, str):
                return f"token {name!r} is not text; restore it"
            if type(token) is not int or not 0 <= token < LARGEST_VOCAB:
                return f"token {name!r} has id {token!r}; expected a whole number from 0, below {LARGEST_VOCAB}"
        return None

    def _flags_of(self, added: dict[str, Any]) -> Iterator[str]:
        flags = [flag for flag in ("lstrip", "rstrip") if added.get(flag)]
        why = "white space beside it would be dropped"
        if not flags and self.before_prefix is not None:
            why = "where this tokenizer puts spaces would depend on where a text is cut"
            if added.get("single_word"):
                flags.append("single_word")
            if added.get("normalized") and self.definition["normalizer"]:
                flags.append("normalized")
        if flags:
            remedy = f"set {'it' if len(flags) == 1 else 'them'} to false, there and in tokenizer_config.json"
            yield f"added token {added['content']!r} has {' and '.join(flags)}: {why}; {remedy}"

    def _missing_bytes(self) -> list[int]:
        """The bytes, ascending, for which a vocabulary that should have all of them has no token."""
        if self.is_byte_level:
            return sorted(byte for letter, byte in self._letters.items() if letter not in self.vocabulary)
        if self.has_bytes:
            return sorted(set(range(256)) - {byte_of(name) for name in self.vocabulary})
        return []


def parts(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer and, if it is a sequence, all that it consists of."""
    if component is None:
        return
    yield component
    for key in ("normalizers", "pretokenizers"):
        for part in component.get(key, ()):
            yield from parts(part)


def _shortens(part: dict[str, Any]) -> str:
    """How a `Replace` may leave fewer characters than it finds; "" if it does not."""
    if part["type"] != "Replace":
        return ""
    ((kind, pattern),), content = part["pattern"].items(), part["content"]
    if kind == "String":
        keeps = len(pattern) <= len(content)
    else:
        keeps = content and _ONE_CHARACTER.fullmatch(pattern)
    return "" if keeps else f" of {pattern!r} by {content!r}"


def encoder_of(
    parsed: ParsedDefinition, special_tokens: dict[str, int]
) -> Callable[[Sequence[str], Sequence[bool]], list[np.ndarray]]:
    """A function from texts, and whether each gets the prefix, to their ids.

    Text behind an added token gets it too where the library puts it there. The function raises InputError for text that
    has no ids.
    """
    opening = _built(parsed.definition, special_tokens)
    continuing = opening
    if parsed.prefix:
        continuing = _built(_without_prefix(parsed.definition), special_tokens)
    _check_built(opening, parsed, special_tokens)
    unknown = parsed.unknown

    def encode(texts: Sequence[str], prefixed: Sequence[bool]) -> list[np.ndarray]:
        encoded: list[np.ndarray] = [np.empty(0, np.int64)] * len(texts)
        starts = [0 if given else prefix_start(text) for text, given in zip(texts, prefixed, strict=True)]
        for library, stretches in (
            (continuing, [text[:start] for text, start in zip(texts, starts, strict=True)]),
            (opening, [text[start:] for text, start in zip(texts, starts, strict=True)]),
        ):
            places = [i for i, stretch in enumerate(stretches) if stretch]
            if not places:
                continue
            # The only call that releases the interpreter lock.
            found = library.encode_batch_fast([stretches[i] for i in places], add_special_tokens=False)
            for i, encoding in zip(places, found, strict=True):
                ids = np.array(encoding.ids, np.int64)
                if unknown is not None and (ids == unknown).any():
                    raise _unknown_text(library, stretches[i], unknown)
                encoded[i] = np.concatenate([encoded[i], ids]) if len(encoded[i]) else ids
        return encoded

    def prefix_start(text: str) -> int:
        """Where in a text without prefix the stretches with one begin: at its first added token."""
        found = parsed.before_prefix and parsed.before_prefix.search(text)
        return found.start() if found else len(text)

    return encode


def _check_built(library: Any, parsed: ParsedDefinition, special_tokens: dict[str, int]) -> None:
    found = library.get_vocab(with_added_tokens=True)
    expected = parsed.vocabulary
    if parsed.is_unigram:
        expected = {_renamed(name, special_tokens): token for name, token in expected.items()}
    if found != expected:
        name = min(n for n in {*found, *expected} if found.get(n) != expected.get(n))
        raise InputError(
            f"{DEFINITION_NAME}: token {name!r} has id {expected.get(name)}, but the `tokenizers` library gives it "
            f"{found.get(name)}; fix added_tokens"
        )
    special = {token for token in special_tokens.values() if token != parsed.unknown}
    names = list(special_tokens)
    for name, encoding in zip(names, library.encode_batch_fast(names, add_special_tokens=False), strict=True):
        if hit := special.intersection(encoding.ids):
            raise InputError(
                f"{DEFINITION_NAME}: the text {name!r} gives the special id {min(hit)}; expected ordinary ids, so"
                " that no text ends a document"
            )


def byte_of(name: str) -> int | None:
    """The byte of a piece such as <0x0A>."""
    match = re.fullmatch("<0x([0-9A-Fa-f]{2})>", name)
    return match and int(match[1], 16)


def _scheme(metaspace: dict[str, Any]) -> str:
    """Before which stretches of text it puts a space: always, first or never."""
    # Older files have add_prefix_space, true by default, instead of prepend_scheme.
    older = "always" if metaspace.get("add_prefix_space", True) else "never"
    return metaspace.get("prepend_scheme", older)


def _prefixes_each(component: dict[str, Any]) -> bool:
    """Whether it puts a space before each stretch of text between added tokens, not only before the first."""
    if component["type"] == "Metaspace":
        return _scheme(component) == "always"
    return component["type"] == "Prepend" or bool(component.get("add_prefix_space"))


def _without_prefix(definition: dict[str, Any]) -> dict[str, Any]:
    """The definition for text inside a document: without the space that is put before a document."""

    def changed(component: dict[str, Any] | None) -> dict[str, Any] | None:
        if component is None or component["type"] == "Prepend":
            return None
        component = dict(component)
        if component["type"] == "ByteLevel" and component.get("add_prefix_space"):
            component["add_prefix_space"] = False
        if component["type"] == "Metaspace" and _scheme(component) != "never":
            component = {key: value for key, value in component.items() if key != "add_prefix_space"}
            component["prepend_scheme"] = "never"
        for key in ("normalizers", "pretokenizers"):
            if key in component:
                component[key] = [part for old in component[key] if (part := changed(old)) is not None]
        return component

    return definition | {key: changed(definition[key]) for key in ("normalizer", "pre_tokenizer")}


def _renamed(piece: str, special: dict[str, int]) -> str:
    """The name of a unigram piece in the encoder: special pieces are renamed, or they would be found in text."""
    return _UNTYPABLE + piece if piece in special else piece


def _built(definition: dict[str, Any], special: dict[str, int]) -> Any:
    """The library's tokenizer, which encodes the names of special tokens in text as ordinary text."""
    from tokenizers import Tokenizer as Library

    model = definition["model"]
    if model.get("type") == "Unigram":
        vocabulary = [[_renamed(piece, special), score] for piece, score in model["vocab"]]
        added = [token | {"content": _renamed(token["content"], special)} for token in definition["added_tokens"]]
        definition = definition | {"model": model | {"vocab": vocabulary}, "added_tokens": added}
    try:
        library = Library.from_str(json.dumps(definition))
    except Exception as error:  # the library raises nothing narrower
        if type(error) is not Exception:
            raise
        raise InputError(f"{DEFINITION_NAME}: the `tokenizers` library cannot read it: {error}") from error
    library.encode_special_tokens = True
    return library


def _unknown_text(library: Any, text: str, unknown: int) -> InputError:
    encoding = library.encode(text, add_special_tokens=False)
    start, stop = encoding.offsets[encoding.ids.index(unknown)]
    return InputError(
        f"{text[start:stop][:20]!r} cannot be represented: this tokenizer has no token for it and no byte fallback; "
        "remove it from the text, or use another tokenizer"
    )
