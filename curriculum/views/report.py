"""The report: one HTML file about a run, or about several side by side, made from their records.

The file is self-contained and has no script. The same runs give the same bytes.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from curriculum.disk.durable import write_whole
from curriculum.errors import InputError, check_several
from curriculum.record.events import last_row
from curriculum.run import Run, left_out, load_runs, of_whole_runs
from curriculum.views.compare import labels
from curriculum.views.inspection import inspect_run
from curriculum.views.page import document, tag
from curriculum.views.report_run import of_run
from curriculum.views.report_runs import MOST_WHOLE, of_runs


def write_report(run_dirs: Sequence[str | os.PathLike], output: str | os.PathLike) -> list[str]:
    """Write the report of one or more runs to the file `output`; a folder of runs stands for all of its runs.

    Runs of a folder that have not begun or cannot be read are left out. Returns a line on each, as on the page.

    Raises InputError if there is no run, one has not begun or cannot be read, or `output` cannot be written. An earlier
    report is replaced; another file, such as a run's record, is refused.
    """
    check_several("run_dirs", run_dirs)
    path = Path(output)
    if os.path.isdir(path) or not os.path.isdir(path.absolute().parent):
        raise InputError(f"-o {output}: expected a file path in an existing folder, such as report.html")
    runs, damaged = load_runs(run_dirs, lambda run: (run.start, last_row(run.directory.path)))
    if len(runs) <= MOST_WHOLE:  # whose rows are drawn; those of many long runs would not fit into memory
        runs, damaged = load_runs(run_dirs, lambda run: (run.start, run.metrics))
    page = of_whole_runs(lambda whole: report(whole, left_out(damaged)), runs, damaged, run_dirs)
    # A folder's name need not be valid text: other bytes are shown escaped.
    page = page.encode(errors="backslashreplace").decode()
    try:
        if path.exists() and not path.is_file():  # a device or a pipe is written to, never replaced
            path.write_text(page, encoding="utf-8")
        elif path.exists() and not _is_page(path):
            raise InputError(f"-o {output}: exists and is not an HTML page; expected a new file or an earlier report")
        else:
            write_whole(path, page, durable=False)
    except OSError as error:
        raise InputError(f"-o {output}: cannot be written: {error.strerror}") from None
    return left_out(damaged)


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(100)
    return (not start and path.suffix == ".html") or start.lstrip().lower().startswith(b"<!doctype html")


def report(runs: Sequence[Run], without: Sequence[str] = ()) -> str:
    """The report as HTML; `without`: lines on runs left out. Raises InputError for no run, or one not begun."""
    if not runs:
        raise InputError("got no run, expected one or more to report on")
    names = labels(runs)
    told = [tag("p", line, class_="bad") for line in without]
    if len(runs) == 1:
        return document(f"{names[0]}: training report", *told, *of_run(runs[0], inspect_run(runs[0]), names[0]))
    return document(f"{', '.join(names)}: comparison", *told, *of_runs(runs, names))
