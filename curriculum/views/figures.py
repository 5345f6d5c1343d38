"""The charts of a report: SVG to inline in a page, with the page's fonts and no outside references.

The same arguments give the same bytes. Sizes are in CSS pixels.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from curriculum.record.queries import EvalPoint
from curriculum.record.wording import loss

# Colour-blind readers tell these apart, the first ones best. Each has a contrast of 3 or more to a white page.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#882255", "#a080f0", "#5a5a00", "#c27ab0", "#3a3a9e", "#5d5d5d")
OTHER, ALL = "#c9ced4", "#868d97"
RED, GOLD = "#c62828", "#e0a100"
WIDE = (1040, 330)
PANEL = (500, 250)
MAX_POINTS = 400
_MAX_OF_CHART = 2800  # points of all its lines together: each has a tooltip, and a page may have a chart for each set
_MAX_COLUMNS, _ROW_HEIGHT = 80, 20  # of a chart of rises
_ON_TOP = 0.985  # of the height: the marks of evals that are not finite
_INK, _MUTED, _AXIS, _LINE, _SHADE, _PAPER = "#202124", "#6b7280", "#b6bcc4", "#e3e7ec", "#f6f8fa", "#ffffff"
_OF_PAGE = {_INK: "ink", _MUTED: "muted", _AXIS: "axis", _LINE: "line", _SHADE: "shade", _PAPER: "paper"}  # dark too
_PLACES = re.compile(r' (?:d|x|y|width|height|transform)="[^"]*"')  # attributes that hold coordinates
_LONG = re.compile(r"-?\d+\.\d{3,}")
_PX = 72  # matplotlib's SVG has 72 units per inch
_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "text.parse_math": False,
    "text.color": _INK,
    "axes.edgecolor": _AXIS,
    "axes.labelcolor": _MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _LINE,
    "grid.linewidth": 0.8,
    "xtick.color": _AXIS,
    "ytick.color": _AXIS,
    "xtick.labelcolor": _MUTED,
    "ytick.labelcolor": _MUTED,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "axes.unicode_minus": True,
}


class Phase(NamedTuple):
    """A phase to shade: the steps [start, end)."""

    name: str
    start: int
    end: int


class Mark(NamedTuple):
    """Something that happened to a set at a step: `kind` is gold, regressed or recovered."""

    kind: str
    step: int


class Curve(NamedTuple):
    """One line of a chart; `sems` may hold None. A y that is not finite breaks it, and eval charts mark it on top.

    end: what stands at the line's end beside others; wide charts have the label there.
    """

    label: str
    color: str
    xs: Sequence[float]
    ys: Sequence[float]
    sems: Sequence[float | None] = ()
    style: str = "-"
    marks: Sequence[Mark] = ()
    end: str = ""


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name, in turn."""
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(names)}


def eval_curve(
    label: str, color: str, points: Sequence[EvalPoint], x: str = "step", y: str = "loss", **more: Any
) -> Curve:
    """A set's `loss`, or `bpb`, with its standard errors over `step` or `tokens`."""
    xs, ys = [getattr(p, x) for p in points], [getattr(p, y) for p in points]
    sems = [p.sem if p.sem is None or y == "loss" else p.sem * getattr(p, y) / p.loss for p in points]
    return Curve(label, color, xs, ys, sems, **more)


def eval_chart(
    title: str,
    curves: Sequence[Curve],
    phases: Sequence[Phase] = (),
    *,
    size: tuple[int, int] = PANEL,
    x_label: str = "step",
    dotted_at: Iterable[float] = (),
) -> str:
    """Losses with bands of +-1.96 standard errors, shaded phases, event marks, and dotted lines at `dotted_at`."""
    with _styled(title):
        wide = size[0] > 700
        ends = [_short(c.label) if wide else c.end for c in curves] if len(curves) > 1 else []
        right = 22 + round(6.8 * max(map(len, ends), default=0))
        figure, axes = _axes(size, right=right, top=24 if phases and wide else 10)
        _shade(axes, phases, _x_range(curves), names=wide)
        for curve in curves:
            _draw(axes, curve, len(curves))
        _fit_y(axes, curves)
        for curve in curves:
            _marks(axes, curve)
        for x in dotted_at:
            axes.axvline(x, color=_MUTED, linewidth=1, linestyle=(0, (1, 2)))
        if right > 22:
            _end_labels(axes, curves, ends)
        _finish(axes, x_label)
        low, high = axes.get_ylim()
        lost = []  # what is marked on top
        for curve in curves:
            xs = [x for x, y in zip(curve.xs, curve.ys, strict=True) if not math.isfinite(y)]
            lost.append(Curve(curve.label, curve.color, xs, [low + _ON_TOP * (high - low)] * len(xs)))
        told = _told(axes, curves, x_label, loss) + _told(axes, lost, x_label, lambda _: "not finite")
        return _svg(figure, title, told)


