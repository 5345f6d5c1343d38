"""transformers' AutoTokenizer gives the ids of ours, of folders it wrote and of folders we write."""

import importlib.util
import json

import pytest
from hf_folders import FAMILIES, SPECIAL_TEXT, TEXTS, corpus, definition_of, write_folder
from test_chat_template import CHATS, KINDS, TALKS, in_training, tokenizer_of
from test_hf_writer import own_tokenizer

from curriculum.data.chat import Template
from curriculum.data.tokenizers.chat_template import opens_document
from curriculum.data.tokenizers.hf_writer import write_hf_tokenizer
from curriculum.data.tokenizers.tokenizer import load_tokenizer
from curriculum.model.formats.hf_config import CLASSES

MISSING = importlib.util.find_spec("transformers") is None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MISSING, reason="transformers not installed: the `parity` extra has it"),
]


REAL_TEXTS = [*TEXTS.values(), *corpus()]


def assert_same_ids(theirs, ours) -> None:
    num_ids = 0
    for text in REAL_TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text).tolist()
        num_ids += len(ids)
    assert num_ids > 5000


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_folder(family, tmp_path):
    import transformers

    source = write_folder(family, tmp_path / "source")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(source), load_tokenizer(source)
    assert_same_ids(theirs, ours)
    assert theirs.eos_token_id == ours.eot and theirs.bos_token_id in (ours.bos, None)
    assert theirs(SPECIAL_TEXT, add_special_tokens=False, split_special_tokens=True)["input_ids"] == (
        ours.encode(SPECIAL_TEXT).tolist() if family != "unigram" else unigram_finds_names(theirs, ours)
    )


def unigram_finds_names(theirs, ours) -> list[int]:
    """What transformers makes of the names of special pieces in a unigram vocabulary: the pieces. Ours are text."""
    ids = theirs(SPECIAL_TEXT, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert set(ids) & set(ours.special_tokens.values())
    assert not set(ours.encode(SPECIAL_TEXT).tolist()) & set(ours.special_tokens.values())
    return ids


@pytest.mark.parametrize(
    ("name", "family"),
    [("GPT2Tokenizer", "gpt2"), ("Qwen2Tokenizer", "qwen"), ("LlamaTokenizer", "mistral")],
)
def test_of_a_folder_that_a_class_of_transformers_saved(name, family, tmp_path):
    import transformers

    model = definition_of(family)[0]["model"]
    vocabulary, merges = dict(model["vocab"]), [tuple(pair) for pair in model["merges"]]
    if family != "mistral":
        vocabulary["<|endoftext|>"] = len(vocabulary)
    made = getattr(transformers, name)(vocab=vocabulary, merges=merges)
    made.save_pretrained(tmp_path)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert type(theirs).__name__ == name
    assert_same_ids(theirs, ours)
    assert (theirs.eos_token_id, len(theirs)) == (ours.eot, ours.vocab_size)
    assert ours.bos == (ours.eot if theirs.bos_token_id is None else theirs.bos_token_id)


@pytest.mark.parametrize("kind", ["byte", "char", "bpe", "tiktoken", *FAMILIES])
def test_of_a_folder_that_we_write(kind, tmp_path):
    import transformers

    if kind in FAMILIES:
        ours = load_tokenizer(write_folder(kind, tmp_path / "source"))
    else:
        ours = own_tokenizer(kind)
    write_hf_tokenizer(ours, tmp_path, model_max_length=100)
    # Beside a model the folder has its config too, by which AutoTokenizer chooses: as Qwen2 it builds Qwen's anew.
    for model_type in sorted(CLASSES.keys() - (set() if kind == "qwen" else {"qwen2"})):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        assert_same_ids(theirs, ours)
        assert (theirs.eos_token_id, theirs.bos_token_id, theirs.model_max_length) == (ours.eot, ours.bos, 100)
    if kind in FAMILIES:
        return
    assert theirs(SPECIAL_TEXT)["input_ids"] == ours.encode(SPECIAL_TEXT).tolist()
    for text in (*REAL_TEXTS, SPECIAL_TEXT):
        assert theirs.decode(ours.encode(text).tolist()) == text


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast"])
def test_of_a_folder_of_a_class_that_transformers_builds_anew(name, tmp_path):
    """As Llama 2 names it: the class itself puts no blank before one, as tokenizer.json does."""
    import transformers

    source = write_folder("llama2", tmp_path / "source")
    config = json.loads((source / "tokenizer_config.json").read_text()) | {"tokenizer_class": name}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(source)
    write_hf_tokenizer(ours, tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert_same_ids(theirs, ours)
    assert theirs("a")["input_ids"] == [ours.bos, *ours.encode("a").tolist()]


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("kind", KINDS)
def test_conversations_have_the_ids_of_training(kind, name, tmp_path):
    import transformers

    ours = tokenizer_of(kind, tmp_path)
    chat = Template.of(CHATS[name], ours.special_tokens)
    (tmp_path / "written").mkdir()
    write_hf_tokenizer(ours, tmp_path / "written", template=chat)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "written")
    opens = opens_document(ours)
    spells = bool(chat.special)
    for talk in TALKS:
        for prompt in (False, True):
            _, expected = in_training(talk, chat, ours, generation_prompt=prompt)
            ids = theirs.apply_chat_template(talk, add_generation_prompt=prompt, return_dict=False)
            assert ids == (expected if opens else expected[1:])
    # In what is said, the names of special tokens are ordinary text; where the template has one, only if that is asked,
    # and then those that the template spells would be text as well.
    if kind != "unigram" and not spells:
        talk = [{"role": "user", "content": SPECIAL_TEXT}]
        _, expected = in_training(talk, chat, ours, generation_prompt=True)
        asked = {"sanitize_control_tokens": True} if opens else {}
        ids = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False, **asked)
        assert ids == (expected if opens else expected[1:])
