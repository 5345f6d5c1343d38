"""Conversations as text: one template for each role, and which stretches of the text are answers.

An answer is the content of an assistant turn and the text that closes the turn in the template: a model has to write
both. The text that introduces the turn, and every other turn, is part of the prompt.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from curriculum.errors import FieldError, InputError, checked_text, found_keys, type_name

CONTENT = "{content}"
ROLES = ("system", "user", "assistant", "tool")
RENDERING_VERSION = 2  # raise it if conversations are rendered or scored differently: else existing stores are reused
_UNRENDERED = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")  # keys of a message


class Stretch(NamedTuple):
    """A text, whether it is scored, and whether it is the name of a special token and stands for that."""

    text: str
    scored: bool
    special: bool = False


@dataclass(frozen=True)
class ChatConfig:
    """How a conversation becomes text: for each role the text of one turn, with {content} where its content goes.

    What stands before {content} introduces the turn, what stands after it closes it. Where it spells the name of one of
    the tokenizer's special tokens, such as <|im_start|> with those of Qwen, it stands for that token.
    """

    system: str = "<|im_start|>system\n{content}<|im_end|>\n"
    """A turn of role system: text that contains {content} once. Names of special tokens in it stand for these."""
    user: str = "<|im_start|>user\n{content}<|im_end|>\n"
    """A turn of role user."""
    assistant: str = "<|im_start|>assistant\n{content}<|im_end|>\n"
    """A turn of role assistant. Its content and what follows it are scored; what precedes it asks for an answer."""
    tool: str | None = None
    """A turn of role tool; null: the role is refused."""

    def __post_init__(self):
        for role in self.roles:
            if (count := getattr(self, role).count(CONTENT)) != 1:
                raise FieldError(
                    role,
                    f"got {getattr(self, role)!r}, with {CONTENT} {count} times; expected it exactly once, where the "
                    "turn's content goes",
                )

    @property
    def roles(self) -> list[str]:
        """The roles that the template names."""
        return [role for role in ROLES if getattr(self, role) is not None]

    def around(self, role: str) -> tuple[str, str]:
        """What introduces and what closes a turn of `role`."""
        introduction, _, close = getattr(self, role).partition(CONTENT)
        return introduction, close


CHATML = ChatConfig()
NO_SPECIAL = "[]"  # of `Template.to_json`, where no special token that the template spells was written
CHATML_TURN = "<|im_start|>"  # however a template of ChatML is written, it has this


@dataclass(frozen=True)
class Template:
    """A chat section and what it spells of a tokenizer's special tokens, longest first."""

    chat: ChatConfig
    special: tuple[str, ...] = ()

    @staticmethod
    def of(chat: ChatConfig, special_tokens: Iterable[str]) -> "Template":
        texts = [text for role in chat.roles for text in chat.around(role)]
        names = [name for name in special_tokens if name and any(name in text for text in texts)]
        template = Template(chat, tuple(sorted(names, key=len, reverse=True)))
        stretches = [stretch for around in template.around.values() for part in around for stretch in part]
        spelled = {stretch.text for stretch in stretches if stretch.special}  # not only within a longer one
        return Template(chat, tuple(name for name in template.special if name in spelled))

    @cached_property
    def around(self) -> dict[str, tuple[list[Stretch], list[Stretch]]]:
        """What introduces and what closes a turn, by role; neither of it scored."""
        names = re.compile(f"({'|'.join(map(re.escape, self.special))})" if self.special else r"(?!)")

        def stretches(text: str) -> list[Stretch]:
            return [Stretch(part, False, bool(i % 2)) for i, part in enumerate(names.split(text)) if part]

        return {role: tuple(map(stretches, self.chat.around(role))) for role in self.chat.roles}

    def to_json(self) -> dict[str, str | None]:
        """All of it, as a store and the lineage of a run remember how conversations were rendered."""
        return asdict(self.chat) | ({"special_tokens": json.dumps(self.special)} if self.special else {})

    @staticmethod
    def from_json(saved: Mapping[str, str | None]) -> "Template":
        chat = {role: turn for role, turn in saved.items() if role != "special_tokens"}
        return Template(ChatConfig(**chat), tuple(json.loads(saved.get("special_tokens") or "[]")))


