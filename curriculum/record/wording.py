"""How every view writes numbers of the record, lists of names, untrusted text, and tables of plain text."""

import math
import shlex
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from curriculum.record.events import number
from evalsets.summary import Recorded

# What the intervals of alarms and of the transfer matrix cover; those of losses and comparisons cover the text alone.
WITH_SCATTER = "over the choice of held-out text and the scatter of neighbouring checkpoints"

NOT_JUDGED = "not judged: too little text for a standard error"

_JOINERS = "\u200c\u200d"
MOST_NAMED = 8  # sets in a row of names
MOST_SOURCES = 12  # in a row of shares or tokens
MAX_RISE = 10.0  # nats per token; about the loss of a uniform guess over a large vocabulary


def loss(value: Any) -> str:
    """Nats or bits in four decimals; `-` if there is no number."""
    as_float = number(value)
    return "-" if as_float is None else f"{as_float:.4f}"


def smallest_rise(value: Any) -> str:
    """The smallest rise that an eval of a set finds, as `loss` writes it, up to MAX_RISE."""
    as_float = number(value)
    return f"above {MAX_RISE:g}" if as_float is not None and as_float > MAX_RISE else loss(value)


def few_documents(names: Iterable[str]) -> str:
    """What the standard errors of sets with few documents cover; the caller puts "few documents" before it."""
    return (
        f"{listed(list(names))}: fewer than 20 distinct ones each, in 20 windows or more; their standard errors cover "
        "more text from the same documents, not other documents"
    )


def unseen(detectable: float | None, tolerance: float, sem: float | None) -> str | None:
    """Which rises of a set without an alarm would not show; None if one of twice the tolerance would.

    `sem` is the standard error of its last loss; without one no rise is judged.
    """
    if sem is None:
        return NOT_JUDGED
    if detectable is None:
        return "the smallest detectable rise is not known"
    if detectable <= 2 * tolerance:
        return None
    if detectable > MAX_RISE:
        return f"no rise below {MAX_RISE:g} would be detected"
    return f"a rise below {detectable:.2g} may go undetected"


def signed(value: Any) -> str:
    """A difference in four decimals, always with its sign."""
    as_float = number(value)
    return "-" if as_float is None else f"{round(as_float, 4) + 0.0:+.4f}"  # no -0.0000


def interval_text(interval: tuple[float, float] | None) -> str:
    """The two ends of an interval of differences."""
    return "-" if interval is None else f"{signed(interval[0])} to {signed(interval[1])}"


def duration(seconds: float) -> str:
    """`42s`, `1m42s`, from ten minutes on `15m`, `52.3h`."""
    minutes, whole_seconds = divmod(int(seconds), 60)
    if minutes < 10:
        return f"{minutes}m{whole_seconds:02d}s" if minutes else f"{whole_seconds}s"
    return f"{minutes}m" if minutes < 60 else f"{seconds / 3600:.1f}h"


def moment(timestamp: str) -> str:
    """`2026-11-25 18:40+01:00` of an event's timestamp; runs of one folder may come from machines of several zones."""
    return f"{timestamp[:16]}{timestamp[19:]}".replace("T", " ")


def percent_done(done: int, total: int, digits: int = 0) -> str:
    """`55.6`; only what is complete has 100."""
    most = 100 if done == total else 100 - 10**-digits
    return f"{min(100 * done / total, most):.{digits}f}"


def epochs_text(epochs: float) -> str:
    """`<0.0001`, `0.25`, `12.3`, `1,470`."""
    if 0 < epochs < 1e-4:
        return "<0.0001"
    return f"{epochs:.3g}" if epochs < 999.5 else f"{epochs:,.0f}"


def size_text(num_bytes: float) -> str:
    """`512 bytes`, `1.5 kB`, `1,234.5 GB`."""
    for unit, unit_bytes in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.99995 * unit_bytes:  # what is rounded to a thousand of a unit is one of the next
            return f"{num_bytes / unit_bytes:,.1f} {unit}"
    return counted(round(num_bytes), "byte")


def counted(num: int, noun: str) -> str:
    """`1 document`, `1,200 documents`."""
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def first_of(names: Sequence[str], most: int) -> str:
    """`a, b, c`; of more than `most` names `a, b and 12 more`."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def largest(sizes: Mapping[str, float], text: Callable[[str], str], most: int = MOST_SOURCES) -> list[str]:
    """The text of each name; of more than `most` those of the largest sizes, largest first, and `492 more`."""
    if len(sizes) <= most:
        return [text(name) for name in sizes]
    names = sorted(sizes, key=lambda name: abs(sizes[name]), reverse=True)
    return [*map(text, names[:most]), f"{len(names) - most} more"]


def typed(option: str) -> str:
    """An option that a run remembers, such as `--set a=b c`, quoted for a shell."""
    flag, _, value = option.partition(" ")
    return f"{flag} {shlex.quote(value)}" if value else flag


def mesh_text(sizes: Mapping[str, int]) -> str:
    """`data 2 x fsdp 4 x tensor 1`, of the size of each axis."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items())


def printable(text: str, also: str = "") -> str:
    """Text of a model or a document, with all but printable characters and those in `also` escaped.

    Printable are also the blanks of all scripts, and the joiners that Persian, Hindi and emoji are written with.
    """

    def is_shown(c: str) -> bool:
        return c.isprintable() or c in _JOINERS or c in also or unicodedata.category(c) == "Zs"

    return "".join(c if is_shown(c) else repr(c)[1:-1] for c in text)


def metric_titles(of: type[Recorded] = Recorded) -> list[str]:
    """The titles of the columns that tables of evals have for metrics: the recorded ones, or all of `Summary`."""
    return [metric.metadata["title"] for metric in fields(of) if metric.metadata]


def metric_texts(measured: Mapping[str, Any], of: type[Recorded] = Recorded) -> list[str]:
    """The cells under `metric_titles`; `-` for a metric that is None or not there."""
    shown = {metric.name: metric.metadata["format"] for metric in fields(of) if metric.metadata}
    numbers = {name: number(measured.get(name)) for name in shown}
    return [
        "-" if as_float is None else "nan" if math.isnan(as_float) else format(as_float, shown[name])
        for name, as_float in numbers.items()
    ]


def columns(rows: list[tuple[str, ...]], right: Iterable[int], indent: str = "  ") -> list[str]:
    """Rows of equal length as printable lines with aligned columns; those in `right` are aligned to the right."""
    rows, right = [tuple(map(printable, row)) for row in rows], set(right)
    widths = [max(_width(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            blanks = " " * (width - _width(cell))
            cells.append(blanks + cell if i in right else cell + blanks)
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def _width(text: str) -> int:
    """The columns of a terminal that a text takes: a letter of Chinese takes two, a mark upon another letter none."""
    if text.isascii():
        return len(text)
    upright = (c for c in text if unicodedata.category(c) not in ("Mn", "Me", "Cf"))
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in upright)
