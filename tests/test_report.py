"""The report: self-contained, the same bytes for the same run, and showing what the record says."""

import dataclasses
import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from command_line import run_here
from related_runs import branch, recipe_runs
from written_run import PHASES, command, offender, windows, without, write_run

from curriculum.errors import InputError
from curriculum.record.events import DamagedRun, unstamped
from curriculum.record.queries import EvalPoint, eval_points
from curriculum.run import load_run
from curriculum.views.figures import (
    ALL,
    PALETTE,
    PANEL,
    RED,
    WIDE,
    Curve,
    Mark,
    eval_chart,
    eval_curve,
    rises,
    short_count,
    short_rate,
    thinned,
)
from curriculum.views.inspection import inspect_run
from curriculum.views.inspection_text import text as inspect_text
from curriculum.views.report import report, write_report
from curriculum.views.report_evals import _shades
from curriculum.views.report_run import _mixture_course
from curriculum.views.report_runs import overlays
from evalsets.metrics import summarise

ALARM = {"phase": "domain", "action": "kept as kept/80", "offenders": [offender("law", "best", 60, first_step=80)]}
WELL = {"phase": "domain", "offenders": [offender("law", "best", 60, first_step=80, delta=0.02)]}
GOLD = {"metric": "law/loss", "value": 2.2, "previous": 2.5, "previous_step": 20, "path": "gold/100"}
BLOCKED = {"metric": "law/loss", "value": 2.2, "best": 2.5, "best_step": 20, "guard": "overfit",
           "reason": "overfit: val loss is 6.2x the training loss, overfit_ratio is 5.0x"}  # fmt: skip
TRANSFER = {
    "phases": ["foundation", "domain"],
    "steps": [60, 100],
    "sets": {
        "val": {
            "start": 3.0,
            "loss": [2.4, 2.9],
            "forgetting": {"value": 0.5, "interval": [0.45, 0.55], "best_phase": "foundation"},
            "gain": {"value": 0.1, "interval": [0.02, 0.18]},
        },
        "law": {
            "start": 4.0,
            "loss": [None, 3.25],
            "forgetting": {"value": 0.0, "interval": [0.0, 0.0], "best_phase": "domain"},
            "gain": {"value": 0.75, "interval": [0.7, 0.8]},
        },
    },
}


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    """A run that shows everything a record can say."""
    return write_run(
        tmp_path_factory.mktemp("rich") / "run",
        {"val": lambda step: windows(3 - step / 200, spread=0.1), "law": lambda step: windows(4 - step / 100)},
        more={
            80: [("eval_regression", ALARM), ("gold_blocked", BLOCKED)],
            100: [("eval_recovered", WELL), ("gold_checkpoint", GOLD)],
        },
        detectable={"law": 0.0213},
        averages={"ema": lambda step: 2.5, "phase_mean": lambda step: 2.6},
        start={
            "lineage": {
                "init_from": "runs/base",
                "run": "runs/base",
                "step": 7,
                "keep_optimizer": False,
                "lineage": None,
            }
        },
        complete={"transfer": TRANSFER},
    )


def page_of(path, losses, **more) -> str:
    """The report of a run that is written for it."""
    return report([load_run(write_run(path, losses, **more))])


