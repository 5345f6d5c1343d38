"""The HTML building blocks of a report. Text is escaped here; content that is HTML already is Markup."""

from collections.abc import Iterable, Sequence
from typing import Any

from markupsafe import Markup

MANY_PHASES = 24  # with more, a table of phases is folded


def tag(name: str, *content: Any, **attributes: str) -> Markup:
    """<name class="...">content</name>; the trailing underscore of an attribute's name is dropped."""
    given = Markup("").join(Markup(' {}="{}"').format(key.rstrip("_"), value) for key, value in attributes.items())
    return Markup("<{0}{1}>{2}</{0}>").format(name, given, Markup("").join(content))


def section(title: str, *content: Any) -> Markup:
    """A heading and its content; empty if there is no content."""
    return tag("section", tag("h2", title), *content) if any(content) else Markup("")


def note(text: Any) -> Markup:
    return tag("p", text, class_="note")


def table(
    header: Sequence[Any], rows: Iterable[Sequence[Any]], *, text_columns: int = 1, grouped: bool = False
) -> Markup:
    """A table whose first `text_columns` columns are text and whose others are numbers. A cell may be a tag already.

    The first cell of a row names it, for the eye as it stays in view while the others scroll, and for screen readers.
    `grouped`: a row whose first cell is not empty begins a group, and there are lines only between groups. If all of
    `header` is empty, there is no head.
    """

    def cell(scope: str, i: int, value: Any) -> Markup:
        if isinstance(value, Markup) and value.startswith("<td"):
            return value
        look = {} if i < text_columns else {"class_": "n"}
        return tag("th", value, scope=scope, **look) if scope and value else tag("td", value, **look)

    head = tag("thead", tag("tr", *(cell("col", i, name) for i, name in enumerate(header)))) if any(header) else ""
    body = []
    for row in rows:
        of_group = {"class_": "first"} if grouped and row[0] else {}
        body.append(tag("tr", *(cell("" if i else "row", i, value) for i, value in enumerate(row)), **of_group))
    look = {"class_": "grouped"} if grouped else {}
    return tag("div", tag("table", head, tag("tbody", *body), **look), class_="scroll")


def figure(svg: str, caption: Any, *, wide: bool = False) -> Markup:
    drawing = tag("div", Markup(svg), class_="scroll")
    return tag("figure", tag("figcaption", caption), drawing, class_="wide" if wide else "panel")


def legend(colors: dict[str, str]) -> Markup:
    """A swatch and a name for each colour."""
    entries = (tag("li", tag("i", style=f"background:{color}"), name) for name, color in colors.items())
    return tag("ul", *entries, class_="legend")


def tiles(pairs: Iterable[tuple[str, Any, Any]]) -> Markup:
    """The few numbers that matter most, as (name, value, small text below it)."""
    entries = (
        tag("div", tag("dt", name), tag("dd", value, tag("small", below) if below else ""))
        for name, value, below in pairs
    )
    return tag("dl", *entries, class_="tiles")


def folded(summary: Any, *content: Any, open_: bool = False) -> Markup:
    return tag("details", tag("summary", summary), *content, **({"open": ""} if open_ else {}))


def table_of_phases(header: Sequence[Any], rows: Sequence[Sequence[Any]], *, text_columns: int = 1) -> Markup:
    """A table with a row for each phase, folded if there are many."""
    told = table(header, rows, text_columns=text_columns)
    return told if len(rows) <= MANY_PHASES else folded(f"{len(rows)} rows", told)


def bullets(lines: Iterable[Any]) -> Markup:
    return tag("ul", *(tag("li", line) for line in lines), class_="notes")


def document(title: str, *content: Any) -> str:
    body = Markup("\n").join(content)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{tag('title', title)}\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #202124; --muted: #6b7280; --line: #e3e7ec; --shade: #f6f8fa;
  --edge: #c3c8cf; --red: #c62828; --green: #00704f; --link: #0b57d0;
  --chart_paper: #fff; --chart_ink: #202124; --chart_muted: #6b7280; --chart_line: #e3e7ec; --chart_shade: #f6f8fa;
  --chart_axis: #b6bcc4; }
