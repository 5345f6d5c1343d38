"""Text that the model generates during training, always from the same prompts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import numpy as np
from jax.sharding import Mesh

from curriculum.config import Config
from curriculum.data.chat import Template
from curriculum.data.tokenizers.chat_template import ends_answer
from curriculum.data.tokenizers.tokenizer import Tokenizer
from curriculum.errors import InputError
from curriculum.model.continuation import Prompt
from curriculum.model.generate import Generator
from curriculum.model.model import Model, Params
from evalsets.evalset import EvalSet


class Samples:
    """Continues the prompts of `logging.generate` with any parameters, by programs that are compiled once.

    The parameters are only read, and sampling has its own random keys: training is the same with and without it.
    Raises InputError if the model cannot generate, and for every unusable prompt.
    """

    def __init__(self, config: Config, mesh: Mesh, model: Model, tokenizer: Tokenizer, evalsets: Mapping[str, EvalSet]):
        section = self.sampling = config.logging.generate
        self.mesh, self.generator = mesh, Generator(model, tokenizer, mesh)
        self.prompts: list[Prompt] = []
        problems = []
        for i, text in enumerate(section.prompts):
            try:
                self.prompts.append(self.generator.prompt(text))
                self.generator.check_length(self.prompts[-1])
            except InputError as error:
                problems += [(f"logging.generate.prompts[{i}]", problem) for problem in error.problems]
        if section.evalset is not None:
            _, closing = ends_answer(Template.of(config.chat, tokenizer.special_tokens), tokenizer)
            ends = (*tokenizer.stops, *(() if closing is None else (closing,)))
            found = beginnings(evalsets[section.evalset], section.num, section.prompt_tokens, tokenizer, ends)
            if not found:
                got = (
                    f"every conversation in {section.evalset} starts with a window that holds no answer, so there is "
                    "no beginning to use as a prompt"
                )
                fix = "name another set, give prompts, or raise evalsets.seq_len"
                problems.append(("logging.generate.from_evalset", f"{got}; {fix}"))
            self.prompts += found
        if problems:
            raise config.error(problems)

    def using(self, model: Model) -> Samples:
        """The same prompts for another model, which is compiled separately."""
        other = copy.copy(self)
        other.generator = Generator(model, self.generator.tokenizer, self.mesh)
        return other

    def compile(self, params: Params) -> None:
        """Compile for parameters like `params`, arrays or jax.ShapeDtypeStruct; later calls accept no others."""
        self.generator.compile(params, self.prompts, self.sampling)

    def __call__(self, params: Params) -> list[dict[str, Any]]:
        """One sample per prompt, as in the event `generation`."""
        return [sample.to_json() for sample in self.generator.generate(params, self.prompts, self.sampling)]


def beginnings(
    evalset: EvalSet, num: int, prompt_tokens: int, tokenizer: Tokenizer, ends: tuple[int, ...] = ()
) -> list[Prompt]:
    """The beginnings of `num` documents of a set, in the set's order.

    Of the first documents longer than `prompt_tokens`, that many tokens; of a conversation, everything up to its first
    answer. If these are too few, the first of the other documents are used as well. A conversation whose first window
    holds no answer has no beginning in the set. `ends` are those of the prompts.
    """
    first_D = np.flatnonzero(evalset.opens_N)
    length_D = evalset.seq_len - evalset.scored_NT[first_D, ::-1].argmax(axis=1)  # up to the last scored token
    asked_D = evalset.scored_NT[first_D].argmax(axis=1)  # what stands before the first scored token; 0 of plain text
    prompt_D = np.where(asked_D > 0, asked_D, np.minimum(length_D, min(prompt_tokens, evalset.seq_len - 1)))
    chosen_D = np.sort(np.argsort(length_D <= prompt_D, kind="stable")[:num])
    return [
        Prompt(_shown(ids[1:], tokenizer), ids.astype(np.int32), ends)
        for ids in (evalset.tokens_NT1[first_D[d], : 1 + prompt_D[d]] for d in chosen_D)
    ]


def _shown(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """The text of ids that begin a document, with special tokens as their names."""
    names = {id_: name for name, id_ in tokenizer.special_tokens.items()}
    parts, opens = [], True
    for name, stretch in groupby(ids.tolist(), names.get):
        same = list(stretch)
        parts.append(tokenizer.decode_bytes(same, opens) if name is None else name.encode() * len(same))
        opens = name is not None and tokenizer.puts_prefix_after(name, special=True)
    return b"".join(parts).decode(errors="replace")
