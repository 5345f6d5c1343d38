"""The windows of an eval on disk: `evals/<step>.npz`, with an array for each field of each set's `WindowResults`.

An array is named `<set>.<field>`, or `<set>@<average>.<field>` if it was measured with an average of the parameters.
Sets are named as in the config.
"""

import io
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from curriculum.disk.durable import write_whole
from curriculum.errors import InputError
from curriculum.run_directory import read_arrays
from evalsets.metrics import WindowResults


def write_results(
    path: Path, results: Mapping[str, WindowResults], averaged: Mapping[str, Mapping[str, WindowResults]]
) -> None:
    """Write an eval's results by set, and by average and set, atomically; other sets of this step stay in the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = read_arrays(path) if path.exists() else {}
    named = dict(results) | {f"{name}@{a}": result for a, sets in averaged.items() for name, result in sets.items()}
    arrays |= {
        _array_name(name, field): array
        for name, result in named.items()
        for field, array in result._asdict().items()
        if array is not None
    }
    _replace(path, arrays)


def read_results(path: Path) -> dict[str, WindowResults]:
    """The results of the raw parameters that `write_results` wrote, by set; empty if there is no such file."""
    if not path.exists():
        return {}
    arrays = read_arrays(path)
    names = dict.fromkeys(key.rpartition(".")[0] for key in arrays if "@" not in key)
    return {name: windows_of(arrays, name) for name in names}


def windows_of(arrays: Mapping[str, np.ndarray], name: str) -> WindowResults:
    """The windows of `<set>` or `<set>@<average>` from a file's arrays.

    Raises KeyError with the name of an array that is missing, unless its field has a default, as older files lack it.
    """
    array_names = {field: _array_name(name, field) for field in WindowResults._fields}
    optional = WindowResults._field_defaults
    return WindowResults(**{f: arrays[key] for f, key in array_names.items() if key in arrays or f not in optional})


def recorded_windows(path: Path, arrays: Mapping[str, np.ndarray], name: str, loss: float) -> WindowResults:
    """`windows_of` a file's arrays. Raises InputError if the loss, to the record's six decimals, or lengths differ."""
    windows = windows_of(arrays, name)
    got = "arrays of different lengths"
    if {array.shape for array in windows if array is not None} == {(windows.nats_N.size,)}:
        with np.errstate(invalid="ignore", divide="ignore"):
            found = np.sum(windows.nats_N, dtype=np.float64) / np.sum(windows.tokens_N)
        if np.isclose(found, loss, rtol=1e-9, atol=1e-6, equal_nan=True):
            return windows
        got = f"a loss of {found:.6f}"
    raise InputError(
        f"{path}: the windows of {name} are not those of that eval: got {got}, expected a loss of {loss:.6f}, as in "
        "the record; restore the file from a copy"
    )


def keep_sets(path: Path, names: Collection[str]) -> None:
    """Drop all sets but these from a file; what was measured of these with averages stays too."""
    kept = {key: array for key, array in read_arrays(path).items() if key.rpartition(".")[0].partition("@")[0] in names}
    _replace(path, kept)


def _array_name(name: str, field: str) -> str:
    return f"{name}.{field.removesuffix('_N')}"


def _replace(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_whole(path, content.getvalue())  # durable, so that a checkpoint is never ahead of them
