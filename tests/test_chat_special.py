"""Chat templates that spell special tokens: from the text to the store, the batches, the evals, an answer, an export."""

import json
import shutil

import numpy as np
import pytest
from hf_folders import write_folder

from curriculum.config import build_config
from curriculum.data.chat import CHATML, ChatConfig, Stretch, Template
from curriculum.data.corpus import find_sizes, load_corpus
from curriculum.data.encode import encode_beginning
from curriculum.data.prepare import prepare_documents, prepare_store
from curriculum.data.sources import SourceConfig
from curriculum.data.store import open_store
from curriculum.data.tokenizers.chat_template import ends_answer
from curriculum.data.tokenizers.tokenizer import load_tokenizer
from curriculum.disk.manifest import write_manifest
from curriculum.errors import InputError
from curriculum.export import export
from curriculum.find_checkpoint import read_ledger
from curriculum.generate import load_generator
from curriculum.model.continuation import Continuation
from curriculum.run import load_run
from curriculum.sampling import Sampling
from curriculum.schema.adaptation import chat_of, find_base
from curriculum.train.samples import _shown, beginnings
from curriculum.train.trainer import train

TALKS = [
    [
        {"role": "user", "content": f"{i}<|im_end|>"},  # in content it is text
        {"role": "assistant", "content": "one" * (1 + i % 3)},
        {"role": "user", "content": "more"},
        {"role": "assistant", "content": f"two {i}"},
    ]
    for i in range(120)
]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """(folder, tokenizer): <|im_end|>, which ChatML spells, is its end-of-text as well."""
    folder = write_folder("qwen", tmp_path_factory.mktemp("qwen") / "tokenizer")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eot == tokenizer.bos == tokenizer.special_tokens["<|im_end|>"]
    return folder, tokenizer


def by_hand(talk, tokenizer):
    """(ids, scored) of a conversation in ChatML, its end-of-text included."""
    start, end = tokenizer.special_tokens["<|im_start|>"], tokenizer.special_tokens["<|im_end|>"]

    def text(content, first=False):
        return tokenizer.encode(content, first).tolist()

    ids, scored = [], []
    for number, message in enumerate(talk):
        between = [*([] if number == 0 else text("\n")), start]
        if message["role"] == "user":
            parts = [(between, number > 0 and len(between) - 1), (text(f"user\n{message['content']}"), 0), ([end], 0)]
        else:
            parts = [(between, 0), (text("assistant\n"), 0)]
            parts += [(text(message["content"]), len(text(message["content"]))), ([end], 1)]
        for part, num_scored in parts:
            ids += part
            scored += [1] * num_scored + [0] * (len(part) - num_scored)
    last = text("\n")
    return [*ids, *last, tokenizer.eot], [*scored, *[1] * len(last), 1]


def data_of(folder, path, tokenizer_folder, **changes):
    return {
        "name": "chat",
        "tokenizer": {"kind": "hf", "path": str(tokenizer_folder)},
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 32, "n_head": 2, "n_kv_head": 1, "d_ff": 48},
        "sources": {"talks": {"path": str(path), "format": "messages", "held_out": "30%"}},
        "phases": [{"name": "chat", "until": "end", "mixture": {"talks": 1}}],
        "evalsets": {"primary": {"held_out_of": "talks"}},
        "train": {"steps": 2, "batch_size": 8, "seq_len": 64},
        "logging": {"tensorboard": False},
    } | changes


def write_talks(path, talks=TALKS):
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


def test_a_store_holds_them_as_tokens_and_evals_measure_them(qwen, tmp_path):
    folder, tokenizer = qwen
    store = prepare_documents(TALKS, tokenizer, tmp_path / "talks", chat=CHATML)
    for number, talk in enumerate(TALKS[:5]):
        start, stop = store.text_span(number)
        ids, scored = by_hand(talk, tokenizer)
        assert store.stream[start : stop + 1].tolist() == ids
        assert store.scored_stream[start : stop + 1].tolist() == scored
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALKS[0])
    assert int(store.documents["bytes"][0]) == len(text.encode())  # a name counts as the text that it is

    source = SourceConfig(path=str(write_talks(tmp_path / "talks.jsonl")), format="messages")
    assert prepare_store("x", source, tokenizer, tmp_path / "store").stream[:].tolist() == store.stream[:].tolist()
    corpus = load_corpus(build_config(data_of(tmp_path, source.path, folder)), tmp_path / "store")
    evalset = corpus.evalsets["primary"]
    every = {tuple(by_hand(talk, tokenizer)[0][:-1]) for talk in TALKS}  # the closing end-of-text is not measured
    assert evalset.num_documents > 30
    for document in range(evalset.num_documents):
        first, *rest = evalset.tokens_NT1[evalset.document_N == document]
        row = np.concatenate([first[1:], *(window[1:] for window in rest)])
        assert first[0] == tokenizer.bos and any(tuple(row[: len(ids)]) == ids for ids in every)


