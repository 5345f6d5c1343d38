"""A tokenizer in llama.cpp's form: tokens and their types, merges or scores, and the name of a pre-tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import IntEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from curriculum.data.tokenizers.chat_template import chat_template, ends_answer, own_template
from curriculum.data.tokenizers.hf_definition import BLANK, DEFINITION_NAME, ParsedDefinition, byte_of, parts
from curriculum.data.tokenizers.hf_files import CONFIG_NAME
from curriculum.data.tokenizers.hf_writer import hf_definition
from curriculum.errors import InputError

if TYPE_CHECKING:
    from curriculum.data.chat import Template
    from curriculum.data.tokenizers.tokenizer import Tokenizer


class TokenType(IntEnum):
    """llama.cpp's types of tokens."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Patterns that llama.cpp has names for: of its few dozen, those of the model families that this program reads.
_LLAMA3 = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _CONTRACTIONS + _WORDS + r"\p{N}" + _REST
# Never applies, since no text in UTF-8 holds either byte: llama.cpp accepts no file without merges.
_NEVER_MERGED = "\u00ff \u00fe"


def gguf_vocabulary(tokenizer: Tokenizer, num_rows: int, template: Template | None = None) -> dict[str, Any]:
    """The tokenizer in llama.cpp's form, with `num_rows` tokens; those after its own are unused.

    By the name of the method of GGUFWriter that adds it, without `add_`; in the order of the file. The model is gpt2
    for byte-level merges, and otherwise llama, whose merges follow from scores.

    llama.cpp then gives the tokenizer's ids, with the exceptions that `reads_otherwise` tells. Tokenizers made here
    open a text with end-of-text (`add_bos`), as `curriculum generate` does; those of kind hf do as their files say.
    `template`, that of conversations in training, replaces a template that the tokenizer came with. Raises InputError
    that lists what llama.cpp does not support.
    """
    if tokenizer.kind == "char":
        raise InputError(
            "tokenizer.kind: char cannot be written as GGUF: llama.cpp reads byte-level BPE and SentencePiece; use "
            "kind byte or bpe, or export with --format hf"
        )
    parsed = _parsed(tokenizer)
    definition = parsed.definition
    if parsed.is_byte_level:
        pre, problems = _named_pattern(definition)
    else:
        pre, problems = "default", list(_sentencepiece_problems(parsed))
    if problems:
        raise InputError(*(f"tokenizer: {problem}; export with --format hf" for problem in problems))

    tokens, types = [f"[PAD{token}]" for token in range(num_rows)], [int(TokenType.UNUSED)] * num_rows
    for name, token in parsed.vocabulary.items():
        tokens[token], types[token] = name, _type_of(name, token, tokenizer, parsed)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in definition["model"]["merges"]]
    if parsed.is_byte_level:
        by_rank = {"token_types": types, "token_merges": merges or [_NEVER_MERGED]}
    else:
        by_rank = {"token_scores": _scores(tokens, merges), "token_types": types}
    jinja = own_template(tokenizer) if template is None else chat_template(template, tokenizer)
    closing = None if template is None else ends_answer(template, tokenizer)[1]
    return {
        "tokenizer_model": "gpt2" if parsed.is_byte_level else "llama",
        "tokenizer_pre": pre,
        "token_list": tokens,
        **by_rank,
        "bos_token_id": tokenizer.bos,
        "eos_token_id": tokenizer.eot,
        **({} if closing is None else {"eot_token_id": closing}),
        **({} if parsed.unknown is None else {"unk_token_id": parsed.unknown}),
        "add_bos_token": _adds_bos(tokenizer),
        "add_eos_token": False,
        "add_space_prefix": bool(tokenizer.prefix),
        **({} if jinja is None else {"chat_template": jinja}),
    }


def reads_otherwise(tokenizer: Tokenizer) -> Iterator[str]:
    """What GGUF has no place for: a line on each text for which a reader of the file gives other ids, or gives none."""
    parsed = _parsed(tokenizer)
    if any(part["type"] == "NFC" for part in parts(parsed.definition["normalizer"])):
        yield (
            "the tokenizer normalises text to NFC, what reads the GGUF file does not: text that is not in NFC, such as "
            "e + U+0301 in place of U+00E9, gets other ids; normalise it before"
        )
    added = parsed.definition["added_tokens"]
    if words := [token["content"] for token in added if token.get("single_word") and not token.get("special")]:
        more = f" (and {len(words) - 1} more)" if words[1:] else ""
        yield f"{words[0]!r}{more} is a token only as a word of its own, but for what reads the GGUF file in words too"
    if parsed.prefixes_each:
        yield (
            "the tokenizer puts a blank before every text and behind added tokens, transformers, where it reads the "
            "GGUF file, not behind these nor before a text that begins with a blank: such text gets other ids there"
        )
    elif parsed.prefix:
        yield (
            "llama.cpp puts a blank also before a text that begins with one, which the tokenizer does not: such text "
            "gets other ids there"
        )
    if parsed.is_byte_level and not parsed.definition["model"]["merges"]:
        yield "transformers reads no tokenizer without merges from a GGUF file; llama.cpp does"


