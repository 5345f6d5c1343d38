"""Text from a run: load a checkpoint and continue prompts with it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curriculum.data.chat import Template
from curriculum.data.tokenizers.chat_template import ends_answer
from curriculum.errors import InputError, check_several
from curriculum.run import DEFAULT_STORE_DIR, load_run
from curriculum.run_directory import RunDirectory
from curriculum.sampling import Sampling
from curriculum.saved_weights import chosen_again, find_saved
from curriculum.schema.adaptation import chat_of

if TYPE_CHECKING:
    from curriculum.model.continuation import Generation, NewText, Prompt
    from curriculum.model.generate import Generator
    from curriculum.model.model import Model


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's parameters and the generator that draws text with them.

    `template` is that of the conversations that it was trained on, the config's if `knows_chat` is false.
    """

    step: int
    generator: Generator
    params: Any
    warnings: tuple[str, ...]
    template: Template
    knows_chat: bool

    def until_answered(self, sampling: Sampling) -> Sampling:
        """The settings with which a continuation ends where the chat template closes an answer."""
        closing, _ = ends_answer(self.template, self.generator.tokenizer)  # at the token its prompts end
        return replace(sampling, stop=(*sampling.stop, closing)) if closing else sampling

    def prompts(self, texts: Iterable[str], chat: bool = False) -> list[Prompt]:
        """The texts as prompts, with `chat` as what users say. Raises InputError for text without ids."""
        check_several("prompts", texts)
        prompts, problems = [], []
        for number, text in enumerate(texts, start=1):
            try:
                prompts.append(self.generator.prompt(text, self.template if chat else None))
            except InputError as error:
                problems += [f"prompt {number}: {problem}" for problem in error.problems]
        if problems:
            raise InputError(*problems)
        return prompts

    def stream(self, texts: Iterable[str], sampling: Sampling, chat: bool = False) -> Iterator[NewText]:
        """Pieces of the continuations as they are drawn, several texts at a time; a text's last piece has all of it."""
        from curriculum.train.device import own_settings

        pieces = self.generator.stream(self.params, self.prompts(texts, chat), sampling)
        # Piece by piece: what the caller does meanwhile is his own.
        return iter(own_settings()(lambda: next(pieces, None)), None)


def generate(
    run: str | os.PathLike,
    prompts: Sequence[str],
    *,
    step: str | int | None = None,
    weights: str = "raw",
    store_dir: str | Path = DEFAULT_STORE_DIR,
    make_model: Callable[[int], Model] | None = None,
    chat: bool = False,
    **settings: Any,
) -> list[Generation]:
    """Continue each prompt with a checkpoint of a run, in order. The run is only read.

    `step` and `weights` are as for `export`, `settings` the fields of `curriculum.sampling.Sampling`. `make_model` is
    the one that the run was trained with, if any. A prompt is read as the beginning of a document, all of it ordinary
    text; an empty one leaves the beginning to the model. The same settings, seed, prompt and parameters give the same
    text on the same machine, whatever the other prompts are; equal prompts have draws of their own. With `chat` a
    prompt is what a user says: it is written by the run's chat template, and the text ends where an answer does.

    Raises InputError for a run, step, weights or settings that cannot be used, and for a prompt longer than the model's
    positions.
    """
    check_several("prompts", prompts)
    sampling = Sampling(**settings)
    if problems := sampling.problems():
        raise InputError(*(f"{name}: {message}" for name, message in problems))
    loaded = load_generator(run, step=step, weights=weights, store_dir=store_dir, make_model=make_model)
    sampling = loaded.until_answered(sampling) if chat else sampling
    from curriculum.train.device import own_settings

    with own_settings():
        return loaded.generator.generate(loaded.params, loaded.prompts(prompts, chat), sampling)


@chosen_again
def load_generator(
    run: str | os.PathLike,
    *,
    step: str | int | None = None,
    weights: str = "raw",
    store_dir: str | Path = DEFAULT_STORE_DIR,
    make_model: Callable[[int], Model] | None = None,
) -> Loaded:
    """Load a checkpoint onto the run's mesh or, if that does not fit, a copy onto each device; as for `generate`."""
    config = load_run(run).config
    saved = find_saved(run, config, step, weights, make_model, "generate")

    # Slow imports, after all checks that do without them.
    from curriculum.model.generate import Generator
    from curriculum.train.device import own_settings
    from curriculum.train.mesh import on_mesh
    from curriculum.train.trained import load_trained

    with own_settings():
        trained = load_trained(saved, store_dir)
        generator = Generator(on_mesh(trained.model, trained.mesh), saved.tokenizer, trained.mesh)
    warnings = () if trained.unfit_mesh is None else (f"{trained.unfit_mesh}: each device holds all parameters",)
    known = chat_of(RunDirectory(Path(run)).resolved(), saved.ledger, saved.step)
    template = known or Template.of(config.chat, saved.tokenizer.special_tokens)
    return Loaded(saved.step, generator, trained.params, warnings, template, known is not None)


def read_prompts(path: str | os.PathLike) -> list[str]:
    """The prompts of a file: the `prompt` of each object in a `.jsonl` or `.ndjson`, else each line that is not blank.

    Raises InputError for a file that cannot be read or has no prompts, and with every line of a `.jsonl` that has none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # without a byte order mark, as in sources
    except UnicodeDecodeError as error:
        raise InputError(f"--prompts-file {path}: byte {error.start}: not UTF-8; convert the file to UTF-8") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"--prompts-file {path}: cannot be read: {reason}") from None
    if "\0" in text:
        raise InputError(f"--prompts-file {path}: holds NUL, expected UTF-8 text; UTF-16? convert the file to UTF-8")
    is_rows = Path(path).suffix.lower() in (".jsonl", ".ndjson")
    prompts, problems = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if not is_rows:
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
        problems.append(f"--prompts-file {path}: holds no prompt, expected one per line")
    if problems:
        raise InputError(*problems)
    return prompts
