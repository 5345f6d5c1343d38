"""Folders that `datasets` has saved: which of their files hold rows, and which splits they are."""

import json
import os
from collections.abc import Callable, Sequence

from curriculum.errors import InputError

_STATE = "state.json"  # in the folder of a dataset: lists the files that hold its rows
_SPLITS = "dataset_dict.json"  # in a folder of several: names theirs


def rows_of(root: str, names: Sequence[str], wanted: Callable[[str], object]) -> list[str]:
    """The names of files below `root` that are `wanted`, without what `datasets` keeps beside rows.

    That is its notes, and the caches of `map`. Raises InputError if a file with rows is not there, and if several
    splits that were saved together would be read as one text; OSError if a note cannot be read.
    """
    listed: dict[str, set[str]] = {}  # by folder
    splits: dict[str, list[str]] = {}  # by note
    for name in names:
        folder, base = os.path.split(name)
        if base == _STATE:
            rows = _noted(root, name, lambda state: [file["filename"] for file in state["_data_files"]])
            if rows is None:
                continue
            listed[folder] = {os.path.join(folder, row) for row in rows}
            if missing := sorted(listed[folder].difference(names)):
                where = os.path.join(root, name)
                raise InputError(
                    f"{where}: lists {missing[0]}, which is not there; expected the whole folder; save it again"
                )
        elif base == _SPLITS and (noted := _noted(root, name, lambda note: list(note["splits"]))):
            splits[name] = noted
    kept = (name for name in names if name not in splits and wanted(name))
    read = [name for name in kept if name in listed.get(os.path.dirname(name), (name,))]
    for name, noted in splits.items():
        folder = os.path.dirname(name)
        within = {split: os.path.join(folder, split) for split in noted}
        found = [split for split, inside in within.items() if any(path.startswith(f"{inside}/") for path in read)]
        if len(found) > 1:
            one = os.path.join(root, within["train" if "train" in found else found[0]])
            raise InputError(
                f"{os.path.join(root, folder).rstrip('/')}: holds several splits ({', '.join(found)}), which would be "
                f"read as one text; give the folder of one of them, such as {one}"
            )
    return read


def _noted(root: str, name: str, part: Callable[[dict], list[str]]) -> list[str] | None:
    """The names that a note lists; None if the file is another one of its name."""
    try:
        with open(os.path.join(root, name), "rb") as stream:
            names = part(json.load(stream))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return names if all(isinstance(name, str) for name in names) else None
