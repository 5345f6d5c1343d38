"""Tokenizers of Hugging Face folders: the library's ids, exact bytes, saved whole, damage refused."""

import json
import shutil
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
from hf_folders import FAMILIES, SPECIAL_TEXT, TEXTS, corpus, definition_of, write_folder

from curriculum.config import build_config
from curriculum.data import flat
from curriculum.data.corpus import load_corpus
from curriculum.data.encode import GROUP_BYTES, encode_pieces
from curriculum.data.held_out import eval_documents
from curriculum.data.pieces import Piece, read_pieces
from curriculum.data.prepare import prepare_documents, prepare_store, prepare_tokenizer
from curriculum.data.sources import SourceConfig
from curriculum.data.split import Split
from curriculum.data.tokenizers.hf_definition import byte_of
from curriculum.data.tokenizers.tokenizer import TokenizerConfig, byte_tokenizer, load_tokenizer
from curriculum.errors import InputError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    return {family: write_folder(family, root / family) for family in FAMILIES}


@pytest.fixture(scope="module")
def tokenizers(folders):
    return {family: load_tokenizer(folder) for family, folder in folders.items()}


def library_of(folder):
    from tokenizers import Tokenizer as Library

    return Library.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_the_library(family, folders, tokenizers):
    library, tokenizer = library_of(folders[family]), tokenizers[family]
    texts = [*TEXTS.values(), *corpus()]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint16
        assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
    batch = tokenizer.encode_batch(texts, [True] * len(texts))
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in texts]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.vocab_size == 1 + max(library.get_vocab(with_added_tokens=True).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_text_comes_back_byte_for_byte_or_as_it_was_normalised(family, tokenizers):
    tokenizer = tokenizers[family]
    for name, text in TEXTS.items():
        expected = text
        if family == "qwen":
            expected = unicodedata.normalize("NFC", text)
        if family == "unigram":
            expected = unicodedata.normalize("NFKC", text)
        if family in ("llama2", "mistral", "unigram"):
            expected = expected.replace("\u2581", " ")
        if family in ("mistral", "unigram"):  # they put a blank only where there is none
            expected = expected.removeprefix(" ")
        assert tokenizer.decode_bytes(tokenizer.encode(text), opens_document=True) == expected.encode(), name
    assert tokenizer.prefix == (b" " if family in ("llama2", "mistral", "unigram") else b"")


@pytest.mark.parametrize("family", FAMILIES)
def test_what_follows_inside_a_document_gets_no_blank_in_front(family, tokenizers):
    tokenizer = tokenizers[family]
    whole = tokenizer.encode(TEXTS["latin"])
    cut = TEXTS["latin"].index(" Wahrheit")
    head, tail = TEXTS["latin"][:cut], TEXTS["latin"][cut:]
    joined = np.concatenate([tokenizer.encode(head), tokenizer.encode(tail, opens_document=False)])
    assert joined.tolist() == whole.tolist()
    assert tokenizer.decode_bytes(tokenizer.encode("x y", opens_document=False)) == b"x y"
    pieces = [Piece(head, False, 0, "a"), Piece(tail, True, 0, "a"), Piece("x", True, 0, "b"), Piece("y", True, 0, "c")]
    ((_, tokens, _),) = encode_pieces(pieces, tokenizer)
    opening = [tokenizer.bos] if family in ("llama3", "llama2", "mistral", "unigram") else []
    documents = (whole, tokenizer.encode("x"), tokenizer.encode("y"))
    assert tokens.tolist() == [i for ids in documents for i in (*opening, *ids, tokenizer.eot)]


def test_a_blank_before_byte_pairs_stands_at_the_start_of_a_document_only(folders, tmp_path):
    shutil.copytree(folders["gpt2"], tmp_path, dirs_exist_ok=True)
    set_in("pre_tokenizer", "add_prefix_space", to=True)(tmp_path)
    tokenizer, plain = load_tokenizer(tmp_path), load_tokenizer(folders["gpt2"])
    assert tokenizer.encode("word").tolist() == plain.encode(" word").tolist() != plain.encode("word").tolist()
    assert tokenizer.encode("word", opens_document=False).tolist() == plain.encode("word").tolist()
    head = "ab\n" * (GROUP_BYTES // 3 + 1)
    pieces = [Piece(head, False, 0, "a"), Piece("cd", True, 0, "a"), Piece("ef", True, 0, "b")]
    tokens = np.concatenate([tokens for _, tokens, _ in encode_pieces(pieces, tokenizer)])
    text = tokenizer.decode_bytes(tokens[tokens != tokenizer.eot])
    assert text == f" {head}cd ef".encode()


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_in_text_are_ordinary_text(family, tokenizers):
    tokenizer = tokenizers[family]
    ids = tokenizer.encode(SPECIAL_TEXT)
    assert not set(ids.tolist()) & set(tokenizer.special_tokens.values())
    assert tokenizer.decode_bytes(ids, opens_document=True) == SPECIAL_TEXT.encode()
    assert tokenizer.eot in tokenizer.special_tokens.values() and tokenizer.tokens[tokenizer.eot] == b""


@pytest.mark.parametrize(
    ("merge", "text"),
    [
        ("\u00a9\u0120", " ".join(["\u0645\u062f\u0631\u0633\u0629"] * 20_000)),
        ("\u010a\u00d8", "\n".join(["\u0634\u0645\u0633"] * 20_000)),
    ],
)
def test_a_token_of_a_blank_and_a_part_of_a_letter_is_found_also_where_a_long_file_is_cut(tmp_path, merge, text):
    """The last byte of an Arabic letter with the blank behind it; a line end with the first byte of one."""
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers

    vocab = {letter: i for i, letter in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), merge])}
    library = Library(models.BPE(vocab=vocab, merges=[tuple(merge)]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    (tmp_path / "long.txt").write_text(text)
    pieces = list(read_pieces(SourceConfig(path=str(tmp_path / "long.txt"))))
    assert len(pieces) > 2
    tokens = np.concatenate([tokens for _, tokens, _ in encode_pieces(pieces, load_tokenizer(tmp_path))])
    assert tokens[:-1].tolist() == library.encode(text).ids


@pytest.mark.parametrize("use_regex", [False, True])
def test_a_long_file_gets_the_ids_of_the_library_also_where_tokens_go_beyond_words(tmp_path, use_regex):
    from tokenizers import Tokenizer as Library
    from tokenizers import decoders, models, pre_tokenizers, trainers

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    lines = [f"of the first part and of the second\nx = {i}; then\n" for i in range(5000)]
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(lines[:50], trainer)
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    tokenizer = load_tokenizer(tmp_path)
    (tmp_path / "long.txt").write_text("".join(lines))
    pieces = list(read_pieces(SourceConfig(path=str(tmp_path / "long.txt"))))
    assert len(pieces) > 3
    pieces += [Piece("of the", False, 1, "talk", scored=False), Piece(" first", True, 1, "talk")]
    groups = list(encode_pieces(pieces, tokenizer))
    of_text = np.concatenate([tokens for _, tokens, _ in groups])
    expected = [library.encode(text).ids for text in ("".join(lines), "of the", " first")]
    assert of_text.tolist() == [*expected[0], tokenizer.eot, *expected[1], *expected[2], tokenizer.eot]
    encoded = [piece for group, _, _ in groups for piece in group]
    assert [p.scored for p in encoded[-2:]] == [False, True] and encoded[-3].ends_document
    assert sum(piece.source_bytes for piece in encoded) == sum(piece.source_bytes for piece in pieces) > 200_000
    assert (len(encoded) == 3) == (not use_regex)  # cut where it may be


def test_an_added_token_that_is_not_special_stays_whole(tokenizers):
    tokenizer = tokenizers["qwen"]
    (token,) = tokenizer.encode("<tool_call>").tolist()
    assert tokenizer.tokens[token] == b"<tool_call>" and token == tokenizer.vocab_size - 1


PREFIXED = {
    "llama2": lambda definition: None,
    "gpt2": lambda definition: definition["pre_tokenizer"].update(add_prefix_space=True),
    "mistral": lambda definition: definition["pre_tokenizer"].update(prepend_scheme="always"),
    "unigram": lambda definition: None,  # before the first stretch of a document only
}


def write_with_added(family, folder, *changes, **flags):
    write_folder(family, folder)
    base = 1 + max(library_of(folder).get_vocab(with_added_tokens=True).values())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False) | flags
    added = [{"id": base + i, "content": content, **flags} for i, content in enumerate(("<user>", "<bot>", "Le mot"))]
    for change in (PREFIXED[family], lambda definition: definition["added_tokens"].extend(added)):
        changed(change)(folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("family", PREFIXED)
def test_the_blank_behind_an_added_token_does_not_depend_on_where_a_text_is_cut(family, tmp_path):
    tokenizer = write_with_added(family, tmp_path / "hf")
    library = library_of(tmp_path / "hf")
    text = "<user>hello world<bot>text and Le mot juste\n" * 4000
    (tmp_path / "long.txt").write_text(text)
    pieces = list(read_pieces(SourceConfig(path=str(tmp_path / "long.txt"))))
    assert len(pieces) > 2
    tokens = np.concatenate([tokens for _, tokens, _ in encode_pieces(pieces, tokenizer)])
    assert tokens[tokenizer.has_own_bos : -1].tolist() == library.encode(text, add_special_tokens=False).ids
    told = ["<user>hello<bot>", "text\n", "<user>hello<bot>", "text\nor<bot>text\n"]
    pieces = [Piece(stretch, i == 3, 0, "talk", scored=i % 2 > 0) for i, stretch in enumerate(told)]
    ((_, tokens, _),) = encode_pieces(pieces, tokenizer)
    blank = "" if family == "unigram" else " "
    expected = f"<user>{blank}hello<bot>{blank}text\n<user>{blank}hello<bot>{blank}text\nor<bot>{blank}text\n"
    assert tokenizer.decode_bytes(tokens).decode() == expected


@pytest.mark.parametrize("flag", ["normalized", "single_word"])
def test_an_added_token_that_could_be_found_only_in_the_whole_text_is_refused(flag, tmp_path):
    why = (
        f"added token '<bot>' has {flag}: where this tokenizer puts spaces would depend on where a text is cut; set it"
    )
    with pytest.raises(InputError, match=why):
        write_with_added("llama2", tmp_path / "a", **{flag: True})
    write_with_added("unigram", tmp_path / "b", **{flag: True})  # it puts one before a document only


def test_eot_and_bos(tokenizers):
    names = {f: {i: n for n, i in t.special_tokens.items()} for f, t in tokenizers.items()}
    found = {family: (names[family][t.eot], names[family][t.bos]) for family, t in tokenizers.items()}
    assert found == {
        "gpt2": ("<|endoftext|>", "<|endoftext|>"),
        "llama3": ("<|end_of_text|>", "<|begin_of_text|>"),
        "qwen": ("<|im_end|>", "<|im_end|>"),
        "smollm": ("<|endoftext|>", "<|endoftext|>"),
        "llama2": ("</s>", "<s>"),
        "mistral": ("</s>", "<s>"),
        "unigram": ("</s>", "<s>"),
    }
    assert byte_tokenizer().bos == byte_tokenizer().eot == 256


@pytest.mark.parametrize(
    ("files", "eot", "bos"),
    [
        ({"special_tokens_map.json": {"eos_token": "<|eot_id|>", "bos_token": {"content": "<|end_of_text|>"}}}, 2, 1),
        ({"generation_config.json": {"eos_token_id": 2}, "config.json": {"eos_token_id": 1, "bos_token_id": 0}}, 2, 0),
        ({"config.json": {"eos_token_id": [1]}}, 1, None),
        ({"tokenizer_config.json": {"eos_token": "<|eot_id|>"}, "config.json": {"eos_token_id": [1, 2], "bos_token_id": 0}}, 2, None),
        ({"tokenizer_config.json": {}, "generation_config.json": {"eos_token_id": [], "bos_token_id": 0}, "config.json": {"eos_token_id": 1}}, 1, 0),
    ],
)  # fmt: skip
def test_where_eot_and_bos_are_read(folders, tmp_path, files, eot, bos):
    definition = (folders["llama3"] / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(definition)
    base = min(token["id"] for token in json.loads(definition)["added_tokens"])
    files = json.loads(json.dumps(files), object_hook=lambda d: {k: moved(k, v, base) for k, v in d.items()})
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eot - base, tokenizer.bos - base) == (eot, eot if bos is None else bos)


def moved(key, value, base):
    if not key.endswith("_id"):
        return value
    return [base + token for token in value] if isinstance(value, list) else base + value


def test_tokens_that_only_the_config_knows_are_added(folders, tmp_path):
    definition, _ = definition_of("gpt2")
    num_ids = 1 + definition["added_tokens"][-1]["id"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {
        str(num_ids - 1): {"content": "<|endoftext|>", "special": True, **flags},
        str(num_ids): {"content": "<|pad|>", "special": True, **flags},
        str(num_ids + 1): {"content": "[WORD]", "special": False, **flags},
    }
    config = {"eos_token": "<|pad|>", "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eot, tokenizer.vocab_size) == (num_ids, num_ids + 2)
    assert tokenizer.encode("[WORD]").tolist() == [num_ids + 1]
    assert len(tokenizer.encode("<|pad|>")) > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_it_needs_the_folder_no_more(family, tokenizers, tmp_path):
    tokenizer = tokenizers[family]
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.facts == tokenizer.facts and loaded.tokens == tokenizer.tokens
    assert (loaded.eot, loaded.bos, loaded.prefix) == (tokenizer.eot, tokenizer.bos, tokenizer.prefix)
    for text in (*TEXTS.values(), SPECIAL_TEXT):
        assert loaded.encode(text).tolist() == tokenizer.encode(text).tolist()


def changed(change):
    def alter(folder):
        path = folder / "tokenizer.json"
        definition = json.loads(path.read_text())
        change(definition)
        path.write_text(json.dumps(definition))

    return alter


def set_in(*path, to):
    def change(definition):
        for key in path[:-1]:
            definition = definition[key]
        definition[path[-1]] = to

    return changed(change)


def replaced(kind, pattern, content):
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def test_a_tokenizer_that_drops_no_text_is_taken(folders, tmp_path):
    shutil.copytree(folders["gpt2"], tmp_path, dirs_exist_ok=True)
    one_by_one = [
        ("String", "\r\n", "\n\n"),
        ("Regex", "[\u2018\u2019]", "'"),
        ("Regex", r"\s", " "),
        ("Regex", r"\p{Pd}", "-"),
    ]
    set_in("normalizer", to={"type": "Sequence", "normalizers": [replaced(*each) for each in one_by_one]})(tmp_path)
    changed(lambda d: d["added_tokens"][-1].update(lstrip=True, rstrip=True))(tmp_path)  # special, as RoBERTa's <mask>
    tokenizer = load_tokenizer(tmp_path)
    text = "a\t\u2018b\u2019 \n<|endoftext|>  \n\u2014 c"
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == b"a 'b'  <|endoftext|>   - c"


def test_fingerprint_is_of_what_determines_ids(folders, tokenizers, tmp_path):
    def fingerprint(name, *changes):
        folder = shutil.copytree(folders["gpt2"], tmp_path / name)
        for change in changes:
            change(folder)
        return load_tokenizer(folder).fingerprint

    base = tokenizers["gpt2"].fingerprint
    assert fingerprint("same") == base
    assert fingerprint("config", lambda f: (f / "chat_template.jinja").write_text("x")) == base
    assert fingerprint("padding", set_in("truncation", to={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0})) == base  # fmt: skip
    others = [
        fingerprint("merges", changed(lambda d: d["model"]["merges"].reverse())),
        fingerprint("prefix", set_in("pre_tokenizer", "add_prefix_space", to=True)),
        fingerprint("normal", set_in("normalizer", to={"type": "NFC"})),
        fingerprint("eot", lambda f: (f / "tokenizer_config.json").write_text('{"eos_token": "a"}')),
    ]
    assert len({base, *others}) == 5


@pytest.mark.parametrize(
    ("alter", "expected"),
    [
        (lambda f: (f / "tokenizer.json").write_text('{"model"'), "tokenizer.json: not JSON"),
        (lambda f: (f / "tokenizer.json").write_text('["model"]'), "tokenizer.json: holds list; expected an object"),
        (lambda f: (f / "tokenizer.json").write_text('{"model": {}}'), "tokenizer.json: not a tokenizer .KeyError"),
        (lambda f: (f / "tokenizer_config.json").write_text("{"), "tokenizer_config.json: not JSON"),
        (lambda f: (f / "tokenizer_config.json").write_text("[" * 100_000), "tokenizer_config.json: not JSON"),
        (lambda f: (f / "tokenizer_config.json").write_text(r'{"eos_token": "<|endoftext|>", "x": "\uD800"}'), "tokenizer_config.json: not JSON .*surrogates not allowed"),
        (lambda f: (f / "tokenizer_config.json").write_text("{}"), "no end-of-text token: tokenizer_config.json names no eos_token"),
        (lambda f: (f / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}'), "eos_token '<eos>' is not among the tokens of tokenizer.json"),
        (lambda f: (f / "tokenizer_config.json").write_text('{"eos_token": {"content": ["a"]}}'), r"eos_token \['a'\] is not among the tokens"),
        (lambda f: [(f / "tokenizer_config.json").unlink(), (f / "config.json").write_text('{"eos_token_id": 70000}')], "eos_token_id 70000 is not an id in"),
        (lambda f: [(f / "tokenizer_config.json").unlink(), (f / "config.json").write_text('{"eos_token_id": [1, 2]}')], "does not say which one to use; add eos_token"),
        (set_in("model", "type", to="WordPiece"), "model.type is 'WordPiece'; expected BPE or Unigram"),
        (set_in("model", "vocab", "a", to="64"), "token 'a' has id '64'; expected a whole number from 0, below 16777216"),
        (set_in("model", "vocab", "a", to=10**12), "token 'a' has id 1000000000000; expected a whole number"),
        (changed(lambda d: d["added_tokens"][-1].update(content=0)), "token 0 is not text"),
        (set_in("model", "vocab", "a", to=-1), "token 'a' has id -1; expected a whole number"),
        (set_in("model", "dropout", to=0.1), "model.dropout is 0.1; expected none"),
        (set_in("model", "end_of_word_suffix", to="</w>"), "model.end_of_word_suffix is '</w>'; expected none"),
        (set_in("pre_tokenizer", to={"type": "WhitespaceSplit"}), "pre_tokenizer WhitespaceSplit drops text(.|\n)*text would be dropped"),
        (set_in("pre_tokenizer", to={"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}]}), "pre_tokenizer Split that removes what it finds drops text"),
        (set_in("normalizer", to={"type": "Strip", "strip_left": True, "strip_right": True}), "tokenizer.json: normalizer Strip drops text; expected one"),
        (set_in("normalizer", to={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]}), "normalizer StripAccents drops text"),
        (set_in("normalizer", to={"type": "Replace", "pattern": {"String": "x"}, "content": ""}), "normalizer Replace of 'x' by '' drops text"),
        (set_in("normalizer", to=replaced("String", "``", '"')), "normalizer Replace of '``' by '\"' drops text"),
        (set_in("normalizer", to={"type": "Sequence", "normalizers": [{"type": "NFC"}, replaced("Regex", " {2,}", " ")]}), "normalizer Replace of ' \\{2,}' by ' ' drops text"),
        (set_in("normalizer", to=replaced("Regex", "[0-9]+", "0")), r"normalizer Replace of '\[0-9\]\+' by '0' drops text"),
        (set_in("normalizer", to=replaced("Regex", r"\R", "\n")), "normalizer Replace of .* drops text"),
        (changed(lambda d: d["added_tokens"].append(d["added_tokens"][-1] | {"id": 9, "content": "<user>", "special": False, "rstrip": True})), "added token '<user>' has rstrip: white space beside it would be dropped; set it to false"),
        (changed(lambda d: d["model"]["vocab"].pop("Ċ")), "model.vocab lacks 1 of the 256 bytes, such as 0x0A: some text would be dropped"),
        (set_in("pre_tokenizer", to=None), "no byte fallback and no unknown token: some text would be dropped"),
    ],
)  # fmt: skip
def test_a_folder_that_will_not_do_is_refused(folders, tmp_path, alter, expected):
    shutil.copytree(folders["gpt2"], tmp_path, dirs_exist_ok=True)
    assert load_tokenizer(tmp_path).kind == "hf"
    alter(tmp_path)
    with pytest.raises(InputError, match=expected) as error:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (set_in("pre_tokenizer", to={"type": "Split", "behavior": "Sometimes"}), "the `tokenizers` library cannot read it"),
        (changed(lambda d: d["added_tokens"][-1].update(id=9999)), "token '<.endoftext.>' has id 9999, but the `tokenizers` library gives it"),
    ],
)  # fmt: skip
def test_what_only_the_library_can_tell_is_refused_when_it_encodes(folders, tmp_path, change, expected):
    shutil.copytree(folders["gpt2"], tmp_path, dirs_exist_ok=True)
    change(tmp_path)
    if "cannot read" in expected:
        set_in("model", "byte_fallback", to=True)(tmp_path)
        changed(lambda d: d["model"]["vocab"].update({f"<0x{i:02X}>": 1000 + i for i in range(256)}))(tmp_path)
    with pytest.raises(InputError, match=expected):
        load_tokenizer(tmp_path).encode("x")


def test_an_eot_that_text_gives_is_refused(folders, tmp_path):
    shutil.copytree(folders["gpt2"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    with pytest.raises(InputError, match="the text 'a' gives the special id .* so that no text ends a document"):
        load_tokenizer(tmp_path).encode("x")


@pytest.mark.parametrize("family", ["llama2", "unigram"])
def test_text_without_a_token_is_refused_by_name_where_there_are_no_bytes(folders, tmp_path, family):
    shutil.copytree(folders[family], tmp_path, dirs_exist_ok=True)
    set_in("model", "byte_fallback", to=False)(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode_bytes(tokenizer.encode("plain text"), True) == b"plain text"
    with pytest.raises(InputError, match="'猫' cannot be represented: .* no byte fallback"):
        tokenizer.encode("a 猫 b")
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "a 猫"}\n')
    with pytest.raises(InputError, match="a.jsonl:2: '猫' cannot be represented"):
        prepare_store("web", SourceConfig(path=str(tmp_path / "a.jsonl")), tokenizer, tmp_path / "s")


@pytest.mark.parametrize(
    ("alter", "expected"),
    [
        (lambda d: (d / "hf/tokenizer.json").unlink(), "hf/tokenizer.json: is missing"),
        (set_in("model", "unk_token", to="a"), "do not match its fingerprint"),
        (lambda d: (d / "hf/tokenizer.json").write_text('{"model"'), "not JSON"),
        (lambda d: (d / "hf/tokenizer_config.json").unlink(), "do not match its fingerprint"),
        (lambda d: (d / "hf/tokenizer_config.json").write_text('{"eos_token": "a"}'), "do not match its fingerprint"),
        (lambda d: sidecar(d, eot=3), "do not match its fingerprint"),
        (lambda d: sidecar(d, bos=3), "do not match its fingerprint"),
        (lambda d: sidecar(d, special_tokens={}), "do not match its fingerprint"),
        (lambda d: sidecar(d, files={}), "do not match its fingerprint"),
    ],
)  # fmt: skip
def test_a_damaged_copy_is_refused(tokenizers, tmp_path, alter, expected):
    tokenizers["gpt2"].save(tmp_path)
    assert load_tokenizer(tmp_path).kind == "hf"
    alter(tmp_path / "hf" if alter.__name__ == "alter" else tmp_path)
    with pytest.raises(InputError, match=expected):
        load_tokenizer(tmp_path)


def sidecar(directory, **fields):
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_the_config_takes_a_folder(folders, tmp_path):
    config = TokenizerConfig(kind="hf", path=str(folders["llama2"]))
    assert prepare_tokenizer(config, {}, tmp_path).bos == 1
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="kind hf needs path, a folder with a tokenizer.json"):
        TokenizerConfig(kind="hf")
    with pytest.raises(ValueError, match="vocab_size applies to kind bpe"):
        TokenizerConfig(kind="hf", path="x", vocab_size=300)
    with pytest.raises(InputError, match="holds a tokenizer of kind hf; expected bpe: set tokenizer.kind: hf"):
        prepare_tokenizer(TokenizerConfig(kind="bpe", path=str(folders["gpt2"])), {}, tmp_path)
    nothing = TokenizerConfig(kind="hf", path=str(tmp_path))
    with pytest.raises(
        InputError, match="tokenizer.json: No such file.*expected a tokenizer's folder, saved by curriculum or"
    ):
        prepare_tokenizer(nothing, {}, tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(InputError, match="only a tokenizer.model, load it in transformers and save it"):
        prepare_tokenizer(nothing, {}, tmp_path)


def test_reading_a_folder_imports_no_tokenizer_library(folders):
    script = (
        "import sys\n"
        "from curriculum.data.tokenizers.tokenizer import load_tokenizer\n"
        f"tokenizer = load_tokenizer({str(folders['qwen'])!r})\n"
        "assert tokenizer.fingerprint and tokenizer.vocab_size and tokenizer.eot\n"
        "print(sorted({'tokenizers', 'transformers', 'tiktoken', 'jax'} & set(sys.modules)))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


# --- bytes of eval documents --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "qwen", "llama2", "mistral", "unigram"])
def test_bytes_of_eval_documents_are_those_of_their_text(family, tokenizers, folders, tmp_path):
    texts = [text for text in TEXTS.values() if text.strip()]
    (tmp_path / "web.jsonl").write_text("\n".join(json.dumps({"text": "plain words " * 20}) for _ in range(3)))
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    config = build_config(
        {
            "tokenizer": {"kind": "hf", "path": str(folders[family])},
            "sources": {"web": {"path": str(tmp_path / "web.jsonl")}},
            "phases": [{"name": "all", "until": "end", "mixture": {"web": 1}}],
            "evalsets": {"primary": {"path": str(tmp_path / "eval.jsonl")}, "seq_len": 16},
            "train": {"steps": 1, "batch_size": 1, "seq_len": 16},
        }
    )
    corpus = load_corpus(config, tmp_path / "stores")
    evalset, tokenizer = corpus.evalsets["primary"], tokenizers[family]
    found = np.bincount(evalset.document_N, evalset.num_bytes_N).astype(int).tolist()
    assert found == [len(text.encode()) for text in texts]
    first_N = np.flatnonzero(np.diff(evalset.document_N, prepend=-1))
    assert set(evalset.tokens_NT1[first_N, 0].tolist()) == {tokenizer.bos}
    ids = [evalset.tokens_NT1[n, 1 : 1 + evalset.num_tokens_N[n]] for n in np.flatnonzero(evalset.document_N == 0)]
    assert np.concatenate(ids).tolist() == tokenizer.encode(texts[0]).tolist()
    by_tokens = tokenizer.token_bytes_V[tokenizer.encode(TEXTS["marks of composition"])].sum()
    assert (by_tokens == len(TEXTS["marks of composition"].encode())) == (family == "gpt2")


def test_bytes_of_answers_are_those_of_their_text(tokenizers, tmp_path):
    from curriculum.data.chat import ChatConfig

    tokenizer = tokenizers["qwen"]
    chat = ChatConfig(system="{content}", user="{content}", assistant="{content}.")
    asked, answered = "cafe\u0301?", "e\u0301 oui"
    documents = [[{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]]
    store = prepare_documents(documents, tokenizer, tmp_path / "out", chat=chat)
    (document,) = eval_documents(store, tokenizer, Split(np.zeros(1, bool)))
    assert document.num_bytes == len(f"{answered}.".encode()) == 8
    assert tokenizer.decode_bytes(document.tokens[document.scored == 1]) == "\u00e9 oui.".encode()


@pytest.mark.parametrize("scan_tokens", [flat.SCAN_TOKENS, 5])
def test_a_flat_file_has_the_documents_of_the_text(scan_tokens, tokenizers, tmp_path, monkeypatch):
    monkeypatch.setattr(flat, "SCAN_TOKENS", scan_tokens)
    tokenizer = tokenizers["llama2"]
    texts = [" a blank first", "no blank", "Wille zur Wahrheit\n"]
    ids = np.concatenate([[tokenizer.bos, *tokenizer.encode(text), tokenizer.eot] for text in texts]).astype("<u2")
    ids.tofile(tmp_path / "flat.bin")
    found = prepare_store("flat", SourceConfig(path=str(tmp_path / "flat.bin")), tokenizer, tmp_path / "s")
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    text = prepare_store("text", SourceConfig(path=str(tmp_path / "text.jsonl")), tokenizer, tmp_path / "s")
    np.testing.assert_array_equal(found.documents, text.documents)
    assert found.documents["bytes"].tolist() == [len(text) for text in texts]


def test_a_piece_of_one_byte_has_two_hexadecimal_digits():
    assert [byte_of(name) for name in ("<0x00>", "<0x0A>", "<0xfF>")] == [0, 10, 255]
    for name in ("<0x+F>", "<0x F>", "<0xG0>", "<0x0A> ", "<0x00A>", "<0x1_>", "\n"):
        assert byte_of(name) is None
