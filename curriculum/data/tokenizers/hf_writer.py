"""Tokenizers of every kind written as Hugging Face files: tokenizer.json and those that name its special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curriculum.data.tokenizers.chat_template import chat_template, opens_document
from curriculum.data.tokenizers.hf_definition import DEFINITION_NAME, byte_level_letters
from curriculum.data.tokenizers.hf_files import CONFIG_NAME, MAP_NAME, TEMPLATE_NAME, save_hf_files

if TYPE_CHECKING:
    from curriculum.data.chat import Template
    from curriculum.data.tokenizers.tokenizer import Tokenizer

# Classes that transformers 5 builds from the vocabulary alone: unlike DEFINITION_NAME, they put no space before a text
# that begins with one.
_BUILT_ANEW = ("LlamaTokenizer", "LlamaTokenizerFast")
_QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
_NO_MATCH = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def write_hf_tokenizer(
    tokenizer: Tokenizer, folder: str | Path, *, model_max_length: int | None = None, template: Template | None = None
) -> None:
    """Write DEFINITION_NAME, CONFIG_NAME and MAP_NAME, which transformers' AutoTokenizer reads; `folder` must exist.

    With add_special_tokens=False, AutoTokenizer gives the ids of `Tokenizer.encode` and decodes them to the same text.
    eos_token is end-of-text and bos_token what opens a document. Tokenizers made here set split_special_tokens: special
    tokens in text are ordinary text there too. A character that a char tokenizer lacks is an error there too. A
    tokenizer of kind hf is written as it was read, with its chat template; its own config says what special tokens in
    text are. Only two things change: missing names of eos_token and bos_token are added, and a missing tokenizer_class
    or Llama's own becomes PreTrainedTokenizerFast, which uses DEFINITION_NAME as it stands.

    `template`, that of conversations in training, becomes the chat template and replaces one that the tokenizer came
    with. If the template names special tokens, bos_token included, they are special in all text; otherwise they are
    ordinary text.
    """
    folder = Path(folder)
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    roles = {"eos_token": names[tokenizer.eot], "bos_token": names[tokenizer.bos]}
    if tokenizer.hf is not None:
        save_hf_files(folder, tokenizer.hf)
        config = json.loads(tokenizer.hf.files.get(CONFIG_NAME, b"{}"))
        if config.get("tokenizer_class") in (None, *_BUILT_ANEW):
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        config |= {role: name for role, name in roles.items() if config.get(role) is None}
        special = json.loads(tokenizer.hf.files.get(MAP_NAME, b"{}"))
        special |= {role: name for role, name in roles.items() if special.get(role) is None}
    else:
        write_json(folder / DEFINITION_NAME, hf_definition(tokenizer))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **roles, "split_special_tokens": True}
        config |= {"clean_up_tokenization_spaces": False, "add_prefix_space": False}
        special = roles
    if template is not None:
        (folder / TEMPLATE_NAME).unlink(missing_ok=True)
        config |= {"chat_template": chat_template(template, tokenizer)}
        config |= {"split_special_tokens": not (opens_document(tokenizer) or template.special)}
    if model_max_length is not None:
        config["model_max_length"] = model_max_length
    write_json(folder / CONFIG_NAME, config)
    write_json(folder / MAP_NAME, special)


def is_qwen(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer came from a folder whose class is Qwen's, which transformers builds anew in the same way."""
    if tokenizer.hf is None:
        return False
    return json.loads(tokenizer.hf.files.get(CONFIG_NAME, b"{}")).get("tokenizer_class") in _QWEN


def hf_definition(tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of DEFINITION_NAME of a tokenizer made here, special tokens in the vocabulary to keep their ids."""
    added = [{"id": token, "content": name, **_NO_MATCH} for name, token in tokenizer.special_tokens.items()]
    definition: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": None,
        "post_processor": None,
    }
    return definition | (_of_characters(tokenizer) if tokenizer.kind == "char" else _of_bytes(tokenizer))


def _of_characters(tokenizer: Tokenizer) -> dict[str, Any]:
    characters = {token.decode(): token_id for token_id, token in enumerate(tokenizer.tokens) if token}
    # WordLevel without its unknown token raises an error for an unknown character; BPE would drop it.
    model = {"type": "WordLevel", "vocab": characters | tokenizer.special_tokens, "unk_token": "<unk>"}
    return {"model": model, "pre_tokenizer": _split(r"[\s\S]"), "decoder": {"type": "Fuse"}}


def _of_bytes(tokenizer: Tokenizer) -> dict[str, Any]:
    letters = {byte: letter for letter, byte in byte_level_letters().items()}

    def spelled(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {spelled(token): token_id for token_id, token in enumerate(tokenizer.tokens) if token}
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        # As in tiktoken, a stretch that is itself a token becomes that token. Not for bytes, whose whole text is one
        # stretch.
        "ignore_merges": tokenizer.pattern is not None,
        "vocab": vocabulary | tokenizer.special_tokens,
        "merges": [[spelled(left), spelled(right)] for left, right in merges_of(tokenizer.tokens)],
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if tokenizer.pattern is None:
        pre_tokenizer = byte_level | {"use_regex": False}
    elif tokenizer.pattern == _gpt2_pattern():
        pre_tokenizer = byte_level | {"use_regex": True}
    else:
        cut = _split(onig_pattern(tokenizer.pattern))
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [cut, byte_level | {"use_regex": False}]}
    return {"model": model, "pre_tokenizer": pre_tokenizer, "decoder": byte_level | {"use_regex": True}}


def merges_of(tokens: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """The pair that each token of two or more bytes is merged from, in the order of the ids, which are their ranks.

    The pair is what remains of the token's bytes when only merges of lower rank are applied. A token of which more than
    two parts remain has no pair.
    """
    ranks = {token: rank for rank, token in enumerate(tokens) if token}
    merges = []
    for token, rank in ranks.items():
        if len(token) < 2:
            continue
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            found = [ranks.get(left + right, rank) for left, right in pairwise(parts)]
            lowest = min(found)
            if lowest >= rank:
                break
            at = found.index(lowest)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def onig_pattern(pattern: str) -> str:
    """A pattern of tiktoken in the syntax of Oniguruma, which `tokenizers` uses.

    In tiktoken, a plus after braces makes the repetition possessive, and $ matches at the end of the text. In
    Oniguruma, the plus repeats once more, and $ matches at the end of a line.
    """
    pattern = re.sub(r"(?<!\\)(\{\d+(?:,\d*)?\})\+", r"\1", pattern)
    return re.sub(r"(?<!\\)\$", r"\\z", pattern)


def _gpt2_pattern() -> str:
    from tiktoken_ext.openai_public import r50k_pat_str

    return r50k_pat_str


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
