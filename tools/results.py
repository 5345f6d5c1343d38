"""What tools have in common: their option --json, timing in turns, the machine in words, and printing figures."""

import argparse
import json
import os
import platform
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def json_parser(doc: str) -> argparse.ArgumentParser:
    """A parser described by a docstring's first line, with --json FILE: refused at once if its folder is not there."""

    def path(name: str) -> Path:
        if not Path(name).absolute().parent.is_dir():
            raise argparse.ArgumentTypeError(f"{name}: its folder does not exist")
        return Path(name)

    parser = argparse.ArgumentParser(description=doc.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--json", type=path, metavar="FILE", help="also write the results to this file")
    return parser


def in_turns(work: Mapping[str, Callable[[], Any]], num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, processor) seconds of each piece of work in each round, after a round that is not timed.

    Those of a process count once it is waited for.
    """

    def processor_seconds() -> float:
        used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(of.ru_utime + of.ru_stime for of in used)

    taken = {name: [] for name in work}
    for _ in range(num_rounds + 1):
        for name, run in work.items():
            started, processor_started = time.perf_counter(), processor_seconds()
            run()
            taken[name].append((time.perf_counter() - started, processor_seconds() - processor_started))
    return {name: times[1:] for name, times in taken.items()}


def report(rows: Sequence[Mapping[str, Any]], path: Path | None, *packages: str, **besides: Any) -> None:
    """Print the machine, a table and what was measured `besides`; write them to the file that --json names, if any."""
    about = machine(*packages)
    print_figures(about)
    print_table(rows)
    if besides:
        print_figures(besides)
    write_json(path, {"machine": about, "results": rows, **besides})


def write_json(path: Path | None, results: Any) -> None:
    """Write what was measured to the file that --json names, if it names one."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")


def machine(*packages: str) -> dict[str, Any]:
    """Processor, cores, Python, and the version of each package that is installed; never the host's name."""
    versions = {name: version(name) for name in packages if find_spec(name)}
    return {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version(), **versions}


def processor() -> str:
    """The processor's name by Linux; on other systems, by Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def print_figures(figures: Mapping[str, Any]) -> None:
    print(", ".join(f"{key}: {value}" for key, value in figures.items()))


def print_lines(figures: Mapping[str, Any]) -> None:
    """A line for each figure."""
    for name, value in figures.items():
        print(f"{name:>20}  {value:,}" if isinstance(value, int) else f"{name:>20}  {value}")


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per row below the column names, each column as wide as it needs; None is an empty cell."""
    if not rows:
        return
    cells = [list(rows[0]), *(["" if cell is None else str(cell) for cell in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)))
