"""Folders that `datasets` has saved: which of their files hold rows, and which splits they are."""

import json
import os
from collections.abc import Callable, Sequence

from curriculum.errors import InputError

_STATE = "state.json"  # in the folder of a dataset: lists the files that hold its rows
_SPLITS = "dataset_dict.json"  # in a folder of several: names theirs


def without_notes(root: str, names: Sequence[str]) -> list[str]:
    """The names of files below `root` without what `datasets` keeps beside rows: its notes, and the caches of `map`.

    Raises InputError if a file with rows is not there, OSError if a note cannot be read.
    """
    rows_of: dict[str, set[str]] = {}
    notes = set()
    for name in names:
        folder, base = os.path.split(name)
        if (
            base == _STATE
            and (rows := _noted(root, name, lambda s: [f["filename"] for f in s["_data_files"]])) is not None
        ):
            rows_of[folder] = {os.path.join(folder, row) for row in rows}
            if missing := sorted(rows_of[folder].difference(names)):
                where = os.path.join(root, name)
                raise InputError(
                    f"{where}: lists {missing[0]}, which is not there; expected the whole folder; save it again"
                )
        elif base == _SPLITS and _splits(root, name):
            notes.add(name)
    kept = (name for name in names if name not in notes)
    return [name for name in kept if name in rows_of.get(os.path.dirname(name), (name,))]


def refuse_splits(root: str, names: Sequence[str], read: Sequence[str]) -> None:
    """Raise InputError if `read`, of the files `names` below `root`, are of several splits that were saved together."""
    for name in names:
        folder, base = os.path.split(name)
        if base != _SPLITS:
            continue
        within = {split: os.path.join(folder, split) for split in _splits(root, name)}
        found = [split for split, inside in within.items() if any(path.startswith(f"{inside}/") for path in read)]
        if len(found) > 1:
            one = os.path.join(root, within["train" if "train" in found else found[0]])
            raise InputError(
                f"{os.path.join(root, folder).rstrip('/')}: holds several splits ({', '.join(found)}), which would be "
                f"read as one text; give the folder of one of them, such as {one}"
            )


def _splits(root: str, name: str) -> list[str]:
    return _noted(root, name, lambda noted: list(noted["splits"])) or []


def _noted(root: str, name: str, part: Callable[[dict], list[str]]) -> list[str] | None:
    """The names that a note lists; None if the file is another one of its name."""
    try:
        with open(os.path.join(root, name), "rb") as stream:
            names = part(json.load(stream))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return names if all(isinstance(name, str) for name in names) else None
