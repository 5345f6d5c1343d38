"""The continuation of a prompt, token by token: whole characters, up to where it ends."""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from curriculum.data.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Prompt:
    """The beginning of a text: `ids`, int32, from the one that opens a document on, and `text`, which shows them.

    `ends`: the ids besides end-of-text that end its continuation. `prefixed`: whether the tokenizer puts its prefix
    before what follows.
    """

    text: str
    ids: np.ndarray
    ends: tuple[int, ...] = ()
    prefixed: bool = False


@dataclass(frozen=True)
class Generation:
    """A prompt's continuation. `text` ends before the stop string or end-of-text; `ids` are all that were drawn.

    finished: "stop" at end-of-text or a stop string, "length" after max_tokens, "max_seq_len" if the model has no more
    positions. A character cut off by the end is left out; bytes that are not UTF-8 become U+FFFD.
    """

    prompt: str
    text: str
    finished: Literal["stop", "length", "max_seq_len"]
    num_prompt_tokens: int
    ids: tuple[int, ...] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "text": self.text,
            "finished": self.finished,
            "prompt_tokens": self.num_prompt_tokens,
            "tokens": len(self.ids),
        }


class NewText(NamedTuple):
    """New text of prompt `index`; `whole` is the complete continuation, once it has ended."""

    index: int
    text: str
    whole: Generation | None


@dataclass(eq=False)
class Continuation:
    """A continuation in progress; `whole` is None until it has ended.

    key: uint32 [2], for its draws. last: the last position that its tokens may reach, counted from 0 at the prompt's
    first token. ends_as: its `finished` if it gets there.
    """

    index: int
    prompt: Prompt
    key: np.ndarray
    last: int
    ends_as: Literal["length", "max_seq_len"]
    stop: tuple[str, ...]
    whole: Generation | None = None

    def __post_init__(self):
        self._ids: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text, self._num_shown = "", 0

    def add(self, ids: Iterable[int], tokenizer: Tokenizer) -> NewText:
        """The text that newly drawn ids add; ids after its end are ignored."""
        for id_ in ids:
            if self.whole is None:
                self._add(int(id_), tokenizer)
        held = 0 if self.whole else max((_begun(self._text, stop) for stop in self.stop), default=0)
        shown = self._text[self._num_shown : len(self._text) - held]
        self._num_shown += len(shown)
        return NewText(self.index, shown, self.whole)

    def _add(self, id_: int, tokenizer: Tokenizer) -> None:
        self._ids.append(id_)
        if id_ == tokenizer.eot or id_ in self.prompt.ends:
            return self._end("stop")
        has_prefix = len(self._ids) == 1 and (self.prompt.prefixed or len(self.prompt.ids) == 1)
        for character in self._decoder.decode(tokenizer.decode_bytes(np.array([id_]), has_prefix)):
            self._text += character
            # The stop string that is complete first ends the text, the longest of several, however tokens cut it.
            if found := [stop for stop in self.stop if self._text.endswith(stop)]:
                self._text = self._text[: -max(map(len, found))]
                return self._end("stop")
        if len(self.prompt.ids) + len(self._ids) > self.last:
            self._end(self.ends_as)

    def _end(self, finished: Literal["stop", "length", "max_seq_len"]) -> None:
        self.whole = Generation(self.prompt.text, self._text, finished, len(self.prompt.ids), tuple(self._ids))


def _begun(text: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
