"""A run's chat format as a Jinja template, which transformers, vllm and llama.cpp read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from curriculum.data.chat import Template
from curriculum.data.tokenizers.hf_files import CONFIG_NAME, TEMPLATE_NAME

if TYPE_CHECKING:
    from curriculum.data.tokenizers.tokenizer import Tokenizer


def opens_document(tokenizer: Tokenizer) -> bool:
    """Whether a template can begin with the token that opens a document, as conversations did in training.

    False if the tokenizer puts a space before a document, since it puts none after that token.
    """
    return not tokenizer.prefix


def ends_answer(template: Template, tokenizer: Tokenizer) -> tuple[str, int | None]:
    """(text, id) that close an answer: what comes first of the text, and the first special token, or None.

    The text has no white space around it unless there is nothing else; it is "" if the special token comes first, or if
    only end-of-text closes an answer.
    """
    _, close = template.around["assistant"]
    token = next((tokenizer.special_tokens[part.text] for part in close if part.special), None)
    text = close[0].text if close and not close[0].special else ""
    return text.strip() or (text if token is None else ""), token


def chat_template(template: Template, tokenizer: Tokenizer) -> str:
    """A Jinja template with the text of `render`; with add_generation_prompt it also introduces an answer.

    If `opens_document`, the bos token comes first, and no second one if the chat section spells it too. A role that the
    section lacks is an error.
    """
    chat = template.chat
    opening = next(name for name, token in tokenizer.special_tokens.items() if token == tokenizer.bos)
    lines = ["{{- bos_token }}"] if opens_document(tokenizer) else []
    lines.append("{%- for message in messages %}")
    for number, role in enumerate(chat.roles):
        introduction, close = chat.around(role)
        written = f"{_quoted(introduction)} + message['content'] + {_quoted(close)}"
        if opening in template.special and introduction.startswith(opening):
            rest = f"{_quoted(introduction.removeprefix(opening))} + message['content'] + {_quoted(close)}"
            written = f"('' if loop.first else {_quoted(opening)}) + {rest}"
        lines.append(f"{{%- {'elif' if number else 'if'} message['role'] == '{role}' %}}")
        lines.append(f"{{{{- {written} }}}}")
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