def test_an_answer_that_end_of_text_closes_keeps_it_in_evals(qwen, tmp_path):
    _, tokenizer = qwen
    chat = ChatConfig(user="{content}", assistant="{content}<|im_end|>")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    store = prepare_documents([talk], tokenizer, tmp_path / "talks", chat=chat)
    ids = [*tokenizer.encode("a").tolist(), *tokenizer.encode("b", False).tolist(), tokenizer.eot]
    start, stop = store.text_span(0)
    assert store.stream[:].tolist() == [*ids, tokenizer.eot] and store.stream[start:stop].tolist() == ids


def test_packed_conversations_stay_whole_and_apart(qwen, tmp_path):
    folder, tokenizer = qwen
    path = write_talks(tmp_path / "talks.jsonl")
    packing = {"mode": "best_fit", "document_mask": True}
    config = build_config(data_of(tmp_path, path, folder, packing=packing))
    corpus = load_corpus(config, tmp_path / "store")
    stream = corpus.streams["talks"]
    rows = stream.read(np.arange(0, corpus.tokens_per_epoch["talks"], 64), 64)
    every = {tuple(by_hand(talk, tokenizer)[0]) for talk in TALKS}
    found = [
        tuple(targets[segments == segment].tolist())
        for targets, segments in zip(rows.targets_RT, rows.segment_ids_RT, strict=True)
        for segment in range(segments.max() + 1)
    ]
    assert len(found) > 60 and set(found) <= every and len(set(found)) > 60


