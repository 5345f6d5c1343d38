"""A run's chat format as a Jinja template, which transformers, vllm and llama.cpp read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from curriculum.data.chat import ChatConfig, Template
from curriculum.data.tokenizers.hf_files import CONFIG_NAME, TEMPLATE_NAME

if TYPE_CHECKING:
    from curriculum.data.tokenizers.tokenizer import Tokenizer


def opens_document(tokenizer: Tokenizer) -> bool:
    """Whether a template can begin with the token that opens a document, as conversations did in training.

    False if the tokenizer puts a space before a document, since it puts none after that token.
    """
    return not tokenizer.prefix


def ends_answer(chat: ChatConfig, tokenizer: Tokenizer) -> tuple[str, int | None]:
    """What closes an answer first, white space before it apart: a text, or the id of a special token.

    The text is "" if only end-of-text does.
    """
    _, close = Template.of(chat, tokenizer.special_tokens).around("assistant")
    for part in close:
        if part.special:
            return "", tokenizer.special_tokens[part.text]
        if part.text.strip():
            return part.text.strip(), None
    return "".join(part.text for part in close), None


def chat_template(chat: ChatConfig, tokenizer: Tokenizer) -> str:
    """A Jinja template with the text of `render`; with add_generation_prompt it also introduces an answer.

    If `opens_document`, the bos token comes first. A role that `chat` lacks is an error.
    """
    lines = ["{{- bos_token }}"] if opens_document(tokenizer) else []
    lines.append("{%- for message in messages %}")
    for number, role in enumerate(chat.roles):
        introduction, close = map(_quoted, chat.around(role))
        lines.append(f"{{%- {'elif' if number else 'if'} message['role'] == '{role}' %}}")
        lines.append(f"{{{{- {introduction} + message['content'] + {close} }}}}")
    expected = _quoted(f"expected messages of role {', '.join(chat.roles)}")
    lines += ["{%- else %}", f"{{{{- raise_exception({expected}) }}}}"]
    lines += ["{%- endif %}", "{%- endfor %}"]
    lines += ["{%- if add_generation_prompt %}", f"{{{{- {_quoted(chat.around('assistant')[0])} }}}}", "{%- endif %}"]
    return "\n".join(lines)


def own_template(tokenizer: Tokenizer) -> str | None:
    """The template that a tokenizer of Hugging Face brings along, if any."""
    if tokenizer.hf is None:
        return None
    if (jinja := tokenizer.hf.files.get(TEMPLATE_NAME)) is not None:
        return jinja.decode(errors="replace")
    template = json.loads(tokenizer.hf.files.get(CONFIG_NAME, b"{}")).get("chat_template")
    return template if isinstance(template, str) else None


def _quoted(text: str) -> str:
    """A Jinja string literal, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)