def rises(points: Sequence[EvalPoint]) -> list[tuple[int, float]]:
    """(step, nats above the lowest loss up to then) of each eval of a set; inf where the loss is not finite."""
    lowest, found = math.inf, []
    for point in points:
        finite = math.isfinite(point.loss)
        lowest = min(lowest, point.loss) if finite else lowest
        found.append((point.step, point.loss - lowest if finite else math.inf))
    return found


def rise_chart(
    title: str,
    sets: Mapping[str, Sequence[tuple[int, float]]],
    phases: Sequence[Phase],
    marks: Mapping[str, Sequence[Mark]],
) -> str:
    """A row for each set, shaded from eval to eval by its `rises`: full at the largest, red where it is not finite.

    Evals that are too many share a column, which has the largest of their rises. A triangle is a new regression.
    """
    with _styled(title):
        names = [_short(name) for name in sets]
        size = (WIDE[0], 70 + _ROW_HEIGHT * len(sets))
        figure, axes = _axes(size, left=16 + round(6.6 * max(map(len, names))), top=24)
        steps = sorted({step for of_set in sets.values() for step, _ in of_set})
        _shade(axes, phases, (steps[0], max(steps[-1], steps[0] + 1)), names=True)
        axes.set_ylim(len(sets), 0)
        axes.set_yticks([row + 0.5 for row in range(len(sets))], names)
        axes.grid(False)
        _finish(axes, "step")
        largest = max((r for of_set in sets.values() for _, r in of_set if math.isfinite(r)), default=0) or 1
        height = figure.bbox.height

        def place(step: float, row: float) -> tuple[float, float]:
            x, y = axes.transData.transform((step, row))
            return x, height - y

        drawn = []
        for row, (name, of_set) in enumerate(sets.items()):
            for begun, end, step, rise in _columns(of_set):
                color, depth = (PALETTE[1], rise / largest) if math.isfinite(rise) else (RED, 1)
                if depth < 0.02:
                    continue
                (left, top), (right, bottom) = place(begun, row + 0.1), place(end, row + 0.9)
                told = escape(f"{name}, step {step:,}: {f'{rise:+.4f}' if math.isfinite(rise) else 'not finite'}")
                drawn.append(
                    f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" '
                    f'fill="{color}" fill-opacity="{depth:.2f}"><title>{told}</title></rect>'
                )
            for mark in marks.get(name, ()):
                if mark.kind == "regressed":
                    x, y = place(mark.step, row + 0.5)
                    told = escape(f"{name}, step {mark.step:,}: regressed")
                    shape = f"M{x - 5:.1f},{y + 4:.1f}L{x + 5:.1f},{y + 4:.1f}L{x:.1f},{y - 5:.1f}Z"
                    drawn.append(f'<path d="{shape}" fill="{RED}"><title>{told}</title></path>')
        return _svg(figure, title, "\n".join(drawn))


def _columns(of_set: Sequence[tuple[int, float]]) -> Iterator[tuple[int, int, int, float]]:
    """(first step, last step, step of the largest rise, that rise) of at most _MAX_COLUMNS stretches of evals."""
    per_column = -(-len(of_set) // _MAX_COLUMNS)
    begun = of_set[0][0]
    for i in range(1, len(of_set), per_column):
        column = of_set[i : i + per_column]
        end = column[-1][0]
        step, rise = max(column, key=lambda measured: measured[1])
        yield begun, end, step, rise
        begun = end


def line_chart(title: str, curves: Sequence[Curve], phases: Sequence[Phase], *, from_zero: bool = False) -> str:
    """Lines without bands: training losses, the learning rate, the gradient norm."""
    with _styled(title):
        figure, axes = _axes(PANEL, left=62 if from_zero else 44)
        _shade(axes, phases, (0, _x_range(curves)[1]), names=False)  # from 0, as in the mixture chart
        for curve in curves:
            _draw(axes, curve, len(curves))
        if from_zero:
            axes.set_ylim(0, 1.08 * max((y for c in curves for y in c.ys if math.isfinite(y)), default=1) or 1)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: short_rate(y)))
        else:
            _fit_y(axes, curves)
        _finish(axes, "step")
        return _svg(figure, title, _told(axes, curves, "step", short_rate if from_zero else loss))