class Checked(html.parser.HTMLParser):
    """Tags that open and close in order, ids that are pointed to, and the text outside of style."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.text, self.rows, self.tags = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, name, attributes):
        self.tags.append((name, dict(attributes)))
        if name not in ("meta", "br"):
            self.open.append(name)
        if name == "tr":
            self.rows.append("")

    def handle_endtag(self, name):
        if name != "br":
            assert self.open.pop() == name

    def handle_data(self, text):
        if "style" not in self.open:
            self.text.append(text)
            if "tr" in self.open:
                self.rows[-1] += text.strip() + " | "

    def has_row(self, *cells: str) -> bool:
        return any(row.startswith(" | ".join(cells)) for row in self.rows)


def test_nothing_comes_from_outside(rich):
    page = report([load_run(rich)])
    checked = Checked(page)
    assert len([name for name, _ in checked.tags if name == "svg"]) == 7
    assert "script" not in {name for name, _ in checked.tags}
    assert not re.search(r"https?:|//|@import|\bsrc=|\bdata:", re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL))
    assert not re.search(r"url\((?!#)", page)


def test_the_same_run_gives_the_same_bytes(rich, tmp_path):
    write_report([rich], tmp_path / "a.html")
    script = "import sys; from curriculum.views.report import write_report; write_report([sys.argv[1]], sys.argv[2])"
    subprocess.run([sys.executable, "-c", script, rich, tmp_path / "b.html"], check=True)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert 20_000 < (tmp_path / "a.html").stat().st_size < 500_000


def test_what_the_page_of_a_run_says(rich):
    written = report([load_run(rich)])
    page = Checked(written)
    text = "".join(page.text)
    assert "+0.5000<br><small>[+0.4500, +0.5500]</small>" in written  # five sets beside each other fit the page
    assert "parameters from runs/base, step 7" in text
    # 3 nats a token of 4 bytes are 3 / (4 ln 2) bits a byte.
    assert page.has_row(
        "law", "law", "3.0000", "0.0000", "1.0820", "4.0000", "3.0000 at 100", "0.0213", "25", "50", "750"
    )
    assert page.has_row("80", "▲ regression", "law 2.1000 → 2.6000 (+0.5000, 95 % +0.4000 to +0.6000) against its best at "
                        "step 60 (since then: web 0.8 → 0.1)", "action: kept as kept/80")  # fmt: skip
    assert page.has_row("80", "gold blocked", "overfit: val loss is 6.2x the training loss, overfit_ratio is 5.0x")
    assert page.has_row("100", "★ gold", "law/loss 2.2000, was 2.5000")
    assert page.has_row("100", "○ recovered", "law")
    assert any(row.startswith("100 | ○ recovered") and "alarm since step 80" in row for row in page.rows)
    assert page.has_row("start", "0", "3.0000", "4.0000")
    assert page.has_row("foundation", "60", "2.4000", "-") and page.has_row("domain", "100", "2.9000", "3.2500")
    assert page.has_row("forgetting", "+0.5000", "[+0.4500, +0.5500]", "0", "lowest at the end")
    assert any(row.startswith("gain over start | ") and "[+0.7000, +0.8000]" in row for row in page.rows)
    # 60 steps of 100 tokens with web 0.8 and code 0.2, of epochs of 10,000 tokens.
    assert page.has_row("foundation", "4,800", "0.48 epochs", "1,200", "0.12 epochs")
    assert page.has_row("domain", "400", "0.52 epochs", "0", "0.12 epochs", "3,600", "0.36 epochs")
    assert page.has_row("1", "foundation", "web 80\u00a0%, code 20\u00a0%", "0", "60")
    scatter = "over the choice of held-out text and the scatter of neighbouring checkpoints."
    assert f"The intervals of regressions and recoveries are {scatter}" in text
    assert f"In brackets: 95 % intervals {scatter}" in text
    assert "steps: 100" in text and "Dashed: the moving average" in text
    titles = [a["aria-label"] for name, a in page.tags if name == "svg"]
    assert titles == [
        "run: eval loss of every set", "run: eval loss of val", "run: eval loss of law",
        "run: mixture", "run: training loss by source", "run: learning rate", "run: gradient norm",
    ]  # fmt: skip


def test_a_pointer_on_a_point_is_told_its_numbers(rich):
    told = re.findall(r'<circle cx="([^"]*)" cy="([^"]*)" r="6"><title>([^<]*)</title>', report([load_run(rich)]))
    at = {text: (float(x), float(y)) for x, y, text in told}
    val = summarise(windows(3 - 60 / 200, spread=0.1))
    assert f"val, step 60: {val.loss:.4f} (sem {val.sem:.4f})" in at and "ema, step 60: 2.5000" in at
    assert "lr, step 60: 7e-4" in at and "all, step 40: 1.0250" in at
    [x_20, x_60], [y_20, y_60] = zip(*(at[f"law, step {step}: {4 - step / 100:.4f}"] for step in (20, 60)), strict=True)
    assert x_20 < x_60 and y_20 < y_60  # a lower loss lies lower on the page


def test_edits_and_rollbacks_are_dotted(tmp_path):
    edit = {"kind": "replay", "reason": "replay of web", "phase": "domain", "until": 100}
    edit |= {"mixture_before": {"law": 1.0}, "mixture_after": {"web": 1.0}}
    losses = {"val": lambda step: 3 - step / 100, "law": lambda step: 4.0}
    plain = page_of(tmp_path / "plain", losses)
    edited = page_of(tmp_path / "edited", losses, more={40: [("schedule_edit", edit)]})
    dotted = "stroke-dasharray: 1,2"
    assert plain.count(dotted) == 0 and "Dotted" not in plain
    assert edited.count(dotted) == 3 and "Dotted: an edit of the schedule or a rollback." in edited


def test_the_drawings_are_dark_where_the_page_is(rich):
    page = report([load_run(rich)])
    style, drawn = page.split("</style>")[0], page.split("</style>")[-1]
    assert "prefers-color-scheme: dark" in style and "var(--chart_muted)" in drawn
    for variable in re.findall(r"var\(--(\w+)\)", drawn):
        assert style.count(f"--{variable}:") == 2  # light and dark
    assert not re.search(r"fill: (#ffffff|#202124|#6b7280)", drawn)


def test_a_set_that_was_added_later_has_its_own_start(tmp_path):
    losses = {"val": lambda step: 3 - step / 100, "law": lambda step: 4.0 if step >= 40 else None}
    page = Checked(page_of(tmp_path / "run", losses, until=80))
    assert page.has_row("start", "0", "3.0000", "4.0000", "at 40")


def test_rows_and_columns_of_tables_are_named_for_those_who_hear_them(rich):
    page = report([load_run(rich)])
    heads = re.findall(r"<th( [^>]*)>(.*?)</th>", page)
    assert {"set", "loss", "details", "after phase", "law"} <= {t for look, t in heads if 'scope="col"' in look}
    assert {"start", "forgetting", "foundation", "directory"} <= {t for look, t in heads if 'scope="row"' in look}
    assert all("scope=" in look for look, _ in heads)
    assert len(re.findall(r"<tr[^>]*><t[dh][^>]*></t", page)) == 1  # the head over the numbers of phases
    assert "law<small> law</small>" in [t for look, t in heads if 'scope="row"' in look]


def test_a_set_name_that_is_long_stands_below_the_number_of_sets_that_are_worse(tmp_path):
    name = "a_set_with_a_rather_long_name"
    alarm = ("eval_regression", {**ALARM, "offenders": [offender(name, "best", 80, first_step=100)]})
    losses = {"val": lambda step: 3.0, name: lambda step: 3.0}
    page = page_of(tmp_path / "run", losses, more={100: [alarm]}, detectable=dict.fromkeys(losses, 0.01))
    assert f'<dd><span class="bad">1 of 2 sets</span><small>{name}</small></dd>' in page


def test_only_the_marks_that_a_run_has_are_explained(rich, tmp_path):
    plain = page_of(tmp_path / "plain", {"val": lambda step: 3.0})
    alarmed = page_of(tmp_path / "alarmed", {"law": lambda step: 3.0}, more={80: [("eval_regression", ALARM)]})
    assert "▲\u00a0regressed, ○\u00a0recovered, ★\u00a0gold." in report([load_run(rich)])
    assert not re.search("[▲○★]", plain[: plain.index("<svg")])
    assert "▲\u00a0regressed." in alarmed and not re.search("[○★]", alarmed)


def test_an_alarm_lists_what_is_new_and_names_what_stands(tmp_path):
    def alarm(step, new):
        old = [{**offender(f"s{i}", "best", 20, first_step=40), "step": 40} for i in range(1, 11)]
        pairs = [{**offender(name, "start", 0, first_step=step), "step": step} for name in new]
        return {step: [("eval_regression", {"phase": "foundation", "action": None, "offenders": [*old, *pairs]})]}

    # s1 is worse than another baseline too, so it is told with what is new.
    more = alarm(40, []) | alarm(60, ["s1", "val"])
    names = ["val", *(f"s{i}" for i in range(1, 11))]
    page = Checked(page_of(tmp_path / "run", {n: lambda step: 3.0 for n in names}, more=more))
    first, second = [row.split(" | ")[2:-1] for row in page.rows if "▲ regression" in row]
    assert [line.split()[0] for line in first] == names[1:]
    told = "2.1000 → 2.6000 (+0.5000, 95 % +0.4000 to +0.6000) against its start at step 0 (since then"
    assert [line.split(":")[0] for line in second[:2]] == [f"s1 {told}", f"val {told}"]
    still = ", ".join(f"s{i} (since step 40)" for i in range(2, 10))
    assert second[2:] == [f"still worse: {still} and 1 more"]


@pytest.mark.parametrize(
    ("num", "num_warned", "value", "below"),
    [
        (4, 1, "s01, s02, s03, s04", "maybe s05"),
        (5, 0, "5 of 29 sets", "s01, s02, s03, s04, s05"),
        (14, 13, "14 of 29 sets", "s01, s02, s03, s04, s05, s06, s07, s08, s09, s10, s11, s12 and 2 more; "
                                  "maybe s15, s16, s17, s18, s19, s20, s21, s22, s23, s24, s25, s26 and 1 more"),
    ],
)  # fmt: skip
def test_of_many_sets_that_are_worse_the_header_has_the_number(tmp_path, num, num_warned, value, below):
    names = ["val", *(f"s{i:02}" for i in range(1, 29))]
    pairs = [offender(name, "best", 80, first_step=100) for name in names[1 : num + 1]]
    alarm = ("eval_regression", {"phase": "domain", "action": None, "offenders": pairs})
    warned = ("eval", {"phase": "domain", "warned": names[num + 1 : num + 1 + num_warned]})
    losses, of_average = {name: lambda step: 3.0 for name in names}, {"ema": lambda step: 2.5}
    detectable = dict.fromkeys(names, 0.01)
    tile = f'<dt>regressed now</dt><dd><span class="bad">{value}</span><small>{below}</small></dd>'
    more = {100: [alarm, warned]}
    assert tile in page_of(tmp_path / "run", losses, more=more, averages=of_average, detectable=detectable)


def test_an_unfinished_run_shows_the_losses_of_the_phases_that_ended(tmp_path):
    page = Checked(page_of(tmp_path / "run", {"val": lambda step: 3 - step / 100}, until=80))
    assert page.has_row("foundation", "60", "2.4000") and not page.has_row("domain", "100")
    assert not any(row.startswith("forgetting") for row in page.rows) and "scatter" not in "".join(page.text)
    assert "not finished, in phase domain" in "".join(page.text)
    assert page.has_row("domain (to step 80)", "200", "0.5 epochs")


@pytest.mark.parametrize(
    "losses, until",
    [
        ({"val": lambda step: windows(math.nan)}, None),
        ({"val": lambda step: windows(math.inf if step > 50 else 3.0), "law": lambda step: 3.0}, None),
        ({"val": lambda step: 3.0}, 0),
        ({"val": lambda step: None}, 0),
        ({("val" if i == 0 else f"set_{i}"): lambda step: 3 - step / 100 for i in range(12)}, None),
    ],
    ids=["all nan", "some inf", "one eval", "no eval", "12 sets"],
)
def test_odd_runs_are_drawn(tmp_path, losses, until):
    page = page_of(tmp_path / "run", losses, until=until, train_loss=lambda step, source: math.nan)
    titles = [a["aria-label"] for name, a in Checked(page).tags if name == "svg"]
    measured = not (until == 0 and losses["val"](0) is None)
    assert len([t for t in titles if "eval loss of" in t and "every" not in t]) == (len(losses) if measured else 0)
    assert ("run: eval loss of every set" in titles) == (1 < len(losses) <= 7)
    assert ("the loss was not finite" in page) == (measured and not math.isfinite(_loss_at(losses["val"](100))))


def eval_point(step, loss):
    return EvalPoint(step=step, tokens=0, phase="main", loss=loss, sem=None, bpb=None)


def test_how_far_a_set_is_above_its_lowest_loss_so_far():
    points = [eval_point(step, loss) for step, loss in enumerate((3.0, 2.0, math.nan, 2.25, 1.5, 1.75))]
    assert rises(points) == [(0, 0.0), (1, 0.0), (2, math.inf), (3, 0.25), (4, 0.0), (5, 0.25)]
    assert rises([eval_point(0, math.inf)]) == [(0, math.inf)]


def test_of_many_sets_one_drawing_shows_all_and_the_worst_have_their_own_first(tmp_path):
    losses = {("val" if i == 0 else f"set_{i}"): lambda step, i=i: 2.0 + i * step / 1000 for i in range(15)}
    losses["set_3"] = lambda step: math.inf if step == 60 else 3 - step / 100
    alarm = ("eval_regression", {**ALARM, "offenders": [offender("set_14", "best", 60, first_step=80)]})
    page = page_of(tmp_path / "run", losses, more={80: [alarm]})
    ((_, drawn),) = re.findall(r'aria-label="run: (rises of every set)"(.*?)</svg>', page, re.DOTALL)
    told = re.findall(r"<title>([^<]*)</title></(rect|path)>", drawn)
    assert {name.partition(",")[0] for name, _ in told} == {*losses} - {"val"}  # val never rises
    assert ("set_14, step 100: +1.4000", "rect") in told and ("set_3, step 60: not finite", "rect") in told
    assert ("set_14, step 80: regressed", "path") in told and "full colour: 1.4000" in page
    opacities = {float(depth) for depth in re.findall(r'fill="#d55e00" fill-opacity="([\d.]*)"', drawn)}
    assert max(opacities) == 1.0 and 0.02 <= min(opacities) < 0.05
    alone = re.findall(r'aria-label="run: eval loss of (\w+)"', page)
    assert alone == [f"set_{i}" for i in range(14, 0, -1) if i != 3] + ["val", "set_3"]
    assert page.index("3 more sets") < page.index('run: eval loss of set_1"')


def test_of_sets_that_would_be_too_wide_each_has_a_row_of_the_transfer_between_phases(tmp_path):
    names = ["val", *(f"s{i}" for i in range(1, 8))]
    of_set = {**TRANSFER["sets"]["val"], "loss": [2.4, 2.9]}

    def told(names):
        transfer = {**TRANSFER, "sets": dict.fromkeys(names, of_set)}
        losses = {name: lambda step: 3.0 for name in names}
        return Checked(page_of(tmp_path / "_".join(map(str, map(len, names))), losses, complete={"transfer": transfer}))

    few, many = told(names[:7]), told(names)
    assert told(["val", "a" * 98]).has_row("a" * 98, "3.0000") and told(["val", "a" * 97]).has_row("start", "0")
    assert few.has_row("after phase", "step", *names[:7]) and few.has_row("foundation", "60", *["2.4000"] * 7)
    head = ("set", "start", "at 0", "foundation", "at 60", "domain", "at 100", "forgetting", "gain over start")
    assert many.has_row(*head) and not many.has_row("after phase")
    interval = "[+0.4500, +0.5500]"
    assert many.has_row("s7", "3.0000", "2.4000", "2.9000", "+0.5000", interval, "+0.1000", "[+0.0200, +0.1800]")


def test_many_evals_share_columns(tmp_path):
    losses = {f"s{i}" if i else "val": lambda step: 2.0 + (step % 7) / 100 for i in range(8)}
    phases = [("only", 0, 2000, {"web": 1.0})]
    page = page_of(tmp_path / "run", losses, phases=phases, every=5)  # 401 evals
    drawn = page[page.index("run: rises of every set") :].split("</svg>")[0]
    assert 8 * 60 < drawn.count("<rect ") <= 8 * 80 and "+0.0600" in drawn


def transfer_of(phases):
    val = {**TRANSFER["sets"]["val"], "loss": [2.5] * len(phases)}
    return {"phases": [p[0] for p in phases], "steps": [p[2] for p in phases], "sets": {"val": val}}


def test_many_phases_are_folded_and_of_many_sources_the_most_read_have_columns(tmp_path):
    mixture = {f"s{i:02}": 1.0 + (i == 17) for i in range(20)}
    phases = [(f"p{i}", 10 * i, 10 * (i + 1), mixture) for i in range(25)]

    def told(num):
        transfer = transfer_of(phases[:num])
        losses = {"val": lambda step: 3.0}
        return page_of(tmp_path / f"{num}", losses, phases=phases[:num], every=10, complete={"transfer": transfer})

    few, many = told(24), told(25)
    assert "24 rows" not in few and many.count("<summary>25 rows</summary>") == 3  # transfer, phases, epochs
    assert any(row.startswith("forgetting") for row in Checked(many).rows) and Checked(few).has_row(
        "p3", "40", "2.5000"
    )
    shown = many[: many.index("<summary>25 rows</summary>")]
    transfer = shown[shown.index("after phase") :]
    assert ">forgetting<" in transfer and ">p24<" in transfer and ">p3<" not in transfer
    heads = re.findall(r"<thead>.*?</thead>", few, re.DOTALL)
    (epochs,) = [head for head in heads if "8 others" in head]
    assert epochs.count("</th>") == 1 + 12 + 1 and epochs.index(">s17<") < epochs.index(">s00<")


def test_the_command_line_can_be_typed_again(tmp_path):
    path = write_run(tmp_path / "run", {"val": lambda step: 3.0})
    resolved = json.loads((path / "config.resolved.json").read_text())
    resolved["command_line"] = ['--set sources.web.glob="*.md"', "--keep-optimizer"]
    (path / "config.resolved.json").write_text(json.dumps(resolved))
    page = html.unescape(report([load_run(path)]))
    assert re.search(
        r"<th[^>]*>command line</th><td[^>]*>--set 'sources.web.glob=\"\*.md\"' --keep-optimizer</td>", page
    )


def test_the_only_set_of_a_run_has_the_width_of_the_page(tmp_path):
    losses = {"val": lambda step: 3 - step / 100, "law": lambda step: 3.0}
    for sets, width in ((["val"], WIDE[0]), (["val", "law"], PANEL[0])):
        tags = Checked(page_of(tmp_path / f"{len(sets)}", {name: losses[name] for name in sets})).tags
        (drawn,) = [a for name, a in tags if name == "svg" and a["aria-label"].endswith("eval loss of val")]
        assert drawn["viewbox"].split()[2] == str(width)


def test_golds_that_follow_each_other_are_one_row_of_what_happened(tmp_path):
    def golden(step):
        return "gold_checkpoint", {
            **GOLD,
            "value": 3 - step / 100,
            "previous": (3.02 - step / 100) if step > 2 else None,
        }

    more = {step: [golden(step)] for step in range(2, 101, 2)}
    more[60].append(("gold_blocked", BLOCKED))
    more[100][0][1]["metric"] = "val/loss"  # another search
    page = Checked(page_of(tmp_path / "run", {"val": lambda step: 3 - step / 100}, every=2, more=more))
    assert page.has_row("2 to 58", "★ gold", "law/loss 2.4200; 29 times")
    assert page.has_row("60", "phase switch") and page.has_row("60", "★ gold", "law/loss 2.4000")
    assert page.has_row("62 to 98", "★ gold", "law/loss 2.0200, was 2.4000; 19 times")
    assert page.has_row("100", "★ gold", "val/loss 2.0000, was 2.0200")
    assert "earlier events" not in "".join(page.text)


def test_blocked_golds_that_follow_each_other_are_one_row_and_an_edit_says_what_it_changed(tmp_path):
    blocked = {
        step: {**BLOCKED, "reason": f"overfit: val loss is {step}x the training loss, overfit_ratio is 5.0x"}
        for step in (10, 20, 30, 50)
    }
    blocked[50] |= {"guard": "trend", "reason": "trend: too steep"}
    more = {step: [("gold_blocked", fields)] for step, fields in blocked.items()}
    edit = {"kind": "replay", "reason": "replay of books, as val got worse", "phase": "domain", "until": 100}
    mixtures = {"mixture_before": {"med": 0.57, "books": 0.38}, "mixture_after": {"med": 0.4597, "books": 0.5}}
    more[70] = [("schedule_edit", edit | mixtures)]
    page = Checked(page_of(tmp_path / "run", {"val": lambda step: 3.0}, every=10, more=more))
    assert page.has_row(
        "10 to 30",
        "gold blocked",
        "3 times, the last: overfit: val loss is 30x the training loss, overfit_ratio is 5.0x",
    )
    assert page.has_row("50", "gold blocked", "trend: too steep | ")
    moved = "replay of books, as val got worse | med 0.57 → 0.4597 | books 0.38 → 0.5 | domain until step 100"
    assert page.has_row("70", "schedule edited", moved)


def _loss_at(value) -> float:
    return value if isinstance(value, float) else float((value.nats_N / value.tokens_N).mean())


def test_thirty_phases_have_numbers_where_names_do_not_fit(tmp_path):
    phases = [(f"a_phase_with_a_long_name_{i}", 10 * i, 10 * (i + 1), {f"s{i % 12}": 1.0}) for i in range(30)]
    page = page_of(tmp_path / "run", {n: lambda step: 3.0 for n in ("val", "b")}, phases=phases, every=100)
    overview = page[page.index("run: eval loss of every set") :].split("</svg>")[0]
    drawn = re.findall(r"<text[^>]*>([^<]*)</text>", overview)
    assert {str(i + 1) for i in range(30)} <= set(drawn) and "a_phase_with_a_long_name_3" not in drawn
    legend = re.findall(r'<ul class="legend">.*?</ul>', page)[-1]
    assert len(re.findall("<li>", legend)) == 9 and ">other</li>" in legend  # 7 of 12 sources, the rest, and all


def test_text_of_the_run_is_escaped(tmp_path):
    evil = '<script>alert("x")</script> & $x^2$ --'
    lineage = {"init_from": "base", "run": evil, "step": 7, "keep_optimizer": False, "lineage": None}
    path = write_run(tmp_path / evil.replace("/", "_"), {"val": lambda step: 3.0, "law": lambda step: 3.0},
                     more={80: [("gold_blocked", {**BLOCKED, "reason": evil})]}, start={"lineage": lineage})  # fmt: skip
    page = report([load_run(path), load_run(path)])
    checked = Checked(page)
    assert "script" not in {name for name, _ in checked.tags}
    assert any(evil in row for row in checked.rows) and evil.replace("/", "_") in "".join(checked.text)


def test_curves_that_are_marked():
    xs, ys = [0, 10, 20, 30], [3.0, 2.0, math.nan, 2.5]
    marks = [Mark("regressed", 10), Mark("gold", 30), Mark("regressed", 15)]  # nothing was measured at 15
    bare = eval_chart("t", [Curve("a", "#0072b2", xs, [3.0, 2.0, 2.2, 2.5], [0.1] * 4)])
    drawn = eval_chart("t", [Curve("a", "#0072b2", xs, ys, [0.1] * 4, marks=marks)])
    assert bare.count(RED) == 0 and "opacity: 0.16" in bare
    # A triangle, and a cross for the eval that is not finite.
    uses = re.findall(r"<use [^>]*fill: (#\w+)[^>]*>", drawn)
    assert uses.count(RED) == 2 and uses.count("#e0a100") == 1


def test_what_is_not_finite_tells_its_set_and_step():
    ys = [3.0, math.nan, 2.0]
    drawn = eval_chart("t", [Curve("a", "#0072b2", [0, 10, 20], ys), Curve("b", "#d55e00", [0, 10, 20], [3.0] * 3)])
    assert re.findall("<title>([^<]*not finite)</title>", drawn) == ["a, step 10: not finite"]


def test_a_name_in_ink_stands_at_the_end_of_each_line_and_a_stroke_leads_to_it():
    long = "a_set_with_a_rather_long_name_of_its_own"
    curves = [Curve(name, PALETTE[i], [0, 10], [3.0, 2.0]) for i, name in enumerate(("val", long))]
    drawn = eval_chart("t", curves, size=WIDE)
    shown = {long[:27] + "…": PALETTE[1], "val": PALETTE[0]}
    at = {text: look for look, text in re.findall(r"<text([^>]*)>([^<]*)</text>", drawn) if text in shown}
    assert at.keys() == shown.keys() and all("var(--chart_ink)" in look for look in at.values())
    x, heights = WIDE[0] - 22 - round(6.8 * 28), []
    for text, color in shown.items():
        (end,) = re.findall(rf'd="M {x + 3} [\d.]+ L {x + 11} ([\d.]+) "[^>]*stroke: {color}', drawn.replace("\n", ""))
        assert abs(float(re.search(r' y="([\d.]+)"', at[text])[1]) - float(end)) < 6  # the stroke ends at its middle
        heights.append(float(end))
    (last,) = {y for y in re.findall(rf'd="M {x + 3} ([\d.]+) L', drawn.replace("\n", ""))}
    assert sorted(float(last) - y for y in heights) == [-7, 7]  # both lines end at 2
    assert "stroke-dasharray" not in drawn
    early = eval_chart("t", [curves[0], curves[1]._replace(xs=[0, 5])], size=WIDE).replace("\n", "")
    dotted = rf'd="M ([\d.]+) ([\d.]+) L {x} \2 "[^>]*stroke-dasharray[^>]*{PALETTE[1]}'
    assert [float(x) for x, _ in re.findall(dotted, early)] == [(44 + x) / 2 + 5]  # from the end at half the width
    narrow = eval_chart("t", [curve._replace(end=f"{i}") for i, curve in enumerate(curves, 7)])
    assert {"7", "8"} <= {*re.findall(r"<text[^>]*>([^<]*)</text>", narrow)}


def test_lines_can_be_seen_on_a_white_page():
    """A contrast of 3, as WCAG asks of drawings."""

    def luminance(color):
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    assert luminance("#ffffff") == pytest.approx(1) and len({*PALETTE}) == 9
    assert all(1.05 / (luminance(color) + 0.05) >= 3 for color in (*PALETTE, ALL, RED))


@pytest.mark.parametrize(("first", "mark"), [([], ""), ([6.0, 5.0], "↑ from 6.00")])
def test_a_curve_that_begins_with_an_infinite_loss_is_drawn(first, mark):
    ys = [math.inf, *first, 2.0, 2.1, *(3.0 + 0.01 * (i % 3) for i in range(20))]
    others = [Curve("b", "#e69f00", [*range(len(ys))], [*first, *[3.0] * (len(ys) - len(first))])] if first else []
    drawn = eval_chart("losses", [Curve("a", "#0072b2", [*range(len(ys))], ys), *others])
    assert "↑ from inf" not in drawn and mark in drawn


def test_the_mark_of_what_is_cut_off_stands_clear_of_the_curves():
    xs = list(range(0, 1001, 20))
    low = Curve("low", "#d55e00", xs, [2.3 + 0.1 * math.exp(-x / 400) for x in xs])
    cut = Curve("cut", "#0072b2", xs, [2.5 + 5.11 * math.exp(-x / 20) for x in xs])
    for curves in ([cut], [low, cut], [cut, low]):
        drawn = eval_chart("t", curves)
        at = float(re.search(r'<text[^>]* x="([\d.]+)"[^>]*>↑ from 7.61</text>', drawn)[1])
        # The line comes into the drawing at its top and is at the height of the mark for some 11 pixels.
        (path,) = re.findall(r'd="(M [^"]*)"[^>]* stroke: #0072b2', drawn)
        points = [tuple(map(float, point)) for point in re.findall(r"(-?[\d.]+) (-?[\d.]+)", path)]
        after = min(x for x, y in points if y > 10 + 11)
        assert after < at < after + 20


def test_a_lone_eval_stands_in_the_middle_at_its_step():
    drawn = eval_chart("t", [Curve("a", "#0072b2", [0], [3.0], [0.1])])
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert texts[0] == "0" and "-0" not in texts and texts.count("0") == 1
    assert re.search('<use [^>]*x="261" [^>]*fill: #0072b2', drawn)  # the axes go from 44 to 500 - 22


def test_a_short_curve_beside_a_long_one_is_seen_to_its_end():
    long = Curve("long", PALETTE[0], list(range(0, 2001, 20)), [5.0, *(2.0 + i % 2 / 10 for i in range(100))])
    short = Curve("short", PALETTE[1], list(range(0, 201, 20)), [5.0 - i / 10 for i in range(11)])
    drawn = eval_chart("t", [long, short], size=WIDE)
    assert {"short, step 160: 4.2000", "short, step 200: 4.0000"} <= {*re.findall("<title>([^<]*)</title>", drawn)}


def test_rows_are_thinned_to_means():
    xs = list(range(1, 11))
    ys = [1.0, 3.0, math.nan, 5.0, math.nan, math.nan, 7.0, 7.0, 2.0, 4.0]
    assert thinned(xs, ys, most=10) == (xs, [ys], 1)
    binned, (means,), per_bin = thinned(xs, ys, most=5)
    assert (binned, per_bin) == ([2, 4, 6, 8, 10], 2)
    assert means[:2] == [2.0, 5.0] and math.isnan(means[2]) and means[3:] == [7.0, 3.0]
    binned, (means,), per_bin = thinned(xs, ys, most=4)  # bins of three, the last of one
    assert (binned, per_bin, means[0], means[3]) == ([3, 6, 9, 10], 3, 2.0, 4.0)


def test_the_mixture_has_an_edge_at_a_switch(tmp_path):
    run = load_run(write_run(tmp_path / "run", {"val": lambda step: 3.0}))
    steps, shares = _mixture_course(run, dict.fromkeys(("web", "code", "law"), ""))
    assert PHASES[0][2] == 60
    assert steps == [0, 60, 60, 100] and shares["web"] == [0.8, 0.8, 0.1, 0.1]
    assert shares["law"] == [0, 0, 0.9, 0.9]
    _, shares = _mixture_course(run, dict.fromkeys(("law", "other"), ""))
    assert shares["other"] == pytest.approx([1, 1, 0.1, 0.1])


def test_the_mixture_has_an_edge_at_an_edit(tmp_path):
    before, after = {"law": 0.9, "web": 0.1}, {"law": 0.5, "web": 0.5}
    edit = {"kind": "replay", "phase": "domain", "until": 100, "reason": ""}
    edit |= {"mixture_before": before, "mixture_after": after}
    more = {80: [("schedule_edit", edit), ("schedule_edit", {**edit, "mixture_before": after})]}
    run = load_run(write_run(tmp_path / "run", {"val": lambda step: 3.0}, until=80, more=more))
    steps, shares = _mixture_course(run, dict.fromkeys(("web", "code", "law"), ""))
    assert steps == [0, 60, 60, 80, 80] and shares["web"] == [0.8, 0.8, 0.1, 0.1, 0.5]


def test_warnings_are_told_once_with_the_step_of_those_that_came_later(tmp_path):
    edit = {"kind": "replay", "phase": "domain", "until": 100, "mixture_before": {}, "mixture_after": {}, "reason": ""}
    more = {40: [("schedule_edit", {**edit, "warnings": ["web is read 5.0 times", "law is read 9.0 times"]})]}
    start = {"warnings": ["web is read 5.0 times"]}
    page = page_of(tmp_path / "run", {"val": lambda step: 3.0}, start=start, more=more)
    assert "2 warnings of the plan" in page
    assert page.count("web is read 5.0 times") == 1 and "<li>step 40: law is read 9.0 times</li>" in page


def test_numbers_of_the_axes():
    assert [short_count(x) for x in (0, 950, 1200, 75_000, 1.5e9)] == ["0", "950", "1,200", "75k", "1.5B"]
    assert [short_count(x) for x in (9_999, 999_949, 999_999, 999_960_000)] == ["9,999", "999.9k", "1M", "1B"]
    assert [short_rate(x) for x in (0, 0.00175, 2e-3, 1e-10)] == ["0", "1.75e-3", "2e-3", "1e-10"]


def test_several_runs_are_compared_and_drawn_together(tmp_path):
    losses = {"val": lambda step: 3.0, "law": lambda step: 4.0}
    first = write_run(tmp_path / "first", losses)
    second = write_run(tmp_path / "second", {**losses, "val": lambda step: 3.5}, hashes={"law": "other"})
    runs = [load_run(first), load_run(second)]
    page = Checked(report(runs))
    text = "".join(page.text)
    assert page.has_row("val", "first", "100", "3.0000") and "second is" not in text
    assert any(row.startswith("second | 100 | 3.5000") or "+0.5000" in row for row in page.rows)
    assert "second at step 100 is worse than first at step 100 by 0.5000 nats per token" in text
    assert "law: not compared: first and second measured different text" in text
    assert "law without law of second: other windows" in text and "law without law of first: other windows" in text
    titles = [a["aria-label"] for name, a in page.tags if name == "svg"]
    of_all = ["eval loss of val, every run", "eval loss of law, first", "eval loss of law, second"]
    assert titles[:3] == of_all and len(titles) == 3 + 2 * 7
    drawn = "".join(report(runs).partition('aria-label="eval loss of val, every run"')[1:]).split("</svg>")[0]
    assert re.findall(r"<text[^>]*>([12])</text>", drawn) == ["1", "2"] and "1 first2 second" in text
    val, law, other = overlays(runs, ["first", "second"], {"first": "#000", "second": "#111"})
    assert [c.label for c in val.curves] == ["first", "second"] and val.x == "step" and val.left_out == []
    assert [c.label for c in law.curves] == ["first"] and law.left_out == ["second"]
    assert [c.label for c in other.curves] == ["second"] and other.left_out == ["first"]


def test_recipes_of_several_seeds_have_a_table(tmp_path):
    runs = recipe_runs(tmp_path, {"low": [2.0, 2.01], "high": [3.0, 3.01]})
    page = Checked(report([load_run(run) for run in runs]))
    assert page.has_row("val", "low", "2", "2.0050", "0.0071")
    assert any(row.startswith("high | 2 | 3.0050 | 0.0071 | +1.0000") for row in page.rows)
    of_high = next(row for row in report([load_run(run) for run in runs]).split("<tr") if ">high<" in row)
    assert 'class="n bad"' in of_high
    assert "val: high (2 seeds) is worse than low (2 seeds) by 1.0000 nats per token" in "".join(page.text)


def test_of_many_runs_the_page_leaves_out_their_own_reports(tmp_path):
    runs = [load_run(write_run(tmp_path / f"run_{i}", {"val": lambda step: 3.0}, until=20)) for i in range(5)]
    for num, whole in ((4, 4), (5, 0)):
        page = report(runs[:num])
        assert page.count("Full report of this run") == page.count("How it was run") == whole
        told = "For the full report of one run: curriculum report RUN -o FILE"
        assert (told in page) == (whole == 0) and Checked(page).has_row("val", "run_0", "20", "3.0000")


def test_one_text_is_drawn_together_under_the_names_it_has(tmp_path):
    base = write_run(tmp_path / "base", {"val": lambda step: 3.0, "code": lambda step: 4.0})
    hashes = {"val": "domain", "books": "hash-of-val"}
    losses = {"val": lambda step: 2.0, "books": lambda step: 3.25}
    runs = [load_run(base), load_run(write_run(tmp_path / "adapted", losses, hashes=hashes))]
    page = Checked(report(runs))
    text = "".join(page.text)
    assert page.has_row("val (books in adapted)", "base", "100", "3.0000")
    assert "val (books in adapted): adapted at step 100 is worse than base at step 100 by 0.2500" in text
    assert "val (books in adapted) without val of adapted: other windows" in text
    drawn = overlays(runs, ["base", "adapted"], {"base": "#000", "adapted": "#111"})
    assert [(o.title, [(c.label, c.ys[0]) for c in o.curves], o.left_out) for o in drawn] == [
        ("val (books in adapted)", [("base", 3.0), ("adapted", 3.25)], ["adapted"]),
        ("val", [("adapted", 2.0)], ["base"]),
        ("code", [("base", 4.0)], []),
    ]


def test_a_base_is_compared_where_it_was_taken_over_and_the_curves_say_so(tmp_path):
    base = write_run(tmp_path / "base", {"val": lambda step: 3 + step / 1000})
    lineage = {"init_from": "base", "run": "written", "step": 80, "keep_optimizer": False, "lineage": None}
    adapted = write_run(tmp_path / "adapted", {"val": lambda step: 2.0}, until=60, start={"lineage": lineage})
    own = "A run that began from another one is drawn from its own step 0, not where that one ended."
    page = Checked(report([load_run(base), load_run(adapted)]))
    assert page.has_row("val", "base", "80", "3.0800") and any("adapted | 60 | 2.0000" in row for row in page.rows)
    text = "".join(page.text)
    assert "base is compared by its last eval at or before step 80, where adapted began. Each other run" in text
    assert own in text
    assert own not in "".join(Checked(report([load_run(base), load_run(base)])).text)


def test_runs_without_a_common_set_are_still_reported(tmp_path):
    first = write_run(tmp_path / "first", {"val": lambda step: 3.0})
    second = write_run(tmp_path / "second", {"law": lambda step: 3.0})
    page = report([load_run(first), load_run(second)])
    checked = Checked(page)
    assert checked.has_row("key", "first", "second") and checked.has_row("evalsets.sets.law.path", "-", "law")
    assert page.index("Config differences") < page.index("Comparison</h2>")
    assert "No key differs." not in page and "No key differs." in report([load_run(first), load_run(first)])
    assert page.count("no eval set can be compared") == 1
    assert "<li>val: only first measured it</li><li>law: only second measured it</li>" in page


def test_many_keys_that_differ_are_folded(tmp_path):
    """A set has one key that is no default: its path."""
    for num, folded in ((15, 0), (16, 1)):
        losses = {("val" if i == 0 else f"set_{i}"): lambda step: 3.0 for i in range(num + 1)}
        paths = [write_run(tmp_path / f"a{num}", {"val": losses["val"]}), write_run(tmp_path / f"b{num}", losses)]
        page = report([load_run(path) for path in paths])
        assert page.count(f"<summary>{num} keys</summary>") == folded
        assert Checked(page).has_row(f"evalsets.sets.set_{num}.path", "-", f"set_{num}")


def test_a_shared_past_is_drawn_once(tmp_path):
    losses = {"val": lambda step: 3 - step / 100}
    trunk = write_run(tmp_path / "trunk", losses)
    leaf = branch(trunk, tmp_path / "leaf", 60, losses)
    (drawn,) = overlays([load_run(trunk), load_run(leaf)], ["trunk", "leaf"], {"trunk": "#000", "leaf": "#111"})
    assert [list(c.xs) for c in drawn.curves] == [[0, 20, 40, 60, 80, 100], [60, 80, 100]]
    assert drawn.branch_at == [60]
    wide = write_run(tmp_path / "wide", losses, tokens_per_step=300)
    runs = [load_run(trunk), load_run(leaf), load_run(wide)]
    (drawn,) = overlays(runs, ["trunk", "leaf", "wide"], {"trunk": "", "leaf": "", "wide": ""})
    assert (drawn.x, drawn.branch_at) == ("tokens", [6_000]) and list(drawn.curves[2].xs)[-1] == 30_000


def test_a_record_is_read_once_a_pair_of_runs_whatever_the_number_of_sets(tmp_path):
    class Counted(list):
        times = 0

        def __iter__(self):
            self.times += 1
            return super().__iter__()

    def readings(num_sets):
        losses = {("val" if i == 0 else f"set_{i}"): lambda step: 3.0 for i in range(num_sets)}
        trunk = write_run(tmp_path / f"trunk_{num_sets}", losses)
        leaves = [branch(trunk, tmp_path / f"leaf_{num_sets}_{at}", at, losses) for at in (20, 40, 60)]
        runs = [dataclasses.replace(run, events=Counted(run.events)) for run in map(load_run, [trunk, *leaves])]
        drawn = overlays(runs, list("abcd"), dict.fromkeys("abcd", "#000"))
        assert [overlay.branch_at for overlay in drawn] == [[20, 40, 60]] * num_sets
        return [run.events.times for run in runs]

    assert readings(1) == readings(5)


def test_what_cannot_be_reported_is_said(rich, tmp_path):
    with pytest.raises(InputError, match="got no run, expected one or more"):
        report([])
    full = tmp_path / "full"  # not the device by its own name: what replaces its output would take it away
    full.symlink_to("/dev/full")
    with pytest.raises(InputError, match="full: cannot be written: No space left"):
        write_report([rich], full)
    assert full.is_symlink() and sorted(path.name for path in tmp_path.iterdir()) == ["full"]


def test_damaged_runs_of_a_folder_are_left_out_and_told(tmp_path):
    runs = [write_run(tmp_path / "runs" / name, {"val": lambda step: 3.0}) for name in "abcde"]
    (runs[1] / "config.resolved.json").write_text("{")
    (runs[2] / "metrics.jsonl").write_text('{\n{"step": 1}\n')
    (runs[3] / "events.jsonl").write_text("")
    without("from_phase")(runs[4] / "events.jsonl")
    output = tmp_path / "r.html"
    code, out, errors = run_here("report", tmp_path / "runs", "-o", output)
    assert code == 0 and out.startswith(f"{output}: ")
    told = errors.splitlines()
    for run, file, line in zip(
        runs[1:], ("config.resolved.json", "metrics.jsonl:1", "events.jsonl", "events.jsonl:6"), told, strict=True
    ):
        assert line.startswith(f"{run}: left out: {run / file}: ")
    page = Checked(output.read_text())
    assert all(line in page.text for line in told) and "<h1>a</h1>" in output.read_text()
    with pytest.raises(InputError, match="c/metrics.jsonl:1: got "):
        write_report(runs[:3:2], output)
    shutil.rmtree(runs[0])
    assert run_here("report", tmp_path / "runs", "-o", output)[::2] == (
        2, "".join(f"error: {line.partition(': left out: ')[2]}\n" for line in told),
    )  # fmt: skip


def test_a_field_that_an_event_lacks_is_told_by_what_shows_it(rich, tmp_path):
    """Of whatever kind and field; what does not show it does without."""
    lines = [json.loads(line) for line in (rich / "events.jsonl").read_text().splitlines()]
    first = {line["event"]: number for number, line in reversed([*enumerate(lines)])}
    run = shutil.copytree(rich, tmp_path / "run")

    def told(kind, field, show):
        lacking = {key: value for key, value in lines[first[kind]].items() if key != field}
        edited = [*lines[: first[kind]], lacking, *lines[first[kind] + 1 :]]
        (run / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in edited))
        loaded = load_run(run)
        try:
            show(loaded)
        except DamagedRun as error:
            return str(error).startswith(f"{run}/events.jsonl:{first[kind] + 1}: {kind} has no {field}; ")

    fields = [(kind, field) for kind, number in first.items() for field in unstamped(lines[number])]
    shown = {kind: told(*kind, lambda loaded: inspect_text(inspect_run(loaded))) for kind in fields}
    assert all(found is not False for found in shown.values()) and sum(map(bool, shown.values())) > 10
    assert shown["eval", "val_loss"] and shown["phase_switch", "from_phase"] is None
    assert told("phase_switch", "from_phase", lambda loaded: report([loaded]))
    assert told("training_start", "sources", lambda loaded: report([loaded])) is None


def test_rows_that_are_not_drawn_are_not_read(tmp_path):
    """Those of many long runs do not fit into memory; a page of more than four runs shows the last of each alone."""
    for name in "abcdef":
        metrics = write_run(tmp_path / "runs" / name, {"val": lambda step: 3.0}) / "metrics.jsonl"
        metrics.write_text("{\n" + ("" if name == "f" else metrics.read_text()))
    output = tmp_path / "r.html"
    [line] = write_report([tmp_path / "runs"], output)
    assert "f/metrics.jsonl: last line: got " in line and "<h1>5 runs</h1>" in output.read_text()
    shutil.rmtree(tmp_path / "runs/e")
    with pytest.raises(InputError, match=r"a/metrics.jsonl:1: got "):
        write_report([tmp_path / "runs"], output)


def test_a_branch_whose_rows_are_damaged_is_left_out_of_many_runs(tmp_path):
    """Of branches even a page of many runs reads the rows, to tell where they part."""
    losses = {"val": lambda step: 3.0}
    trunk = write_run(tmp_path / "runs/trunk", losses)
    for name in "abcd":
        branch(trunk, tmp_path / "runs" / name, 60, losses)
    metrics = tmp_path / "runs/c/metrics.jsonl"
    metrics.write_text("{\n" + metrics.read_text())
    output = tmp_path / "r.html"
    [line] = write_report([tmp_path / "runs"], output)
    assert line.startswith(f"{metrics.parent}: left out: {metrics}:1: got ")
    assert "<h1>4 runs</h1>" in output.read_text()


@pytest.mark.parametrize(("num_curves", "drawn"), [(1, 335), (7, 7 * 335), (40, 40 * 68)])
def test_of_many_lines_in_a_chart_each_has_fewer_points(num_curves, drawn):
    """Of 1,001 points of one line every third, and the last; of one among forty, every fifteenth."""
    curves = [Curve(f"{i}", "#0072b2", range(1001), [1.0 + i] * 1001) for i in range(num_curves)]
    assert eval_chart("all", curves).count("<circle") == drawn


def test_an_older_report_stays_until_the_new_one_is_whole(rich, tmp_path):
    output = tmp_path / "r.html"
    older = "<!doctype html>older"
    output.write_text(older)
    (tmp_path / "r.html.tmp").mkdir()  # the new one cannot be begun
    with pytest.raises(InputError, match="r.html: cannot be written"):
        write_report([rich], output)
    assert output.read_text() == older
    (tmp_path / "r.html.tmp").rmdir()
    write_report([rich], output)
    assert output.read_text().startswith("<!DOCTYPE html>") and not (tmp_path / "r.html.tmp").exists()


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "config.resolved.json"])
def test_a_file_that_is_no_report_is_not_replaced(tmp_path, name):
    run_dir = write_run(tmp_path / "run", {"val": lambda step: windows(3 - step / 200)})
    (tmp_path / "empty.jsonl").touch()  # as the rows of a run that has just begun
    with pytest.raises(InputError, match="empty.jsonl: exists and is not an HTML page"):
        write_report([run_dir], tmp_path / "empty.jsonl")
    before = (run_dir / name).read_bytes()
    with pytest.raises(InputError, match=f"{name}: exists and is not an HTML page; expected a new file or an earlier"):
        write_report([run_dir], run_dir / name)
    assert (run_dir / name).read_bytes() == before
    write_report([run_dir], tmp_path / "new.html")
    (tmp_path / "empty.html").touch()
    write_report([run_dir], tmp_path / "empty.html")
    assert (tmp_path / "empty.html").read_bytes() == (tmp_path / "new.html").read_bytes() != b""


def test_a_folder_whose_name_is_not_text_is_reported(tmp_path):
    path = write_run(tmp_path / os.fsdecode(b"r\xff"), {"val": lambda step: 3.0})
    write_report([path], tmp_path / "r.html")
    assert "r\\udcff" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_no_id_stands_twice_on_a_page(rich, tmp_path):
    other = write_run(tmp_path / "other", {"val": lambda step: 3.0, "law": lambda step: 4.0})
    for page in (report([load_run(rich)]), report([load_run(rich), load_run(other), load_run(rich)])):
        ids = re.findall(r'\sid="([^"]+)"', page)
        assert len(ids) == len(set(ids)) > 0
        meant = {target for pair in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page) for target in pair if target}
        assert meant == set(ids)


def test_a_gold_that_is_gone_and_a_damaged_summary_are_said(tmp_path):
    gold = {**GOLD, "path": "gold/80"}
    path = write_run(tmp_path / "run", {"val": lambda step: 3.0}, more={80: [("gold_checkpoint", gold)]})
    page = report([load_run(path)])
    assert "law/loss 2.2000, its checkpoint is missing" in page and "cannot be read" not in page
    (path / "gold/80").mkdir(parents=True)
    (path / "training_state.json").write_text("x")
    page = report([load_run(path)])
    assert "is not there" not in page and f"{path}/training_state.json: cannot be read" in page


@pytest.mark.parametrize("interval", [None, ["NaN", "NaN"]])
def test_a_change_without_an_error_has_no_interval(tmp_path, interval):
    single = {"start": 3.0, "loss": [2.4, 2.9], "forgetting": {"value": 0.5, "interval": interval, "best_phase": "a"},
              "gain": {"value": 0.1, "interval": interval}}  # fmt: skip
    transfer = {"phases": ["foundation", "domain"], "steps": [60, 100], "sets": {"val": single}}
    page = page_of(tmp_path / "run", {"val": lambda step: 3.0}, complete={"transfer": transfer})
    assert '<td class="n heat">+0.5000</td>' in page and '<td class="n heat">+0.1000</td>' in page


def test_the_command_writes_a_file_without_jax(rich, tmp_path):
    code, out, _, modules = command("report", rich, "-o", tmp_path / "r.html")
    assert code == 0 and re.fullmatch(rf"{re.escape(str(tmp_path))}/r.html: \d+ kB; open it in a browser\n", out)
    assert not modules & {"jax", "pydantic"} and "matplotlib" in modules
    assert (tmp_path / "r.html").read_text().startswith("<!DOCTYPE html>")


def test_a_phase_end_is_shaded_for_what_was_lost_until_then():
    def of(start, *losses):
        return _shades({"start": start, "loss": list(losses)})

    assert of(8.0, 6.0, 5.0, 7.0) == [0.0, 0.0, 1.0]  # that a later phase improved it is no loss
    assert of(4.0, 6.0, None, 5.0, "NaN", 3.0) == pytest.approx([2 / 3, 0.0, 1 / 3, 0.0, 0.0])
    assert of(None, 5.0) == [0.0] and of("NaN", None) == [0.0] and of(5.0) == [] and of(5.0, "Infinity") == [0.0]


def test_sets_that_are_compared_by_their_documents_are_drawn_together_in_bits_per_byte(tmp_path):
    def told(loss):
        measured = windows(loss, spread=0.2)
        return measured._replace(text_N=measured.document_N.astype(np.uint64))

    runs = [
        load_run(write_run(tmp_path / name, {"val": lambda step, loss=loss: told(loss)}, hashes={"val": name}))
        for name, loss in (("one", 3.0), ("two", 2.0))
    ]
    page = Checked(report(runs))
    text = "".join(page.text)
    assert "val without val of two: other windows" in text and "val in bits per byte, each run's documents" in text
    assert "bits per byte of val, one and two" in [a["aria-label"] for name, a in page.tags if name == "svg"]
    first, second = (eval_curve("a", "#000", eval_points(run.events)["val"], "step", "bpb") for run in runs)
    assert first.ys[-1] == pytest.approx(3 / 4 / math.log(2), rel=0.05) and second.ys[-1] < first.ys[-1]
    (in_nats, *_), sem = eval_points(runs[0].events)["val"][-1:], first.sems[-1]
    assert sem == pytest.approx(in_nats.sem / 4 / math.log(2), rel=1e-3) and sem > 0
