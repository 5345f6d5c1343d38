"""Tokenizers written as Hugging Face has them: the library gives their ids, and decodes them."""

import json
import random

import pytest
from hf_folders import FAMILIES, SPECIAL_TEXT, TEXTS, corpus, write_folder
from tokenizers import Tokenizer as Library

from curriculum.data.tokenizers.hf_writer import is_qwen, merges_of, onig_pattern, write_hf_tokenizer
from curriculum.data.tokenizers.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from curriculum.data.tokenizers.vocabulary import char_tokenizer, train_bpe

CL100K = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""


def own_tokenizer(kind: str) -> Tokenizer:
    """A small tokenizer of a kind that is made here; tiktoken's has another pattern, unused ids and special ones."""
    if kind == "byte":
        return byte_tokenizer()
    if kind == "char":
        return char_tokenizer([*TEXTS.values(), *corpus(), SPECIAL_TEXT])
    bpe = train_bpe(corpus(), 700)
    if kind == "bpe":
        return bpe
    special = {"<|endoftext|>": 701, "<|fim_prefix|>": 705}
    return Tokenizer("tiktoken", (*bpe.tokens, *[b""] * 6), special, CL100K, "toy")


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "tiktoken"])
def test_the_library_gives_the_ids_and_decodes_them(kind, tmp_path):
    tokenizer = own_tokenizer(kind)
    write_hf_tokenizer(tokenizer, tmp_path, model_max_length=128)
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    library.encode_special_tokens = True
    num_ids = 0
    for text in (*TEXTS.values(), SPECIAL_TEXT, *corpus(), "1234567 12 3\n\n  \n", *noise(tokenizer)):
        ids = library.encode(text, add_special_tokens=False).ids
        assert ids == tokenizer.encode(text).tolist()
        assert library.decode(ids).encode() == text.encode()
        num_ids += len(ids)
    assert num_ids > 5000
    assert library.encode("<|endoftext|>").ids != [tokenizer.eot]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    names = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    assert config | names == config and config["model_max_length"] == 128 and config["split_special_tokens"] is True
    assert json.loads((tmp_path / "special_tokens_map.json").read_text()) == names
    assert {library.token_to_id(name) for name in names.values()} == {tokenizer.eot}


def noise(tokenizer: Tokenizer) -> list[str]:
    """Texts of characters drawn at random, so that pairs stand in every order and place."""
    source = random.Random(1)
    letters = "aAesinrt01 \n\t'.é汉"
    if tokenizer.kind == "char":
        letters = "".join(letter for letter in letters if letter.encode() in tokenizer.tokens)
    return ["".join(source.choices(letters, k=300)) for _ in range(50)]


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_a_written_folder_is_read_again_with_the_same_ids(kind, tmp_path):
    tokenizer = own_tokenizer(kind)
    write_hf_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.eot, again.vocab_size, again.tokens) == (tokenizer.eot, tokenizer.vocab_size, tokenizer.tokens)
    for text in (*TEXTS.values(), SPECIAL_TEXT):
        assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


def test_a_character_that_a_char_tokenizer_lacks_is_an_error(tmp_path):
    write_hf_tokenizer(char_tokenizer(["abc"]), tmp_path)
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    assert library.encode("cab").ids == [2, 0, 1]
    with pytest.raises(Exception, match="Missing .UNK. token"):
        library.encode("ab€")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_passed_on(family, tmp_path):
    source = write_folder(family, tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "copy").mkdir()
    write_hf_tokenizer(load_tokenizer(source), tmp_path / "copy", model_max_length=64)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "copy" / name).read_bytes() == (source / name).read_bytes()
    was, now = (json.loads((tmp_path / f / "tokenizer_config.json").read_text()) for f in ("source", "copy"))
    bos = now.pop("bos_token")
    assert now | {"model_max_length": 512} == {k: v for k, v in was.items() if k != "bos_token"}
    assert bos == ("<|im_end|>" if family == "qwen" else was["bos_token"])
    again = load_tokenizer(tmp_path / "copy")
    assert (again.eot, again.bos) == (load_tokenizer(source).eot, load_tokenizer(source).bos)


def test_a_folder_whose_class_is_built_anew_names_the_one_that_reads_the_file(tmp_path):
    source = write_folder("llama2", tmp_path / "source")
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}')
    (tmp_path / "copy").mkdir()
    write_hf_tokenizer(load_tokenizer(source), tmp_path / "copy")
    config = json.loads((tmp_path / "copy/tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_only_a_tokenizer_of_qwens_class_is_qwens(tmp_path):
    assert not is_qwen(byte_tokenizer())
    for name in ("Qwen2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast", None):
        source = write_folder("qwen", tmp_path / str(name))
        config = json.loads((source / "tokenizer_config.json").read_text()) | {"tokenizer_class": name}
        (source / "tokenizer_config.json").write_text(json.dumps(config))
        assert is_qwen(load_tokenizer(source)) == (name is not None and name.startswith("Qwen"))


def test_a_folder_without_names_gets_them(tmp_path):
    source = write_folder("gpt2", tmp_path / "source")
    (source / "tokenizer_config.json").unlink()
    eot = json.loads((source / "tokenizer.json").read_text())["added_tokens"][0]["id"]
    (source / "config.json").write_text(json.dumps({"eos_token_id": eot}))
    (tmp_path / "copy").mkdir()
    write_hf_tokenizer(load_tokenizer(source), tmp_path / "copy")
    names = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    config = json.loads((tmp_path / "copy/tokenizer_config.json").read_text())
    assert config == {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    assert json.loads((tmp_path / "copy/special_tokens_map.json").read_text()) == names


def test_merges_are_the_pairs_of_lowest_rank():
    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"bc", b"abc", b"", b"abcabc", b"zzzz"]
    # abc: ab is made before bc. zzzz: no zz to make it of.
    assert merges_of(tokens) == [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"abc", b"abc")]
    bpe = train_bpe(corpus(), 700)
    assert len(merges_of(bpe.tokens)) == 700 - 257


def test_patterns_of_tiktoken_in_the_syntax_of_oniguruma():
    assert onig_pattern(r"\p{N}{1,3}+|\s++$|\$x{2}|a{3}+") == r"\p{N}{1,3}|\s++\z|\$x{2}|a{3}"