def mixture_chart(
    title: str,
    steps: Sequence[float],
    shares: Mapping[str, Sequence[float]],
    colors: Mapping[str, str],
    phases: Sequence[Phase],
) -> str:
    """Shares of the sources over steps, stacked to 100 %; two points at one step make a sharp edge."""
    with _styled(title):
        figure, axes = _axes(PANEL, left=50)
        if steps:
            areas = axes.stackplot(steps, *shares.values(), colors=[colors[name] for name in shares], alpha=0.8)
            for area in areas:
                area.set(edgecolor=_PAPER, linewidth=0.7)
            axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
        axes.set_ylim(0, 1)
        axes.grid(False)
        for phase in phases:
            if steps and steps[0] < phase.start < steps[-1]:
                axes.axvline(phase.start, color=_PAPER, linewidth=1.2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f} %"))
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        _finish(axes, "step")
        return _svg(figure, title)


def thinned(xs: Sequence[float], *series: Sequence[float], most: int) -> tuple[list[float], list[list[float]], int]:
    """Means over bins of neighbouring rows, at most `most` bins: (last x of each bin, binned series, rows per bin).

    With one row per bin the values stay as they are. Otherwise a mean is over finite values, and NaN if a bin has none.
    """
    per_bin = -(-len(xs) // most)
    if per_bin <= 1:
        return list(xs), [list(values) for values in series], 1
    starts = range(0, len(xs), per_bin)
    binned = [[_mean(values[i : i + per_bin]) for i in starts] for values in series]
    return [xs[min(i + per_bin, len(xs)) - 1] for i in starts], binned, per_bin


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan


def _styled(title: str):
    return matplotlib.rc_context({**_STYLE, "svg.hashsalt": title.encode(errors="backslashreplace").decode()})


def _axes(size: tuple[int, int], *, left: int = 44, right: int = 22, top: int = 10) -> tuple[Figure, Axes]:
    (width, height), bottom = size, 40
    figure = Figure(figsize=(width / _PX, height / _PX), dpi=_PX)
    frame = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    return figure, figure.add_axes(frame)


def _x_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """(first, last) x, widened around a single x so that it is in the middle."""
    xs = [x for curve in curves for x in (*curve.xs[:1], *curve.xs[-1:])]
    if not xs:
        return 0, 1
    return (min(xs), max(xs)) if min(xs) < max(xs) else (xs[0] - 0.5, xs[0] + 0.5)


def _shade(axes: Axes, phases: Sequence[Phase], x_range: tuple[float, float], *, names: bool) -> None:
    """Set the x range and shade every other phase. `names`: write the name above, else the number, if either fits."""
    low, high = x_range
    axes.set_xlim(low, high)
    per_step = axes.get_window_extent().width / (high - low)
    for i, phase in enumerate(phases):
        start, end = max(phase.start, low), min(phase.end, high)
        if start >= end:
            continue
        if i % 2 == 0:
            axes.axvspan(start, end, color=_SHADE, linewidth=0, zorder=0)
        width = (end - start) * per_step
        name = next((n for n in (phase.name, str(i + 1)) if 6.3 * len(n) + 6 < width), None)
        if names and name:
            at = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
            axes.annotate(name, ((start + end) / 2, 1), (0, 7), ha="center", color=_MUTED, fontsize=10.5, **at)


def _draw(axes: Axes, curve: Curve, beside: int) -> None:
    xs, ys, sems = _kept(curve, beside)
    if any(sems):
        low = [y - 1.96 * (s or 0) for y, s in zip(ys, sems, strict=True)]
        high = [y + 1.96 * (s or 0) for y, s in zip(ys, sems, strict=True)]
        axes.fill_between(xs, low, high, color=curve.color, alpha=0.16, linewidth=0)
    if curve.style == "D":
        axes.plot(xs, ys, "D", color=curve.color, markersize=5, markerfacecolor=_PAPER, markeredgewidth=1.4)
        return
    width = 1.3 if curve.style != "-" else 1.8
    axes.plot(xs, ys, linestyle=curve.style, color=curve.color, linewidth=width)
    drawn = [False, *(not math.isnan(y) for y in ys), False]
    alone = [i for i in range(len(xs)) if drawn[i : i + 3] == [False, True, False]]  # no line through one point: a dot
    if alone:
        axes.plot([xs[i] for i in alone], [ys[i] for i in alone], "o", color=curve.color,
                  markersize=7 if len(xs) == 1 else 3.5)  # fmt: skip


def _kept(curve: Curve, beside: int) -> tuple[list[float], list[float], list[float | None]]:
    """At most MAX_POINTS points plus the last one, as (xs, ys, sems); a y that is not finite becomes NaN.

    Fewer of one of many lines in a chart, which are `beside` in all.
    """
    every = -(-len(curve.xs) // max(2, min(MAX_POINTS, _MAX_OF_CHART // beside))) or 1
    chosen = sorted({*range(0, len(curve.xs), every), len(curve.xs) - 1} if len(curve.xs) else ())
    ys = [curve.ys[i] if math.isfinite(curve.ys[i]) else math.nan for i in chosen]
    return [curve.xs[i] for i in chosen], ys, [curve.sems[i] if curve.sems else None for i in chosen]


def _fit_y(axes: Axes, curves: Sequence[Curve]) -> None:
    """Set the y limits. If the first steps of runs would take up too much of the height, fit only what comes after."""
    spans, later = [], []  # (x, low, high) of all points, and of those after the first fifth of their own curve
    for curve in curves:
        errors = [s or 0 for s in curve.sems] or [0] * len(curve.xs)
        points = zip(curve.xs, curve.ys, errors, strict=True)
        drawn = [(x, y - 1.96 * s, y + 1.96 * s) for x, y, s in points if math.isfinite(y)]
        spans += drawn
        later += [span for span in drawn if span[0] >= curve.xs[0] + 0.2 * (curve.xs[-1] - curve.xs[0])]
    if not spans:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no finite loss", transform=axes.transAxes, ha="center", color=_MUTED)
        return
    low, high = min(s[1] for s in spans), max(s[2] for s in spans)
    if len(later) >= 4 * max(1, len(curves)):
        low_later, high_later = min(s[1] for s in later), max(s[2] for s in later)
        if high - low > 1.8 * (high_later - low_later) > 0:
            high = high_later + 0.4 * (high_later - low_later)
            first = max((y for c in curves for y in c.ys[:1] if math.isfinite(y)), default=high)
            if first > high:
                below = max(high - 0.05 * (high - low), high_later)  # the mark's lower edge
                cut = max(x for x, _, top in spans if top > below)
                above = [c for c in curves if c.ys and high < c.ys[0] < math.inf]
                back = max(min((x for x in c.xs if x > cut), default=cut) for c in above)
                axes.annotate(f"↑ from {first:.2f}", (back, 1), (6, -9), xycoords=axes.get_xaxis_transform(),
                              textcoords="offset points", color=_MUTED, fontsize=10)  # fmt: skip
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.1
    axes.set_ylim(low - margin, high + margin)


def _marks(axes: Axes, curve: Curve) -> None:
    losses = dict(zip(curve.xs, curve.ys, strict=True))
    bottom, top = axes.get_ylim()
    for x, y in losses.items():
        if not math.isfinite(y):
            axes.plot([x], [_ON_TOP], "x", color=RED, markersize=6, transform=axes.get_xaxis_transform(), clip_on=False)
    looks = {
        "regressed": {"marker": "^", "color": RED, "markersize": 8},
        "recovered": {"marker": "o", "color": curve.color, "markerfacecolor": _PAPER, "markersize": 7},
        "gold": {"marker": "*", "color": GOLD, "markersize": 15, "markeredgecolor": "#8a6300"},
    }
    for mark in curve.marks:
        y = losses.get(mark.step)
        if y is not None:
            y = min(max(y, bottom), top) if math.isfinite(y) else top
            axes.plot([mark.step], [y], linestyle="", zorder=5, clip_on=False, **looks[mark.kind])


def _end_labels(axes: Axes, curves: Sequence[Curve], ends: Sequence[str]) -> None:
    """A text right of each line, and a stroke from its end to it; texts that would overlap are moved apart."""
    wanted = []
    for curve, text in zip(curves, ends, strict=True):
        finite = [(x, y) for x, y in zip(curve.xs, curve.ys, strict=True) if math.isfinite(y)]
        if finite:
            wanted.append((*axes.transData.transform(finite[-1]), text, curve.color))
    wanted.sort(key=lambda each: each[1])
    box = axes.get_window_extent()
    gap = min(14.0, box.height / max(len(wanted) - 1, 1))
    groups: list[tuple[float, int]] = []  # texts that touch: where the first would be, on average, and how many
    for i, (_, y, *_) in enumerate(wanted):
        at, num = y - gap * i, 1
        while groups and groups[-1][0] > at:
            before, among = groups.pop()
            at, num = (before * among + at * num) / (among + num), among + num
        groups.append((at, num))
    places: list[float] = []
    for at, num in groups:
        places += [max(at, box.y0) + gap * i for i in range(len(places), len(places) + num)]
    top = box.y1
    for i in reversed(range(len(places))):
        places[i] = min(places[i], top)
        top = places[i] - gap
    for place, (x, y, text, color) in zip(places, wanted, strict=True):
        y = min(max(y, box.y0), box.y1)
        axes.plot([box.x1 + 3, box.x1 + 11], [y, place], color=color, transform=None, clip_on=False)
        if x < box.x1 - 8:
            axes.plot([x + 5, box.x1], [y, y], color=color, linewidth=0.8, linestyle=(0, (1, 4)), transform=None)
        axes.annotate(text, (box.x1 + 14, place), xycoords="figure pixels", va="center", color=_INK)


def _short(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:27]}…"


def _finish(axes: Axes, x_label: str) -> None:
    axes.set_xlabel(x_label, fontsize=10.5, loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_count(x)))


