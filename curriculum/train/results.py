"""The results of every eval of a run, window by window, in `evals/<step>.npz`."""

import shutil
from collections.abc import Collection, Mapping

from curriculum.disk.append import is_disk_error, tell
from curriculum.errors import InputError
from curriculum.record.windows import keep_sets, read_results, write_results
from curriculum.run_directory import RunDirectory
from curriculum.train.processes.together import from_first, is_first
from evalsets.metrics import WindowResults


class Results:
    """Reads and writes eval results, as process 0 for all; what a full disk refuses is written with the next ones."""

    def __init__(self, directory: RunDirectory):
        self._directory = directory
        self._held: list[tuple[int, Mapping[str, WindowResults], Mapping[str, Mapping[str, WindowResults]]]] = []
        self._newest: tuple[int | None, Mapping[str, WindowResults]] = (None, {})  # all results of a step, if in memory

    def write(
        self, step: int, results: Mapping[str, WindowResults], averaged: Mapping[str, Mapping[str, WindowResults]]
    ) -> None:
        """Keep the results of an eval by set, and those of averages of the parameters by average and set."""
        if not is_first():
            return
        self._newest = (None, {}) if self._directory.results(step).exists() else (step, results)
        self._held.append((step, results, averaged))
        try:
            self.flush()
        except OSError as error:
            if not is_disk_error(error):
                raise
            if len(self._held) == 1:
                path, when = self._directory.results(step), "until there is room, as those after it"
                tell(f"{path}: cannot be written: {error.strerror}; kept in memory {when}")

    def flush(self) -> None:
        """Write what was held back. Raises OSError if the disk still refuses it."""
        while self._held:
            step, results, averaged = self._held[0]
            self._on_disk(step)
            write_results(self._directory.results(step), results, averaged)
            self._held.pop(0)

    def read(self, step: int) -> dict[str, WindowResults]:
        """The results of the raw parameters at a step, by set; empty if there was no eval, or if they are damaged."""
        found = from_first(lambda: {name: result._asdict() for name, result in self._found(step).items()})
        return {name: WindowResults(**arrays) for name, arrays in found.items()}

    def keep_only(self, step: int, names: Collection[str]) -> None:
        """Keep only these sets of the eval at a step; if it has others, a whole copy goes to `superseded/`."""
        path = self._directory.results(step)
        if not self._on_disk(step).keys() - names:
            return
        shutil.copyfile(path, self._directory.superseded_results(step))
        keep_sets(path, names)

    def _found(self, step: int) -> Mapping[str, WindowResults]:
        if step == self._newest[0]:
            return self._newest[1]
        found = self._on_disk(step)
        for held, results, _ in self._held:
            if held == step:
                found |= results
        return found

    def _on_disk(self, step: int) -> dict[str, WindowResults]:
        """What the disk has. An unreadable file is moved to `superseded/`, with a message, and the run continues."""
        path = self._directory.results(step)
        try:
            return read_results(path)
        except InputError as error:
            target = path.replace(self._directory.superseded_results(step))
            tell(f"{error}; moved to {target}: figures computed from it will be missing")
            return {}
