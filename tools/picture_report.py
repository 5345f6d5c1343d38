"""Take a picture of the head of a run's report: the numbers that matter most, and the chart of every eval set.

    python tools/picture_report.py runs/quickstart -o docs/report.png

Needs what picture_tensorboard.py needs.
"""

import argparse
import tempfile
from pathlib import Path

from picture_tensorboard import CHROMIUM_NAMES, browser, find_chromium, new_page

from curriculum.views.report import write_report


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=760)
    options = parser.parse_args(argv)
    if find_chromium() is None:
        parser.error(f"no browser on the PATH: install one of {', '.join(CHROMIUM_NAMES)}")
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        write_report([options.run], Path(folder, "report.html"))
        page = new_page(chromium, options.width, options.height)
        page.goto(Path(folder, "report.html").as_uri())
        page.screenshot(path=options.output, animations="disabled")
    print(f"{options.output}: {options.output.stat().st_size // 1000} KB")


if __name__ == "__main__":
    main()