def short_count(value: float) -> str:
    """1200 is `1,200`, 75000 is `75k`, 1.5e9 is `1.5B`."""
    value = float(f"{value:.4g}") if abs(value) >= 1e4 else value  # before its unit is chosen: 999,999 is 1M
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:.4g}{unit}"
    return f"{value:,.0f}"


def short_rate(value: float) -> str:
    """0.00175 is `1.75e-3`."""
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}" if value else "0"


def _told(axes: Axes, curves: Sequence[Curve], x_label: str, text_of: Callable[[float], str]) -> str:
    """The tooltip of each drawn point, as the title of a transparent circle."""
    box, height, circles = axes.get_window_extent(), axes.figure.bbox.height, []
    for curve in curves:
        for x, y, sem in zip(*_kept(curve, len(curves)), strict=True):
            at_x, at_y = axes.transData.transform((x, y))
            if math.isfinite(y) and box.y0 <= at_y <= box.y1:
                error = f" (sem {loss(sem)})" if sem else ""
                text = escape(f"{curve.label}, {x_label} {x:,.0f}: {text_of(y)}{error}")
                circles.append(f'<circle cx="{at_x:.1f}" cy="{height - at_y:.1f}" r="6"><title>{text}</title></circle>')
    return "\n".join(circles)


def _svg(figure: Figure, title: str, told: str = "") -> str:
    """The figure as an <svg> element that the page scales, labelled with its title, without any outside address."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>\s*", "", drawn, flags=re.DOTALL)
    drawn = _PLACES.sub(lambda m: _LONG.sub(lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), m[0]), drawn)
    view_box = re.search(r'viewBox="([^"]*)"', drawn)[1]
    drawn = re.sub(r"<svg[^>]*>", "", drawn, count=1)
    # Ids of parts (`axes_1`) repeat in every drawing and are dropped. Ids that are referred to are salted by the title.
    meant = set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', drawn))
    drawn = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in meant else "", drawn)
    for color, variable in _OF_PAGE.items():
        drawn = drawn.replace(f": {color}", f": var(--chart_{variable})")
    name, drawn = escape(title), drawn.strip().removesuffix("</svg>")
    return f'<svg viewBox="{view_box}" role="img" aria-label="{name}">{drawn}{told}</svg>'