@lru_cache(maxsize=1)  # an export asks several times, and the merges of many ids take seconds
def _parsed(tokenizer: Tokenizer) -> ParsedDefinition:
    return ParsedDefinition(hf_definition(tokenizer)) if tokenizer.hf is None else tokenizer.hf.parsed


def _type_of(name: str, token: int, tokenizer: Tokenizer, parsed: ParsedDefinition) -> int:
    if token == parsed.unknown:
        return TokenType.UNKNOWN
    if name in tokenizer.special_tokens:
        return TokenType.CONTROL
    if name in parsed.added_tokens:
        return TokenType.USER_DEFINED
    return TokenType.BYTE if parsed.has_bytes and byte_of(name) is not None else TokenType.NORMAL


def _named_pattern(definition: dict[str, Any]) -> tuple[str, list[str]]:
    """llama.cpp's name for a byte-level pre-tokenizer, and what in the tokenizer llama.cpp does not support."""
    problems = []
    normalizers = [part["type"] for part in parts(definition["normalizer"]) if part["type"] != "Sequence"]
    cuts = [_cut(part) for part in parts(definition["pre_tokenizer"]) if part["type"] != "Sequence"]
    if set(normalizers) - {"NFC"}:
        problems.append(f"llama.cpp does not have its normalizer {', '.join(normalizers)}")
    if any(part.get("add_prefix_space") for part in parts(definition["pre_tokenizer"])):
        problems.append("it puts a space before a text, which llama.cpp does not do for byte-level BPE")
    whole = definition["model"].get("ignore_merges")
    names = {
        ("gpt2",): "gpt-2",
        ("digits", "gpt2"): "smollm",
        (_LLAMA3, "bytes"): "llama-bpe" if whole else "smaug-bpe",
        (_QWEN2, "bytes"): "qwen2",
    }
    if not definition["model"]["merges"] and cuts == ["bytes"]:
        names["bytes",] = "gpt-2"  # without merges it does not matter where text is cut
    pre = names.get(tuple(cuts))
    if pre is None:
        found = " and ".join(cuts) or "none"
        problems.append(f"llama.cpp has no name for the pattern that splits text ({found})")
    return pre, problems


def _cut(part: dict[str, Any]) -> str:
    """How a pre-tokenizer other than a sequence cuts text: its pattern, or a word in place of one."""
    kind = part["type"]
    if kind == "ByteLevel":
        return "gpt2" if part.get("use_regex", True) else "bytes"
    if kind == "Digits":
        return "digits" if part.get("individual_digits") else "runs of digits"
    if kind == "Split" and part["behavior"] == "Isolated" and not part.get("invert"):
        return part["pattern"].get("Regex") or part["pattern"]["String"]
    return kind


def _sentencepiece_problems(parsed: ParsedDefinition) -> Iterator[str]:
    if parsed.is_unigram:
        yield "its model is Unigram, which is not written as GGUF"
        return
    if not parsed.has_bytes:
        yield "it has no byte fallback, which llama.cpp expects"
    definition = parsed.definition
    allowed = ({"type": "Prepend", "prepend": BLANK}, {"type": "Replace", "pattern": {"String": " "}, "content": BLANK})
    for part in parts(definition["normalizer"]):
        if part["type"] != "Sequence" and part not in allowed:
            yield f"llama.cpp does not have its normalizer {part['type']}"
    for part in parts(definition["pre_tokenizer"]):
        if part["type"] != "Metaspace" or part.get("replacement") != BLANK:
            yield f"llama.cpp does not have its pre_tokenizer {part['type']} for SentencePiece"
    made = {_made(pair) for pair in definition["model"]["merges"]}
    ordinary = [name for name in parsed.vocabulary if name not in parsed.added_tokens and byte_of(name) is None]
    if lost := [name for name in ordinary if len(name) > 1 and name not in made]:
        yield f"no merge produces {len(lost)} tokens (such as {lost[0]!r}), but llama.cpp would produce them"


def _made(pair: str | list[str]) -> str:
    return pair.replace(" ", "") if isinstance(pair, str) else "".join(pair)


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Minus the rank of the first merge that makes a token: llama.cpp merges the pair with the highest score first."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault(_made(pair), rank)
    return [-float(ranks[token]) if token in ranks else 0.0 for token in tokens]


def _adds_bos(tokenizer: Tokenizer) -> bool:
    if tokenizer.hf is None:
        return True
    config = json.loads(tokenizer.hf.files.get(CONFIG_NAME, b"{}"))
    if isinstance(config.get("add_bos_token"), bool):
        return config["add_bos_token"]
    processor = json.loads(tokenizer.hf.files[DEFINITION_NAME]).get("post_processor") or {}
    try:
        for part in (processor, *processor.get("processors", ())):
            if part.get("type") == "TemplateProcessing" and part["single"]:
                return part["single"][0].get("SpecialToken", {}).get("id") in tokenizer.special_tokens
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"tokenizer: {DEFINITION_NAME}: post_processor: invalid ({error!r}); restore it") from error
    return False
