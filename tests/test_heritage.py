"""What a config may say of a tokenizer that it inherits."""

from dataclasses import replace

import pytest

from curriculum.data.tokenizers.tokenizer import TokenizerConfig
from curriculum.data.tokenizers.vocabulary import train_bpe
from curriculum.schema.heritage import Heritage


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (TokenizerConfig("tiktoken", name="gpt2"), []),
        (TokenizerConfig("bpe", vocab_size=260), []),  # as the run's own config calls it
        (TokenizerConfig("tiktoken", name="r50k_base"), [("tokenizer.name", "got r50k_base, but base has gpt2")]),
        (TokenizerConfig("bpe", vocab_size=270), [("tokenizer.vocab_size", "got 270, but base has 260")]),
        (TokenizerConfig("char"), [("tokenizer.kind", "got char, but base has tiktoken")]),
    ],
)
def test_a_tokenizer_may_be_called_as_the_run_or_its_files_call_it(given, told):
    tokenizer = replace(train_bpe(["some text " * 20], 260), kind="tiktoken", name="gpt2")
    sections = {"model": None, "tokenizer": {"kind": "bpe", "path": "base/tokenizer"}}
    problems = Heritage("base", sections, tokenizer, {}).problems(None, given)
    assert list(problems) == [(path, f"{why}; leave the section out to use the same") for path, why in told]
