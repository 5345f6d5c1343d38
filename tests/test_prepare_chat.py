"""Conversations as tokens, those of answers marked."""

import json

import pytest
from prepared_sources import SHORT, TALKS, assert_by_hand, talks

from curriculum.data.cache import digest
from curriculum.data.chat import ChatConfig
from curriculum.data.prepare import find_store, find_tokenizer, prepare_store, prepare_tokenizer
from curriculum.data.sources import SourceConfig
from curriculum.data.store import FORMAT_VERSION as STORE_VERSION
from curriculum.data.tokenizers.tokenizer import TokenizerConfig, byte_tokenizer
from curriculum.errors import InputError


def test_the_ids_of_conversations_by_hand(tmp_path, store_dir, monkeypatch):
    monkeypatch.setattr("curriculum.data.store_writer.SHARD_TOKENS", 5)
    store = prepare_store("talks", talks(tmp_path), byte_tokenizer(), store_dir, chat=SHORT)
    tokens = assert_by_hand(store, byte_tokenizer())
    assert tokens == [*"U:é.A:ab;".encode(), 256, *b"U:<|endoftext|>.A:c;U:d.", 256]
    assert len(store.shards) == 8 and store.facts.num_documents == 2
    found = find_store("talks", talks(tmp_path), byte_tokenizer(), store_dir, SHORT)
    assert found.directory == store.directory and found.facts == store.facts


def test_a_tokenizer_is_made_from_what_the_template_gives(tmp_path, store_dir):
    sources = {"talks": talks(tmp_path)}
    char = prepare_tokenizer(TokenizerConfig("char"), sources, store_dir, SHORT)
    assert b"".join(char.tokens).decode() == "".join(sorted(set("U:é.A:ab;U:<|endoftext|>.A:c;U:d.")))
    assert find_tokenizer(TokenizerConfig("char"), sources, store_dir, SHORT).fingerprint == char.fingerprint
    assert find_tokenizer(TokenizerConfig("char"), sources, store_dir) is None
    assert_by_hand(prepare_store("talks", sources["talks"], char, store_dir, chat=SHORT), char)
    bpe = prepare_tokenizer(TokenizerConfig("bpe", 262), sources, store_dir, SHORT)
    assert_by_hand(prepare_store("talks", sources["talks"], bpe, store_dir, chat=SHORT), bpe)


def test_two_templates_two_stores_and_text_is_left_alone(tmp_path, store_dir):
    (tmp_path / "both.jsonl").write_text(
        json.dumps({"text": "x", "messages": TALKS[0], "prompt": "p", "completion": "c"})
    )
    options = [{"format": "messages"}, {"format": "completion"}, {"format": "text"}]
    made = {}
    for chat in (SHORT, ChatConfig(), ChatConfig(tool="{content}")):
        for option in options:
            source = SourceConfig(path=str(tmp_path / "both.jsonl"), **option)
            store = prepare_store("both", source, byte_tokenizer(), store_dir, chat=chat)
            made.setdefault(option["format"], []).append(store.directory)
    assert [len(set(directories)) for directories in made.values()] == [3, 3, 1]
    assert len({directory for directories in made.values() for directory in directories}) == 7
    assert not list(made["text"][0].glob("scored-*")) and list(made["messages"][0].glob("scored-*"))
    # Of text the key holds nothing of conversations.
    content = (store_dir / "contents").iterdir().__next__().read_text()
    key = digest(STORE_VERSION, content, byte_tokenizer().fingerprint, "text", None, None)
    assert made["text"][0].name == f"both-{key[:16]}"


def test_a_conversation_that_cannot_be_read_leaves_no_store(tmp_path, store_dir):
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": TALKS[0]}) + "\n" + json.dumps({"messages": TALKS[0][:1]}) + "\n")
    with pytest.raises(InputError, match="talks.jsonl:2: no answer, so nothing to score"):
        prepare_store("talks", talks(tmp_path), byte_tokenizer(), store_dir)
    assert list(store_dir.glob("stores/*")) == []