/* In the dark, charts are brightened for their curves: what they share with the page is darker by as much. */
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #16181c; --ink: #e4e7eb; --muted: #9aa3af; --line: #333940; --shade: #1f2329;
    --edge: #4b525c; --red: #ff8a80; --green: #5fd3a8; --link: #8ab4f8;
    --chart_paper: #101114; --chart_ink: #a3a5a8; --chart_muted: #6e747d; --chart_line: #24292e; --chart_shade: #16191d;
    --chart_axis: #40454c; }
  svg, .legend i, .swatch { filter: brightness(1.4); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", "Noto Sans", "DejaVu Sans", sans-serif; -webkit-text-size-adjust: 100%;
  overflow-wrap: break-word; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 18px; margin: 44px 0 10px; padding-top: 14px; border-top: 1px solid var(--line); }
h3 { font-size: 15px; margin: 24px 0 6px; }
p { margin: 6px 0; max-width: 78ch; }
.lead, .note, figcaption, small { color: var(--muted); }
.note, small { font-size: 13px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px; margin: 22px 0 0; }
.tiles div { background: var(--shade); border-radius: 8px; padding: 10px 14px; }
.tiles dt { color: var(--muted); font-size: 13px; }
.tiles dd { margin: 0; font-size: 21px; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
.tiles small { display: block; line-height: 1.35; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); gap: 18px 28px; }
figure { margin: 12px 0 0; min-width: 0; }
figcaption { font-size: 14px; color: var(--ink); font-weight: 600; }
figcaption small { font-weight: 400; display: inline-block; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: inherit !important; font-variant-numeric: tabular-nums; }
circle { fill: transparent; }
circle:hover { fill: var(--muted); fill-opacity: 0.45; }
rect:hover { stroke: var(--chart_muted); stroke-width: 1.5; }
.wide svg { min-width: 680px; }
.narrow { display: none; }
/* A shade at the edge beyond which there is more; the first two, which move with the content, hide it at the ends. */
.scroll { overflow-x: auto; margin: 8px 0; background:
  linear-gradient(to right, var(--paper) 40%, transparent) left / 40px 100% no-repeat local,
  linear-gradient(to left, var(--paper) 40%, transparent) right / 40px 100% no-repeat local,
  linear-gradient(to right, var(--edge), transparent) left / 12px calc(100% - 2px) no-repeat scroll,
  linear-gradient(to left, var(--edge), transparent) right / 12px calc(100% - 2px) no-repeat scroll; }
figure .scroll { margin: 0; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: baseline;
  white-space: nowrap; }
thead th { color: var(--muted); font-weight: 500; }
tbody th { font-weight: 400; }
tr > :first-child { position: sticky; left: 0; background: var(--paper); max-width: 40ch; }
table:not(:has(.text)) tr > :first-child { white-space: normal; }
td.text { white-space: normal; min-width: 320px; overflow-wrap: anywhere; }
.n { text-align: right; padding: 5px 8px 5px 10px; }
td.heat { white-space: normal; }
tbody tr:last-child > * { border-bottom: 0; }
.grouped tbody tr > * { border-bottom: 0; padding-top: 2px; padding-bottom: 2px; }
.grouped tbody tr.first > * { border-top: 1px solid var(--line); padding-top: 6px; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 8px 0 0; padding: 0;
  font-size: 13px; overflow-wrap: anywhere; }
.legend i, .swatch { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; }
.bad { color: var(--red); font-weight: 600; }
.good { color: var(--green); font-weight: 600; }
details { margin: 10px 0; }
summary { cursor: pointer; color: var(--link); }
pre { background: var(--shade); border-radius: 8px; padding: 12px 14px; overflow-x: auto; font: 12.5px/1.45
  ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
ul.notes { padding-left: 18px; margin: 8px 0; max-width: 90ch; font-size: 14px; }
@media (max-width: 760px) { .narrow { display: block; } td.text { min-width: 200px; }
  tr > :first-child { white-space: normal; max-width: 40vw; } }
@media (max-width: 600px) { main { padding: 20px 14px 48px; } h1 { font-size: 23px; } .tiles dd { font-size: 18px; }
  .tiles { grid-template-columns: repeat(2, 1fr); } .wide svg { min-width: 860px; } }
@media print, (max-width: 600px) { .panel svg text { font-size: 14px !important; } }
/* On paper nothing scrolls, and colours that tell something are printed as well. */
@page { margin: 14mm; }
@media print { main { max-width: none; padding: 0; } .scroll { overflow: visible; background: none; }
  .panels { grid-template-columns: 1fr 1fr; } figure, tr, .tiles div { break-inside: avoid; }
  h2, h3, .note, .legend, figcaption { break-after: avoid; } .narrow { display: none; }
  table, small { font-size: 12px; } th, td { white-space: normal; } td.text { min-width: 0; }
  .n { padding-left: 4px; padding-right: 4px; }
  .legend i, .swatch, td.heat, .tiles div { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