AS_TEXT = Template(CHATML)  # none of it is a special token


def render(messages: list[dict], template: Template, key: str = "messages") -> list[Stretch]:
    """A conversation as stretches of text, none empty; joined they are its text.

    Neighbours differ in whether they are scored, or one is a special token that the template spells. Encode each
    stretch on its own: then no token crosses the edge of an answer, and a prompt, which ends at that edge, has the same
    ids as in training. Content is ordinary text even if it looks like the template. Of a message role and content are
    read, and weight: an answer of weight 0 is not scored. Other keys are not.

    Raises InputError naming the message, as one of `key`, for a role that the template lacks, a missing key, content
    that is not text, a weight other than 0 and 1, and for calls of tools and reasoning beside the content, which no
    template renders.
    """
    return _joined(_turns(messages, key, template))


def render_question(content: str, template: Template) -> list[Stretch]:
    """A conversation of one turn of role user, up to where its answer begins."""
    introduction, _ = template.around["assistant"]
    return _joined([*_turns([{"role": "user", "content": content}], "messages", template), *introduction])


def render_completion(prompt: str | list[dict], completion: str | list[dict], template: Template) -> list[Stretch]:
    """A prompt and its completion as stretches, like those of `render`; nothing in the prompt is scored.

    Two texts are joined as they are, and all of the completion is scored. Of two lists of messages, the answers in the
    completion are scored. Raises InputError like `render`, and for any other combination.
    """
    if isinstance(prompt, list) and isinstance(completion, list):
        given = [part._replace(scored=False) for part in _turns(prompt, "prompt", template)]
        return _joined([*given, *_turns(completion, "completion", template)])
    if isinstance(prompt, list) or isinstance(completion, list):
        raise InputError(
            f"'prompt' holds {type_name(prompt)} and 'completion' {type_name(completion)}; expected two texts, or two"
            " lists of messages"
        )
    texts = Stretch(checked_text(prompt, "'prompt'"), False), Stretch(checked_text(completion, "'completion'"), True)
    return _joined(texts)


def _turns(messages: object, key: str, template: Template) -> Iterator[Stretch]:
    if not isinstance(messages, list):
        raise InputError(f"{key!r} holds {type_name(messages)}; expected a list of messages with role and content")
    for number, message in enumerate(messages):
        place = f"{key}[{number}]"
        _check_message(message, place, template)
        role = message["role"]
        introduction, close = template.around[role]
        scored = role == "assistant" and message.get("weight") != 0
        yield from introduction
        yield Stretch(checked_text(message["content"], f"{place}.content"), scored)
        yield from (part._replace(scored=scored) for part in close)


def _check_message(message: object, place: str, template: Template) -> None:
    """Raise InputError, which names the `place`, unless a message is one that a template renders whole."""
    if not isinstance(message, dict):
        raise InputError(f"{place} is {type_name(message)}; expected an object with role and content")
    for needed in ("role", "content"):
        if needed not in message:
            raise InputError(f"{place} has no key {needed!r}; found {found_keys(message)}; rename it in the data")
    role = message["role"]
    if role not in template.chat.roles:
        remedy = "give its template as chat.tool" if role == "tool" else "change it in the data"
        raise InputError(f"{place}.role is {role!r}; expected {', '.join(template.chat.roles)}; {remedy}")
    for beside in _UNRENDERED:
        if message.get(beside) and message[beside] is not True:  # a flag is no text
            raise InputError(
                f"{place} has {beside}, which no template renders, so it would be left out; write it into the "
                "content as the model should write it, or leave the key or the conversation out"
            )
    weight = message.get("weight")  # a table has null in rows without one
    if weight not in (None, 0, 1) or isinstance(weight, bool):
        raise InputError(f"{place}.weight is {weight!r}; expected 0 (not trained on) or 1, or leave it out")


def _joined(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The stretches that are not empty, with neighbours joined that are scored alike; special tokens stand alone."""
    numbered = enumerate(stretch for stretch in stretches if stretch.text)
    neighbours = groupby(numbered, key=lambda item: (item[1].scored, item[0] if item[1].special else None))
    return [
        Stretch("".join(stretch.text for _, stretch in group), scored, number is not None)
        for (scored, number), group in neighbours
    ]
