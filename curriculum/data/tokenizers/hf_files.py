"""Hugging Face tokenizer files: read without a library, encoded by `tokenizers`; no code of the folder is run.

Supports byte-level byte pairs (GPT-2, Llama 3, Qwen, SmolLM), and byte pairs or unigram made by SentencePiece (Llama 2,
Mistral), with byte fallback or an unknown token.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from curriculum.data.tokenizers.hf_definition import DEFINITION_NAME, ParsedDefinition, encoder_of
from curriculum.errors import InputError

CONFIG_NAME = "tokenizer_config.json"
MAP_NAME = "special_tokens_map.json"
TEMPLATE_NAME = "chat_template.jinja"
KEPT_NAMES = (DEFINITION_NAME, CONFIG_NAME, MAP_NAME, TEMPLATE_NAME)


@dataclass(frozen=True, eq=False)
class HfFiles:
    """A tokenizer as Hugging Face files define it.

    `files`: by name the content of KEPT_NAMES, as read. `eot` and `bos` are ids; `bos` is None if the files name none.
    `stops` are the ids other than `eot` at which a text of the model ends too, such as <|eot_id|> of Llama 3.
    """

    files: dict[str, bytes] = field(repr=False)
    parsed: ParsedDefinition = field(repr=False)
    eot: int
    bos: int | None
    stops: tuple[int, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest of everything that determines ids."""
        canonical = json.dumps([self.parsed.definition, self.eot, self.bos], sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    @cached_property
    def file_digests(self) -> dict[str, str]:
        return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(self.files.items())}

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The ids that stand for no text, by name."""
        special = self.parsed.special_tokens
        named = {name: token for name, token in self.parsed.vocabulary.items() if token in (self.eot, self.bos)}
        return dict(sorted((special | named).items(), key=lambda item: item[1]))

    @cached_property
    def tokens(self) -> tuple[bytes, ...]:
        """The text of each id, b"" for special and unused ids."""
        special = self.special_tokens
        texts = [b""] * (max(self.parsed.vocabulary.values()) + 1)
        for name, token_id in self.parsed.vocabulary.items():
            if name not in special:
                texts[token_id] = self.parsed.text_of(name)
        return tuple(texts)

    @cached_property
    def encoder(self) -> Callable[[Sequence[str], Sequence[bool]], list[np.ndarray]]:
        return encoder_of(self.parsed, self.special_tokens)


def is_hf_folder(folder: str | Path) -> bool:
    """Whether a folder's DEFINITION_NAME is Hugging Face's; the sidecar of a tokenizer saved here has that name too."""
    try:
        return b'"model"' in (Path(folder) / DEFINITION_NAME).read_bytes()
    except OSError:
        return False


def read_hf_files(folder: str | Path) -> HfFiles:
    """The tokenizer of a Hugging Face folder.

    End-of-text is the eos_token of CONFIG_NAME or MAP_NAME, else eos_token_id of generation_config.json or config.json,
    whose other ids are `stops`. Raises InputError that lists what is missing, damaged or not supported.
    """
    folder = Path(folder)
    expected = "a tokenizer that the `tokenizers` library reads"
    files = _files_of(folder, f"{expected}; if there is only a tokenizer.model, load it in transformers and save it")
    parsed = _parsed(folder, files)
    config = _json(folder / CONFIG_NAME, files.get(CONFIG_NAME))
    named = _json(folder / MAP_NAME, files.get(MAP_NAME))
    ids = [_json(path, _read(path)) for path in (folder / "generation_config.json", folder / "config.json")]
    eot = _named_id(folder, "eos", parsed.vocabulary, (config, named), ids)
    if eot is None:
        raise InputError(
            f"{folder}: no end-of-text token: {CONFIG_NAME} names no eos_token, and neither generation_config.json "
            f"nor config.json has eos_token_id; add eos_token to {CONFIG_NAME}"
        )
    bos = _named_id(folder, "bos", parsed.vocabulary, (config, named), () if config else ids)
    ends = [source.get("eos_token_id") for source in ids]
    listed = [token for tokens in ends for token in (tokens if isinstance(tokens, list) else [tokens])]
    known = set(parsed.vocabulary.values()) - {eot}
    stops = dict.fromkeys(token for token in listed if type(token) is int and token in known)
    return HfFiles(files, parsed, eot, bos, tuple(stops))


def load_hf_files(folder: Path, eot: int, bos: int | None, stops: Sequence[int]) -> HfFiles:
    """The tokenizer whose files `save_hf_files` wrote; the rest is known already."""
    files = _files_of(folder, "the tokenizer saved with the run")
    return HfFiles(files, _parsed(folder, files), eot, bos, tuple(stops))


def save_hf_files(folder: Path, files: HfFiles) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.files.items():
        (folder / name).write_bytes(content)


def _files_of(folder: Path, expected: str) -> dict[str, bytes]:
    """The content of each of KEPT_NAMES that is there; raises InputError without a definition, `expected`."""
    files = {name: content for name in KEPT_NAMES if (content := _read(folder / name)) is not None}
    if DEFINITION_NAME not in files:
        raise InputError(f"{folder / DEFINITION_NAME}: is missing; expected {expected}")
    return files


def _parsed(folder: Path, files: dict[str, bytes]) -> ParsedDefinition:
    path = folder / DEFINITION_NAME
    raw, config = _json(path, files[DEFINITION_NAME]), _json(folder / CONFIG_NAME, files.get(CONFIG_NAME))
    try:
        model, added = dict(raw["model"]), [dict(token) for token in raw.get("added_tokens") or ()]
        known = {token["content"] for token in added}
        # As in transformers: tokens that only the config lists are added.
        for token_id, token in (config.get("added_tokens_decoder") or {}).items():
            if token["content"] not in known:
                added.append({**token, "id": int(token_id)})
        definition = {"version": "1.0", "truncation": None, "padding": None, "post_processor": None, "decoder": None}
        definition |= {"added_tokens": sorted(added, key=lambda token: token["id"]), "model": model}
        definition |= {key: raw.get(key) for key in ("normalizer", "pre_tokenizer")}
        parsed = ParsedDefinition(definition)
        problems = list(parsed.problems())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: not a tokenizer ({type(error).__name__}: {error}); restore it") from error
    if problems:
        raise InputError(*(f"{path}: {problem}" for problem in problems))
    return parsed


def _named_id(folder, role: str, vocabulary: dict[str, int], named: Sequence[dict], ids: Sequence[dict]) -> int | None:
    """The id of a role's token: the first name in `named`, else the first id in `ids`; None if neither has it."""
    for source in named:
        token = source.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            continue
        if not isinstance(token, str) or token not in vocabulary:
            raise InputError(f"{folder}: {role}_token {token!r} is not among the tokens of {DEFINITION_NAME}")
        return vocabulary[token]
    for source in ids:
        token_id = source.get(f"{role}_token_id")
        if isinstance(token_id, list):
            if len(token_id) > 1:
                raise InputError(
                    f"{folder}: {role}_token_id is {token_id}, but {CONFIG_NAME} does not say which one to use; add "
                    f"{role}_token there"
                )
            token_id = token_id[0] if token_id else None
        if token_id is None:
            continue
        if token_id not in vocabulary.values():
            raise InputError(f"{folder}: {role}_token_id {token_id} is not an id in {DEFINITION_NAME}")
        return token_id
    return None


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; expected a readable file") from error


def _json(path: Path, content: bytes | None) -> dict[str, Any]:
    if content is None:
        return {}
    try:
        found = json.loads(content)
        if b"\\ud" in content.lower():  # half a surrogate pair is no text, and could not be written again
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON ({error}); restore it") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: holds {type(found).__name__}; expected an object")
    return found
