"""Take a picture of a run: of what TensorBoard shows, every eval set in one chart with the table of values.

    python tools/picture_run.py runs/quickstart -o docs/tensorboard.png
    python tools/picture_run.py runs/quickstart --report -o docs/report.png     # of the head of its report instead

Needs chromium on the PATH, and playwright, which drives it. Starts a TensorBoard of its own over the folder above the
run, on 127.0.0.1, and stops it after the picture.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from curriculum.record.commands import tensorboard_link
from curriculum.record.curves import all_sets
from curriculum.record.events import read_events
from curriculum.views.report import write_report

PATIENCE_SECONDS = 60
WIDTHS = "path => [path.getBBox().width, path.ownerSVGElement.getBoundingClientRect().width]"
CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--report", action="store_true", help="the head of its report")
    options = parser.parse_args(argv)
    if find_chromium() is None:
        parser.error(f"no browser on the PATH: install one of {', '.join(CHROMIUM_NAMES)}")
    if not options.report and not (options.run / "tensorboard").is_dir():
        parser.error(f"{options.run}: holds no tensorboard folder (logging.tensorboard)")
    (picture_report if options.report else picture_tensorboard)(options.run, options.output)
    print(f"{options.output}: {options.output.stat().st_size // 1000} KB")


def picture_report(run: Path, output: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        write_report([run], Path(folder, "report.html"))
        page = new_page(chromium, 1200, 760)
        page.goto(Path(folder, "report.html").as_uri())
        page.screenshot(path=output, animations="disabled")


def picture_tensorboard(run: Path, output: Path) -> None:
    with tensorboard(run.resolve().parent) as address, browser() as chromium:
        wait_for(address, run)
        page = new_page(chromium, 1200, 700)
        page.goto(link(run, address).replace("=eval_sets", "=eval_sets/loss"))  # this chart alone
        chart = eval_chart(page)
        path_width, chart_width = drawn(chart).first.evaluate(WIDTHS)
        page.get_by_role("button", name="Settings").first.click()
        chart.get_by_title("Toggle full size mode").click()
        expect(page.get_by_text("Smoothing")).to_have_count(0)
        page.mouse.move(0, 0)
        page.wait_for_function(  # until the chart is wider and its curves are redrawn to the same share of it
            f"([path, chartWidth, share]) => {{const [own, whole] = ({WIDTHS})(path); "
            "return whole > chartWidth && own > 0.95 * share * whole}",
            arg=[drawn(chart).first.element_handle(), chart_width, path_width / chart_width],
        )
        page.screenshot(path=output, animations="disabled")


@contextmanager
def tensorboard(logdir: Path, *options: str) -> Iterator[str]:
    """The address of a TensorBoard of this environment that serves `logdir` on a free port of 127.0.0.1."""
    program = Path(sys.executable).with_name("tensorboard")
    command = [program, "--logdir", logdir, "--host", "127.0.0.1", "--port", "0", "--reload_interval", "1", *options]
    with tempfile.NamedTemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield _address(server, Path(log.name))
        finally:
            server.terminate()
            server.wait()


def _address(server: subprocess.Popen, log: Path) -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        if told := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            return told[0]
        time.sleep(0.05)
    raise RuntimeError(f"TensorBoard did not start: {log.read_text()}")


def wait_for(address: str, run_dir: Path) -> None:
    """Wait until TensorBoard has read the last eval of a run, in its main curves and in those of every set."""
    main, last = f"{run_dir.resolve().name}/tensorboard", {}
    for event in read_events(run_dir):
        if event["event"] == "eval":
            for name in all_sets(event):
                last |= {
                    (main, f"eval/{name}/loss"): event["step"],
                    (f"{main}/{name}", "eval_sets/loss"): event["step"],
                }
    deadline = time.monotonic() + PATIENCE_SECONDS
    for curve, step in last.items():
        while not (points := scalars(address, *curve)) or points[-1][0] != step:
            if time.monotonic() > deadline:
                raise RuntimeError(f"TensorBoard has not read {run_dir}: {curve} ends at {points[-1:]}, not at {step}")
            time.sleep(0.05)


def scalars(address: str, run: str, tag: str) -> list[tuple[int, float]]:
    """(step, value) of every point of a curve that TensorBoard holds; empty if it knows no such curve."""
    request = f'[{{"plugin": "scalars", "tag": {json.dumps(tag)}, "run": {json.dumps(run)}}}]'
    boundary = "points"
    body = f'--{boundary}\r\nContent-Disposition: form-data; name="requests"\r\n\r\n{request}\r\n--{boundary}--\r\n'
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    url = f"{address}/experiment/defaultExperimentId/data/plugin/timeseries/timeSeries"
    with urllib.request.urlopen(urllib.request.Request(url, body.encode(), headers)) as answer:
        [series] = json.load(answer)
    return [(point["step"], point["value"]) for point in series.get("runToSeries", {}).get(run, [])]


def link(run_dir: Path, address: str) -> str:
    """The link that the console prints at a run's end, with `address` as its host and port."""
    return address + tensorboard_link(run_dir).removeprefix("http://127.0.0.1:6006")


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium without a window. 3D is off, so that TensorBoard draws each curve as an SVG path that can be read."""
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-3d-apis"]
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=arguments)
        try:
            yield chromium
        finally:
            chromium.close()


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


def new_page(chromium: Browser, width: int = 1200, height: int = 900) -> Page:
    page = chromium.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(PATIENCE_SECONDS * 1000)
    expect.set_options(timeout=PATIENCE_SECONDS * 1000)
    return page


def eval_chart(page: Page) -> Locator:
    """The card of every eval set's loss, once it is drawn."""
    return card(page, "eval_sets/loss")


def card(page: Page, tag: str) -> Locator:
    """The card of a tag, once something is drawn in it."""
    chart = page.locator("scalar-card-component").filter(has=page.get_by_text(tag, exact=True))
    expect(drawn(chart).first).to_be_attached()
    return chart


def drawn(chart: Locator) -> Locator:
    """The curves of a chart."""
    return chart.locator(".series-view > svg > path")


if __name__ == "__main__":
    main()
