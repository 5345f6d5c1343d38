"""TensorBoard in a real browser: what it draws of a run is what the record says."""

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import picture_run as picture
import pytest
from written_run import write_run

from curriculum.config import build_config
from curriculum.record.curves import all_sets
from curriculum.record.events import number, read_events, read_metrics
from curriculum.record.sentences import verdict
from curriculum.train.feed import Feed
from curriculum.train.trainer import train
from curriculum.views.report import write_report

pytest.importorskip("playwright", reason="playwright is not installed: nothing can look at TensorBoard")

SCRIPT = Path(__file__).resolve().parent.parent / "tools" / "picture_run.py"

if picture.find_chromium() is None:
    pytest.skip("no chromium on the PATH: nothing can look at TensorBoard", allow_module_level=True)

from playwright.sync_api import expect  # noqa: E402

pytestmark = pytest.mark.slow

WORDS = {
    "web": "the quick brown fox jumps over a lazy dog while rain falls on quiet green hills".split(),
    "code": "def return for while if else class import lambda yield ( ) [ ] { } : = + -".split(),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`whole`, 24 steps in one go; `resumed`, of another seed, that died at step 19 and went on from its checkpoint."""
    folder = tmp_path_factory.mktemp("browser")
    rng = np.random.default_rng(0)
    for name, words in WORDS.items():
        lines = [json.dumps({"text": " ".join(rng.choice(words, int(rng.integers(20, 60))))}) for _ in range(120)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    data = {
        "tokenizer": {"kind": "byte"},
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 32, "n_head": 2, "n_kv_head": 1, "d_ff": 48},
        "sources": {name: {"path": str(folder / f"{name}.jsonl"), "held_out": "25%"} for name in WORDS},
        "phases": [
            {"name": "foundation", "until": 12, "mixture": {"web": 1.0}},
            {"name": "adaptation", "until": "end", "mixture": {"web": 0.1, "code": 0.9}},
        ],
        "evalsets": {
            "every": 4,
            "primary": {"held_out_of": "web"},
            "sets": {"general": {"held_out_of": "web", "max_sequences": 9}, "code": {"held_out_of": "code", "every": 8}},
        },
        "train": {"steps": 24, "batch_size": 8, "seq_len": 32},
        "optim": {"lr": 1e-2, "warmup_steps": 2, "decay_steps": 4},
        "checkpoint": {"every": 5},
        "logging": {"every": 2},
    }  # fmt: skip
    train(build_config(data), folder / "runs" / "whole", store_dir=folder / "store")

    take = Feed.__getitem__

    def dies(feed, step):
        if step == 18:
            raise RuntimeError("the process died")
        return take(feed, step)

    config = build_config({**data, "seed": 3})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Feed, "__getitem__", dies)
        with pytest.raises(RuntimeError, match="the process died"):
            train(config, folder / "runs" / "resumed", store_dir=folder / "store")
    assert [row["step"] for row in read_metrics(folder / "runs/resumed")][-1] == 18
    train(config, folder / "runs" / "resumed", store_dir=folder / "store", resume="latest")
    assert any(e["event"] == "resume" and e["step"] == 15 for e in read_events(folder / "runs/resumed"))
    return folder / "runs"


@pytest.fixture(scope="module")
def address(runs):
    with picture.tensorboard(runs) as address:
        for name in ("whole", "resumed"):
            picture.wait_for(address, runs / name)
        yield address


@pytest.fixture(scope="module")
def chromium():
    with picture.browser() as chromium:
        yield chromium


@pytest.fixture
def page(chromium):
    page = picture.new_page(chromium)
    yield page
    page.close()


def recorded(run_dir, *, bpb=False):
    """{set: [(step, loss)]} of events.jsonl."""
    curves = {}
    for event in read_events(run_dir):
        if event["event"] == "eval":
            for name, values in all_sets(event).items():
                curves.setdefault(name, []).append((event["step"], number(values.bpb if bpb else values.loss)))
    return curves


def table(card):
    """{run: (colour, value, step)} of the table below a chart."""
    rows = {}
    for row in card.locator("tb-data-table-content-row").all():
        colour = row.locator(".row-circle span").evaluate("span => getComputedStyle(span).backgroundColor")
        run, value, step = [text.strip() for text in row.locator(".cell").all_inner_texts() if text.strip()][:3]
        rows[run] = (colour, value, step)
    return rows


def curves(card):
    """{colour: [(step, value)]} of the paths as they are drawn: pixels, read with the help of the axes' labels."""

    def axis(name, coordinate):
        """Slope and intercept from pixels to the labelled numbers."""
        ticks = card.locator(f'line-chart-axis[axis="{name}"] .minor-tick-label text')
        labels = ticks.evaluate_all(f"ts => ts.map(t => [+t.getAttribute('{coordinate}'), +t.textContent])")
        assert len(labels) >= 2 and all(np.isfinite(labels).ravel())
        return np.polynomial.Polynomial.fit(*np.transpose(labels), 1)

    to_step, to_value = axis("x", "x"), axis("y", "y")
    paths = picture.drawn(card).evaluate_all("ps => ps.map(p => [getComputedStyle(p).stroke, p.getAttribute('d')])")
    found = {}
    for colour, d in paths:
        pixels = np.array([[float(c) for c in point.split(",")] for point in re.split("[ML]", d)[1:]])
        assert colour not in found
        found[colour] = list(zip(to_step(pixels[:, 0]), to_value(pixels[:, 1]), strict=True))
    return found


def assert_drawn(drawn, expected):
    """Within a hundredth of a pixel: steps are a dozen pixels apart, and a nat is some fifty."""
    assert len(drawn) == len(expected) > 1
    assert np.abs(np.subtract(drawn, expected)).max() < 1e-3, (drawn, expected)


def test_one_chart_shows_every_eval_set_of_the_run(runs, address, page):
    """By the address that the console printed at the end of the run."""
    printed = re.findall(r"http://127\.0\.0\.1:6006\S+", (runs / "whole/train.log").read_text())
    assert len(printed) == 1
    page.goto(printed[0].replace("http://127.0.0.1:6006", address))
    for tag, bpb in (("eval_sets/loss", False), ("eval_sets/bpb", True)):
        card, expected = picture.card(page, tag), recorded(runs / "whole", bpb=bpb)
        assert {name: [step for step, _ in points] for name, points in expected.items()} == {
            "val": [0, 4, 8, 12, 16, 20, 24], "general": [0, 4, 8, 12, 16, 20, 24], "code": [0, 8, 12, 16, 24],
        }  # fmt: skip
        expect(picture.drawn(card)).to_have_count(3)
        expect(card.locator("tb-data-table-content-row")).to_have_count(3)
        shown, drawn = table(card), curves(card)
        assert set(shown) == {f"whole/tensorboard/{name}" for name in expected}
        assert len({colour for colour, _, _ in shown.values()}) == 3
        for name, points in expected.items():
            colour, value, step = shown[f"whole/tensorboard/{name}"]
            assert (float(value), step) == (pytest.approx(points[-1][1], rel=1e-4), "24")  # five digits are shown
            assert_drawn(drawn[colour], points)
            held = picture.scalars(address, f"whole/tensorboard/{name}", tag)
            assert held == [(step, float(np.float32(value))) for step, value in points]
    expect(page.locator("scalar-card-component")).to_have_count(2)  # and nothing else


def test_two_runs_stand_side_by_side(runs, address, page):
    page.goto(f"{address}/?tagFilter=eval_sets%2Floss&smoothing=0#timeseries")
    card = picture.eval_chart(page)
    expect(picture.drawn(card)).to_have_count(6)
    expect(card.locator("tb-data-table-content-row")).to_have_count(6)
    shown, drawn = table(card), curves(card)
    for run in ("whole", "resumed"):
        for name, points in recorded(runs / run).items():
            assert_drawn(drawn[shown[f"{run}/tensorboard/{name}"][0]], points)
    assert recorded(runs / "whole")["val"] != recorded(runs / "resumed")["val"]


@pytest.mark.parametrize("reader", ["fast", "python"])
def test_a_resumed_run_has_no_zigzag(runs, address, page, reader):
    """With either reader of TensorBoard: the one in Python goes back only where a file says from which step."""
    rows = [(row["step"], row["loss"]) for row in read_metrics(runs / "resumed")]
    assert [step for step, _ in rows] == list(range(2, 25, 2))
    with ExitStack() as stack:
        if reader == "python":
            address = stack.enter_context(picture.tensorboard(runs, "--load_fast=false"))
            picture.wait_for(address, runs / "resumed")
        page.goto(f"{address}/?runFilter=^resumed%2F&tagFilter=^train%2Floss$&smoothing=0#timeseries")
        card = picture.card(page, "train/loss")
        expect(picture.drawn(card)).to_have_count(1)
        [drawn] = curves(card).values()
        assert_drawn(drawn, rows)
        page.goto("about:blank")
        page.goto(picture.link(runs / "resumed", address))
        card = picture.eval_chart(page)
        expect(picture.drawn(card)).to_have_count(3)
        shown, drawn = table(card), curves(card)
        for name, points in recorded(runs / "resumed").items():
            assert_drawn(drawn[shown[f"resumed/tensorboard/{name}"][0]], points)


def test_what_happened_can_be_read(runs, address, page):
    """Every phase switch, regression, gold and edit of both runs, in the TEXT tab."""
    page.goto(f"{address}/#text")
    expect(page.locator("tf-text-loader").first).to_be_visible()
    while (closed := page.locator("tf-category-paginated-view button.heading:not([open-button])")).count():
        closed.first.click()
    texts = {}
    for run in ("whole", "resumed"):
        loaders = page.locator("tf-text-loader").filter(has_text=f"{run}/tensorboard")
        for event in read_events(runs / run):
            match event["event"]:
                case "phase_switch":
                    words = f"{event['from_phase']} → {event['new_phase']} at step {event['step']}, lr 1.00e-02"
                case "eval_regression" | "eval_recovered" | "gold_checkpoint" | "gold_blocked" | "schedule_edit":
                    words = verdict(event)
                case _:
                    continue
            shown = loaders.locator("tf-markdown-view").filter(has_text=words)
            expect(shown).to_have_count(1)
            expect(shown).to_be_visible()
            texts[run, event["event"], event["step"]] = shown
    for run in ("whole", "resumed"):
        switch = texts[run, "phase_switch", 12]
        expect(switch.locator("tr")).to_have_count(3)
        assert switch.locator("tr").nth(1).locator("td").all_inner_texts()[:3] == ["code", "0", "0.9"]


def test_a_picture_is_taken(runs, tmp_path):
    from matplotlib.image import imread

    file = tmp_path / "board.png"
    command = [sys.executable, SCRIPT, runs / "whole", "-o", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{file}: {file.stat().st_size // 1000} KB\n" and done.stderr == ""
    assert 20_000 < file.stat().st_size < 300_000
    image = imread(file)
    assert image.shape[:2] == (700, 1200)
    chart = image[220:500, 330:1160, :3].reshape(-1, 3)
    coloured = chart[np.ptp(chart, axis=1) > 0.4]  # the grid is grey
    assert len(np.unique(coloured // 0.25, axis=0)) >= 3 and len(coloured) > 1000


@pytest.mark.parametrize("width", [1200, 400])
def test_a_report_fits_its_window_and_its_points_tell_their_numbers(runs, page, tmp_path, width):
    errors = []
    page.on("console", lambda message: errors.append(message.text))
    write_report([runs / "whole"], tmp_path / "report.html")
    page.set_viewport_size({"width": width, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width and errors == []
    [(step, loss)] = [point for point in recorded(runs / "whole")["code"] if point[0] == 16]
    point = page.locator("circle", has_text=f"code, step {step}: {loss:.4f}").first
    expect(point).to_be_attached()
    of_point, of_chart = point.bounding_box(), point.locator("..").bounding_box()
    assert of_chart["x"] < of_point["x"] < of_chart["x"] + of_chart["width"]


@pytest.mark.parametrize("width", [1200, 400])
def test_long_names_do_not_widen_a_report(page, tmp_path, width):
    names = [f"{letter}{'_long' * 19}" for letter in "abcd"]
    phases = [(name, 40 * i, 40 * (i + 1), {name: 1.0}) for i, name in enumerate(names)]
    losses = dict.fromkeys(("val", *names), lambda step: 3 - step / 100)
    paths = [write_run(tmp_path / name, losses, phases=phases, name=name) for name in names[:2]]
    page.set_viewport_size({"width": width, "height": 800})
    for shown in (paths[:1], paths):
        write_report(shown, tmp_path / "report.html")
        page.goto((tmp_path / "report.html").as_uri())
        page.locator("details").evaluate_all("all => all.forEach(each => each.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_on_paper_a_report_is_whole_and_its_legends_have_their_colours(runs, page, tmp_path):
    """A4 within margins of 14 mm is 688 pixels wide."""
    write_report([runs / "whole"], tmp_path / "report.html")
    page.set_viewport_size({"width": 688, "height": 1000})
    page.emulate_media(media="print")
    page.goto((tmp_path / "report.html").as_uri())
    parts = page.locator(".scroll")
    widths = parts.evaluate_all("parts => parts.map(p => [p.scrollWidth, p.clientWidth])")
    assert len(widths) > 10 and all(whole <= shown for whole, shown in widths)
    for coloured in (page.locator(".legend i").first, page.locator("td.heat").first):
        assert coloured.evaluate("e => getComputedStyle(e).printColorAdjust") == "exact"


def test_the_names_of_rows_stay_in_view_while_a_table_is_scrolled(runs, page, tmp_path):
    write_report([runs / "whole"], tmp_path / "report.html")
    page.set_viewport_size({"width": 400, "height": 800})
    page.goto((tmp_path / "report.html").as_uri())
    table = page.locator(".scroll").filter(has=page.get_by_text("detects a rise of"))
    name = table.get_by_role("rowheader", name="general")
    before = name.bounding_box()
    table.evaluate("t => t.scrollBy(150, 0)")
    assert table.evaluate("t => t.scrollLeft") == 150 and name.bounding_box() == before


def test_a_picture_of_a_report_is_taken(runs, tmp_path):
    file = tmp_path / "report.png"
    command = [sys.executable, SCRIPT, runs / "whole", "--report", "-o", file]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{file}: {file.stat().st_size // 1000} KB\n" and 20_000 < file.stat().st_size < 300_000
