"""Text from a run: a checkpoint, ready to go on from prompts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curriculum.errors import InputError
from curriculum.run import DEFAULT_STORE_DIR, load_run
from curriculum.sampling import Sampling
from curriculum.weights import find_saved

if TYPE_CHECKING:
    from curriculum.model.continuation import Generation, NewText, Prompt
    from curriculum.model.generate import Generator
    from curriculum.model.model import Model


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's parameters and what draws text with them."""

    step: int
    generator: Generator
    params: Any
    warnings: tuple[str, ...]

    def prompts(self, texts: Iterable[str]) -> list[Prompt]:
        """Raises InputError for every text that the tokenizer cannot represent."""
        prompts, problems = [], []
        for number, text in enumerate(texts, start=1):
            try:
                prompts.append(self.generator.prompt(text))
            except InputError as error:
                problems += [f"prompt {number}: {problem}" for problem in error.problems]
        if problems:
            raise InputError(*problems)
        return prompts

    def stream(self, texts: Iterable[str], sampling: Sampling) -> Iterator[NewText]:
        """The continuations as they come, several at a time; each text's last piece has all of it."""
        return self.generator.stream(self.params, self.prompts(texts), sampling)


def generate(
    run: str | os.PathLike,
    prompts: Sequence[str],
    *,
    step: str | int | None = None,
    weights: str = "raw",
    store_dir: str | Path = DEFAULT_STORE_DIR,
    make_model: Callable[[int], Model] | None = None,
    **settings: Any,
) -> list[Generation]:
    """What a run goes on with after each prompt, in order; of the run nothing is read but a checkpoint.

    `step` and `weights` are as for `export`, `settings` the fields of `curriculum.sampling.Sampling`. `make_model` is
    the one that the run was trained with, where it was. A prompt is read as a document that begins so, all of it
    ordinary text; an empty one leaves the beginning to the model. The same settings, seed, prompt and parameters give
    the same text on the same machine, whatever other prompts there are; of equal prompts each has draws of its own.

    Raises InputError for a run, step, weights or settings that will not do, and for a prompt longer than the model's
    positions.
    """
    sampling = Sampling(**settings)
    if problems := sampling.problems():
        raise InputError(*(f"{name}: {message}" for name, message in problems))
    loaded = load_generator(run, step=step, weights=weights, store_dir=store_dir, make_model=make_model)
    return loaded.generator.generate(loaded.params, loaded.prompts(prompts), sampling)


def load_generator(
    run: str | os.PathLike,
    *,
    step: str | int | None = None,
    weights: str = "raw",
    store_dir: str | Path = DEFAULT_STORE_DIR,
    make_model: Callable[[int], Model] | None = None,
) -> Loaded:
    """A checkpoint on the devices of the run's mesh or, where that does not fit, a copy on each; as for `generate`."""
    saved = find_saved(run, load_run(run).config, step, weights, make_model, "generate")

    # What can be said without these is said at once.
    from curriculum.model.generate import Generator
    from curriculum.train.mesh import on_mesh
    from curriculum.train.trained import load_trained

    trained = load_trained(saved, store_dir)
    warnings = () if trained.unfit_mesh is None else (f"{trained.unfit_mesh}: each has all parameters",)
    generator = Generator(on_mesh(trained.model, trained.mesh), saved.tokenizer, trained.mesh)
    return Loaded(saved.step, generator, trained.params, warnings)


def read_prompts(path: str | os.PathLike) -> list[str]:
    """The prompts of a file: in a `.jsonl` the `prompt` of each line's object, in any other each line. Not blank ones.

    Raises InputError for a file that cannot be read or holds none, and for every line that is not what it should be.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # a byte order mark is no text, as in sources
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, bytes that are no UTF-8
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--prompts-file {path}: cannot be read: {reason}") from None
    prompts, problems = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if Path(path).suffix != ".jsonl":
            prompts.append(line.removesuffix("\r"))
            continue
        try:
            row = json.loads(line)
            prompt = row["prompt"] if isinstance(row, dict) else None
        except (ValueError, KeyError, RecursionError):
            prompt = None
        if isinstance(prompt, str):
            prompts.append(prompt)
        else:
            problems.append(f'{path}:{number}: got {line[:60]!r}, expected an object with a text as "prompt"')
    if not problems and not prompts:
        problems.append(f"--prompts-file {path}: holds no prompt, expected one a line")
    if problems:
        raise InputError(*problems)
    return prompts
