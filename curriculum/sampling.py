"""The settings for drawing text from a model. They are apart from the drawing itself, as the config reads them too."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Sampling:
    """How a continuation is drawn, and where it ends. By default top_k, top_p and min_p filter nothing.

    They apply after the temperature, and keep the ids that pass all three; top_p is a share of the mass that top_k
    left. Ids that are equally likely are kept or left out together.
    """

    max_tokens: int = 128
    """Most tokens in a continuation."""
    temperature: float = 0.8
    """Divides the logits: below 1 favours likely tokens; 0 always takes the likeliest."""
    top_k: int = 0
    """Draw only from this many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Draw only from the likeliest tokens that together have this probability; 1: all."""
    min_p: float = 0.0
    """Draw only from tokens at least this fraction as likely as the likeliest one; 0: all."""
    seed: int = 0
    """The same seed, prompt and parameters give the same text."""
    stop: tuple[str, ...] = ()
    """A continuation ends before any of these texts, or at end-of-text."""

    def problems(self) -> list[tuple[str, str]]:
        """What is wrong with the settings, as (field, message)."""
        problems = []

        def expect(name: str, kind: type, fits: Callable[[Any], bool], expected: str) -> None:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kind):
                what = "a whole number" if kind is Integral else "a number"
                problems.append((name, f"got {value!r}, expected {what}: {expected}"))
            elif not fits(value):
                problems.append((name, f"got {value}, expected {expected}"))

        expect("max_tokens", Integral, lambda n: 1 <= n <= 10**6, "1 to 1000000")
        expect("temperature", Real, lambda t: t == 0 or 1e-6 <= t <= 1e6, "0, or 1e-6 to 1e6")
        expect("top_k", Integral, lambda n: 0 <= n < 2**31, "0 (all tokens) or more")
        expect("top_p", Real, lambda p: 0 < p <= 1, "more than 0 and at most 1 (all tokens)")
        expect("min_p", Real, lambda p: 0 <= p <= 1, "0 (all tokens) to 1")
        expect("seed", Integral, lambda n: 0 <= n <= LARGEST_SEED, f"0 to {LARGEST_SEED}")
        if not isinstance(self.stop, tuple | list) or not all(isinstance(text, str) for text in self.stop):
            problems.append(("stop", f"got {self.stop!r}, expected a tuple of texts"))
        elif "" in self.stop:
            problems.append(("stop", "got an empty text, expected at least one character"))
        elif broken := [text for text in self.stop if any("\ud800" <= c <= "\udfff" for c in text)]:
            problems.append(("stop", f"got {broken[0]!r}, expected text that UTF-8 can encode"))
        return problems


@dataclass(frozen=True)
class GenerateSection(Sampling):
    """What the model continues while it is trained, and how; `Sampling`'s fields are those of the command."""

    max_tokens: int = 64
    """Most tokens in a continuation."""
    prompts: tuple[str, ...] = ()
    """Fixed prompts; for an empty one the model writes the beginning too."""
    from_evalset: str | None = None
    """An eval set whose documents' beginnings are prompts too; the primary set if there are no prompts."""
    num: int = 2
    """How many documents of that set: the first ones longer than `prompt_tokens`."""
    prompt_tokens: int = 32
    """Tokens of such a beginning; in a conversation it ends before the first answer."""

    @property
    def evalset(self) -> str | None:
        """The eval set whose documents' beginnings are prompts, None if there is none."""
        return self.from_evalset or (None if self.prompts else "primary")

    def problems(self) -> list[tuple[str, str]]:
        problems = super().problems()
        for name in ("num", "prompt_tokens"):
            if not 1 <= getattr(self, name) <= 10**6:
                problems.append((name, f"got {getattr(self, name)}, expected 1 to 1000000"))
        return problems