def test_what_would_cut_conversations_is_refused(qwen, tmp_path):
    folder, _ = qwen
    path = write_talks(tmp_path / "talks.jsonl")
    why = "takes <|im_end|> for the edge of a document, which the chat section also spells within conversations"
    for packing, expected in (
        ({"document_mask": True}, f"packing.document_mask: in mode stream {why}; use mode best_fit"),
        ({"mask_boundary_loss": True}, f"packing.mask_boundary_loss: {why}; leave it out"),
        ({"train_on_eos": False}, f"packing.train_on_eos: false {why}; leave it out"),
    ):
        config = build_config(data_of(tmp_path, path, folder, packing=packing))
        with pytest.raises(InputError) as error:
            load_corpus(config, tmp_path / "store")
        assert str(error.value) == f"config: {expected}"
        other = build_config(data_of(tmp_path, path, folder, packing=packing, chat={
            role: f"{role}: {{content}}\n" for role in ("system", "user", "assistant")
        }))  # fmt: skip
        assert load_corpus(other, tmp_path / "store").details["talks"]["tokens"]

    # Text is not cut by a template, nor is an eval set packed.
    masked = {"packing": {"document_mask": True}}
    texts = tmp_path / "texts.jsonl"
    rows = [{"prompt": f"{i}", "completion": "one two three"} for i in range(120)]
    texts.write_text("".join(map("{}\n".format, map(json.dumps, rows))))
    completion = {"talks": {"path": str(texts), "format": "completion", "held_out": "30%"}}
    corpus = load_corpus(
        build_config(data_of(tmp_path, texts, folder, sources=completion, **masked)), tmp_path / "store"
    )
    assert corpus.details["talks"]["tokens"]
    measured = {"primary": {"held_out_of": "talks"}, "sets": {"chat": {"path": str(path), "format": "messages"}}}
    config = build_config(data_of(tmp_path, texts, folder, sources=completion, evalsets=measured, **masked))
    assert load_corpus(config, tmp_path / "store").evalsets["chat"].num_documents == len(TALKS)
    turns = [{"prompt": talk[:1], "completion": talk[1:2]} for talk in TALKS]
    texts.write_text("".join(map("{}\n".format, map(json.dumps, turns))))
    config = build_config(data_of(tmp_path, texts, folder, sources=completion, **masked))
    with pytest.raises(InputError, match="packing.document_mask: in mode stream takes"):
        load_corpus(config, tmp_path / "store")
    with pytest.raises(InputError, match="packing.document_mask: in mode stream takes"):  # as it is prepared by now
        find_sizes(config, tmp_path / "store")

    definition = json.loads((folder / "tokenizer.json").read_text())
    strips = tmp_path / "strips"
    strips.mkdir()
    for token in definition["added_tokens"]:
        token["rstrip"] = token["content"] == "<|im_start|>"
    (strips / "tokenizer.json").write_text(json.dumps(definition))
    (strips / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    with pytest.raises(
        InputError, match=r"chat: added token '<\|im_start\|>' of the tokenizer has rstrip: other programs"
    ):
        load_corpus(build_config(data_of(tmp_path, path, strips)), tmp_path / "store")


def test_a_folder_prepared_with_their_names_as_text_is_refused(qwen, tmp_path):
    """As it was prepared before such names stood for tokens."""
    _, tokenizer = qwen
    store = prepare_documents(TALKS, tokenizer, tmp_path / "talks", chat=CHATML)
    source = SourceConfig(path=str(tmp_path / "talks"), format="messages")
    assert prepare_store("talks", source, tokenizer, tmp_path / "store").facts == store.facts
    sidecar = json.loads((tmp_path / "talks/store.json").read_text())
    assert sidecar["chat"].pop("special_tokens") == '["<|im_start|>", "<|im_end|>"]'
    facts = type(store.facts)(**{**vars(store.facts), "chat": sidecar["chat"]})
    sidecar["checksum"] = facts.own_checksum()
    (tmp_path / "talks/store.json").write_text(json.dumps(sidecar))
    assert open_store(tmp_path / "talks").facts.chat == sidecar["chat"]
    with pytest.raises(
        InputError, match="of the chat section stand for special tokens, but .* was prepared with their"
    ):
        prepare_store("talks", source, tokenizer, tmp_path / "store")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(run, tokenizer, store folder): turns end with <|eot_id|>, texts with <|end_of_text|>, the base's with both."""
    folder = tmp_path_factory.mktemp("run")
    place = write_folder("llama3", folder / "tokenizer")
    special = load_tokenizer(place).special_tokens
    ends = [special[name] for name in ("<|end_of_text|>", "<|begin_of_text|>", "<|end_of_text|>")]
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": [*ends, 10**6, True, {}]}))
    (place / "config.json").write_text(json.dumps({"eos_token_id": special["<|end_of_text|>"]}))
    tokenizer = load_tokenizer(place)
    assert tokenizer.stops == (special["<|begin_of_text|>"],) and tokenizer.eot == special["<|end_of_text|>"]
    chat = {"user": "User: {content}<|eot_id|>", "assistant": "Model: {content} \n<|eot_id|>\n"}
    config = build_config(data_of(folder, write_talks(folder / "talks.jsonl"), place, chat=chat))
    train(config, folder / "run", store_dir=folder / "store")
    return folder / "run", tokenizer, folder / "store"


def test_a_question_has_them_and_an_answer_ends_at_them(run):
    place, tokenizer, store_dir = run
    eot_id = tokenizer.special_tokens["<|eot_id|>"]
    loaded = load_generator(place, step=2, store_dir=store_dir)
    [prompt] = loaded.prompts(["hi <|eot_id|>"], chat=True)
    text, answer = tokenizer.encode("User: hi <|eot_id|>"), tokenizer.encode("Model: ", False)
    assert prompt.text == "User: hi <|eot_id|><|eot_id|>Model: "
    assert prompt.ids.tolist() == [tokenizer.bos, *text.tolist(), eot_id, *answer.tolist()]
    assert prompt.ends == (*tokenizer.stops, eot_id) and loaded.prompts(["hi"])[0].ends == tokenizer.stops
    sampling = Sampling(stop=("zz",))
    assert loaded.until_answered(sampling) == sampling  # no text ends it
    for end in (eot_id, *tokenizer.stops, tokenizer.eot):
        continuation = Continuation(0, prompt, np.zeros(2, np.uint32), 99, "length", ())
        drawn = [*tokenizer.encode("yes", False).tolist(), end, *answer.tolist()]
        piece = continuation.add(drawn, tokenizer)
        assert (piece.text, piece.whole.text, piece.whole.finished) == ("yes", "yes", "stop")
        assert piece.whole.ids[-1] == end
    both = Template(ChatConfig(assistant="A {content}\n### End <|eot_id|>\n"), ("<|eot_id|>",))
    assert (
        ends_answer(both, tokenizer) == ("### End", eot_id) and ends_answer(Template(both.chat), tokenizer)[1] is None
    )
    [asked] = loaded.generator.generate(loaded.params, [prompt], Sampling(max_tokens=4))
    assert asked.num_prompt_tokens == len(prompt.ids)


def test_an_export_names_all_that_end_a_text(run, tmp_path):
    from gguf import GGUFReader

    place, tokenizer, _ = run
    eot_id = tokenizer.special_tokens["<|eot_id|>"]
    export(place, tmp_path / "hf", format="hf", step=2)
    ends = [tokenizer.eot, *tokenizer.stops, eot_id]
    assert json.loads((tmp_path / "hf/generation_config.json").read_text())["eos_token_id"] == ends
    written = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert written["split_special_tokens"] is False and written["chat_template"].startswith("{{- bos_token }}")
    assert "<|eot_id|>" in written["chat_template"]
    again = load_tokenizer(tmp_path / "hf")
    assert again.stops == tuple(ends[1:]) and again.fingerprint == tokenizer.fingerprint
    export(place, tmp_path / "gguf", format="gguf", step=2)
    fields = GGUFReader(tmp_path / "gguf/model.gguf").fields
    found = [fields[f"tokenizer.ggml.{role}_token_id"].contents() for role in ("eos", "eot")]
    assert found == [tokenizer.eot, eot_id]


def test_names_that_older_code_trained_on_as_text_are_text_to_generate_and_told_by_export(run, tmp_path, capsys):
    place, tokenizer, store_dir = run
    resolved, ledger = load_run(place).resolved, read_ledger(place / "checkpoints/2")
    assert ledger.pop("chat_special_tokens") == ["<|eot_id|>"]
    assert chat_of(resolved, ledger, 2) == Template(ChatConfig(**resolved["chat"]))
    older = tmp_path / "older"
    shutil.copytree(place, older)
    for folder in (older / "checkpoints/2", older / "gold/2"):
        if folder.exists():
            path = folder / "ledger/metadata"
            saved = json.loads(path.read_text())
            saved.pop("chat_special_tokens", None)  # the gold may be hard links of the checkpoint
            path.write_text(json.dumps(saved))
            write_manifest(folder)
    loaded = load_generator(older, step=2, store_dir=store_dir)
    [prompt] = loaded.prompts(["hi"], chat=True)
    assert tokenizer.special_tokens["<|eot_id|>"] not in prompt.ids and prompt.ends == tokenizer.stops
    assert loaded.until_answered(Sampling()).stop == ("<|eot_id|>",)
    capsys.readouterr()
    export(older, tmp_path / "hf", format="hf", step=2)
    assert "the run was trained by older code, for which the names of special tokens" in capsys.readouterr().err


def test_a_run_begins_with_the_rule_of_its_base(run, tmp_path):
    place, tokenizer, store_dir = run
    base = find_base(str(place / "checkpoints/2"))
    assert base.chat.special == ("<|eot_id|>",) and Template.from_json(base.lineage(False)["chat"]) == base.chat
    partial = {"adaptation": {"init_from": base.init_from}, "chat": {"user": "Q: {content}<|eot_id|>"}}
    data = data_of(tmp_path, store_dir.parent / "talks.jsonl", "unused", **partial)
    config = build_config({key: part for key, part in data.items() if key not in ("model", "tokenizer")})
    assert config.chat.user == partial["chat"]["user"] and config.chat.assistant == base.chat.chat.assistant


@pytest.mark.parametrize("seq_len", [31, 34, 37])
def test_samples_begin_where_conversations_do(qwen, tmp_path, seq_len):
    """Also where a later window happens to begin at the token that opens documents, which closes turns too."""
    folder, tokenizer = qwen
    path = write_talks(tmp_path / "talks.jsonl")
    data = data_of(tmp_path, path, folder, evalsets={"seq_len": seq_len, "primary": {"held_out_of": "talks"}})
    evalset = load_corpus(build_config(data), tmp_path / "store").evalsets["primary"]
    assert evalset.opens_N.sum() <= evalset.num_documents < evalset.num_windows
    found = beginnings(evalset, 5, 64, tokenizer, (7,))
    start = tokenizer.special_tokens["<|im_start|>"]
    assert found and all(prompt.ids[:2].tolist() == [tokenizer.bos, start] and prompt.ends == (7,) for prompt in found)
    shown = [f"<|im_start|>user\n{i}<|im_end|><|im_end|>\n<|im_start|>assistant\n" for i in range(120)]
    assert len({prompt.text for prompt in found} & set(shown)) == len(found)


def test_the_prefix_behind_a_special_token_is_not_shown(tmp_path):
    """With a tokenizer that puts a space before what follows one."""
    tokenizer = load_tokenizer(write_folder("llama2", tmp_path / "tokenizer"))
    name = "<unk>"
    stretches = [Stretch("one", False), *[Stretch(name, False, True)] * 2, Stretch("two three", False)]
    ids = encode_beginning(stretches, tokenizer)
    assert tokenizer.puts_prefix_after(name, special=True) and b" two" in tokenizer.decode_bytes(ids)
    assert _shown(ids, tokenizer) == f"one{name}{name}two three"
