"""Tokenizers whose bos is not their end-of-text: one bos ahead of each document, in training as in evals."""

import itertools
import json

import numpy as np
import pytest
from hf_folders import write_folder
from tiny_run import tiny_data

from curriculum.config import build_config
from curriculum.data import encode
from curriculum.data.cache import content_of, digest
from curriculum.data.chat import ChatConfig
from curriculum.data.corpus import load_corpus
from curriculum.data.held_out import eval_documents, split_store
from curriculum.data.pieces import Piece
from curriculum.data.prepare import find_store, prepare_documents, prepare_store
from curriculum.data.sources import SourceConfig
from curriculum.data.split import split_documents
from curriculum.data.tokenizers.tokenizer import byte_tokenizer, load_tokenizer
from curriculum.train.setup import build
from evalsets.evalset import cut_windows
from phases.batches import DataPlan, epoch_tokens
from phases.declared import Curriculum
from phases.lr import LrSchedule
from phases.resolve import resolve
from phases.schedule import Phase, SourceSupply

WORDS = ("der Wille", "zur Wahrheit", "words", "of a book")
TEXTS = [" ".join(WORDS[(i + j) % 4] for j in range(i % 7 + 1)) + f" {i}" for i in range(120)]
SEQ_LEN = 16


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    folder = write_folder("llama3", tmp_path_factory.mktemp("llama3") / "tokenizer")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.has_own_bos and tokenizer.bos != tokenizer.eot
    return folder, tokenizer


def write_rows(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return SourceConfig(path=str(path))


def ids_of(texts, tokenizer, opening=True):
    return [[*[tokenizer.bos][:opening], *tokenizer.encode(text).tolist(), tokenizer.eot] for text in texts]


def corpus_of(folder, tokenizer_path, source, **changes):
    data = {
        "tokenizer": {"kind": "hf", "path": str(tokenizer_path)},
        "sources": {"web": {"held_out": "20%"} | source},
        "phases": [{"name": "a", "until": "end", "mixture": {"web": 1}}],
        "evalsets": {"primary": {"held_out_of": "web"}},
        "train": {"steps": 1, "batch_size": 1, "seq_len": SEQ_LEN},
    }
    return load_corpus(build_config(data | changes), folder / "store")


def epoch(corpus, **options):
    """One epoch of the source as a batch of [1, B, T], its rows in the order of the stream."""
    tokenizer, size = corpus.tokenizer, corpus.tokens_per_epoch
    num_rows = size["web"] // SEQ_LEN
    supplies = {name: SourceSupply(tokens) for name, tokens in size.items()}
    phases = (Phase("a", "end", {"web": 1.0}),)
    schedule = resolve(Curriculum(phases, supplies, LrSchedule(), total_steps=1, batch_size=num_rows, seq_len=SEQ_LEN))
    plan = DataPlan(schedule, 1, size, SEQ_LEN)
    draws = plan.draws(0)[0]
    batch = plan.batch(0, corpus.streams, tokenizer.eot, bos=tokenizer.bos, draws=draws, **options)
    order = np.argsort(draws.offset)
    assert len(np.unique(draws.offset)) == num_rows > 5
    return type(batch)(*(array[0][order] for array in batch))


# --- stores -------------------------------------------------------------------------------------------------


def test_bos_opens_each_document_of_a_store(llama3, tmp_path):
    _, tokenizer = llama3
    source = write_rows(tmp_path / "web.jsonl", ["one two", "", "<|begin_of_text|>", "three"])
    store = prepare_store("web", source, tokenizer, tmp_path / "store")
    texts = ["one two", "<|begin_of_text|>", "three"]
    expected = ids_of(texts, tokenizer)
    assert store.stream[:].tolist() == sum(expected, []) and store.facts.num_tokens == len(sum(expected, []))
    assert store.stream[:].tolist().count(tokenizer.bos) == 3  # one a document, and text gives none
    assert store.document_tokens_N.tolist() == [len(ids) for ids in expected]
    assert [store.document_tokens(i).tolist() for i in range(3)] == [ids[1:-1] for ids in expected]
    assert store.documents["bytes"].tolist() == [len(text) for text in texts]
    store.verify()
    assert find_store("web", source, tokenizer, tmp_path / "store").directory == store.directory


def test_bos_stands_at_the_first_piece_of_a_document_only(llama3, monkeypatch):
    _, tokenizer = llama3
    monkeypatch.setattr(encode, "GROUP_BYTES", 1)  # every piece a group of its own
    pieces = [
        Piece("one", False, 3, "a"),
        Piece(" two", True, 4, "a"),
        Piece("", True, 0, "b"),
        Piece("x", True, 1, "c"),
    ]
    found = list(encode.encode_pieces(pieces, tokenizer))
    assert np.concatenate([ids for _, ids, _ in found]).tolist() == sum(ids_of(["one two", "x"], tokenizer), [])
    counts = [count for _, _, group in found for count in group]
    whole = [len(tokenizer.encode(text)) for text in ("one", " two", "x")]
    assert counts == [whole[0] + 1, whole[1] + 1, 0, whole[2] + 2]


def test_a_store_without_bos_is_not_taken_for_one_with_it(llama3, tmp_path):
    _, tokenizer = llama3
    source = write_rows(tmp_path / "web.jsonl", TEXTS)
    content = content_of("web", source, tmp_path / "store")
    plain = tmp_path / "store/stores" / f"web-{digest(3, content, tokenizer.fingerprint, 'text', None, None)[:16]}"
    store = prepare_store("web", source, tokenizer, tmp_path / "store")
    assert store.directory.parent == plain.parent and store.directory != plain
    assert store.facts.format_version == 4
    # A packing is found by the content hash, so that is another as well.
    flat = np.concatenate(ids_of(TEXTS, tokenizer, opening=False)).astype("<u2")
    flat.tofile(tmp_path / "web.bin")
    without = prepare_store("web", SourceConfig(path=str(tmp_path / "web.bin")), tokenizer, tmp_path / "store")
    assert without.facts.format_version == 3 and without.facts.content_hash != store.facts.content_hash
    assert without.documents["hash"].tolist() == store.documents["hash"].tolist()


def test_where_bos_is_end_of_text_stores_have_none_of_their_own(tmp_path):
    source = write_rows(tmp_path / "web.jsonl", ["one two", "three"])
    store = prepare_store("web", source, byte_tokenizer(), tmp_path / "store")
    assert store.directory.name == "web-c1310195e21092f1"
    assert store.facts.content_hash == "f1db0c515129b5cbe6f297edd4f90295" and store.facts.format_version == 3
    assert store.facts.checksums["tokens-00000.bin"] == "5686e1bf764754d84ab177af07dfc965"
    fields = [
        *("format_version", "source", "tokenizer_fingerprint", "vocab_size", "eot", "dtype", "num_tokens"),
        *("num_documents", "num_bytes", "num_empty", "content_hash", "shards", "num_scored", "chat"),
        *("checksums", "checksum"),
    ]
    assert list(json.loads((store.directory / "store.json").read_text())) == fields
    tokenizer = load_tokenizer(write_folder("gpt2", tmp_path / "gpt2"))
    assert not tokenizer.has_own_bos
    store = prepare_store("web", source, tokenizer, tmp_path / "store")
    assert store.stream[:].tolist() == sum(ids_of(["one two", "three"], tokenizer, opening=False), [])


@pytest.mark.parametrize("opening", [True, False])
def test_flat_files_are_taken_as_they_are(llama3, tmp_path, opening):
    folder, tokenizer = llama3
    ids = ids_of(TEXTS, tokenizer, opening)
    np.concatenate(ids).astype("<u2").tofile(tmp_path / "flat.bin")
    store = prepare_store("web", SourceConfig(path=str(tmp_path / "flat.bin")), tokenizer, tmp_path / "store")
    assert store.stream[:].tolist() == sum(ids, [])
    assert store.facts.opening_tokens == opening
    corpus = corpus_of(tmp_path, folder, {"path": str(tmp_path / "flat.bin")})
    text = corpus_of(tmp_path, folder, {"path": write_rows(tmp_path / "web.jsonl", TEXTS).path})
    assert corpus.evalsets["primary"].content_hash == text.evalsets["primary"].content_hash
    assert corpus.evalsets["primary"].num_bytes == text.evalsets["primary"].num_bytes > 0
    assert (corpus.streams["web"][:].tolist() == text.streams["web"][:].tolist()) == opening


def test_a_flat_file_with_some_bos_holds_them_as_tokens(llama3, tmp_path):
    _, tokenizer = llama3
    ids = [*ids_of(["one"], tokenizer), *ids_of(["two"], tokenizer, opening=False)]
    np.concatenate(ids).astype("<u2").tofile(tmp_path / "flat.bin")
    store = prepare_store("web", SourceConfig(path=str(tmp_path / "flat.bin")), tokenizer, tmp_path / "store")
    assert [store.document_tokens(i).tolist() for i in range(2)] == [document[:-1] for document in ids]


# --- training -----------------------------------------------------------------------------------------------


def test_a_stream_has_bos_ahead_of_each_document_and_never_scores_it(llama3, tmp_path):
    folder, tokenizer = llama3
    corpus = corpus_of(tmp_path, folder, {"path": write_rows(tmp_path / "web.jsonl", TEXTS).path})
    stream = corpus.streams["web"][:]
    store = prepare_store("web", SourceConfig(path=str(tmp_path / "web.jsonl")), tokenizer, tmp_path / "store")
    kept_N = split_store(store, tokenizer, 0.2).keep_N
    assert stream.tolist() == sum(itertools.compress(ids_of(TEXTS, tokenizer), kept_N), []) and 60 < kept_N.sum() < 110
    batch = epoch(corpus)
    inputs, targets, scored, ids = (array.reshape(-1) for array in batch[:4])
    num = epoch_tokens(len(stream), SEQ_LEN)
    assert inputs.tolist() == stream[:num].tolist() and targets.tolist() == stream[1 : num + 1].tolist()
    assert scored.tolist() == (targets != tokenizer.bos).tolist() and 0 < (~scored).sum()
    opens = np.diff(batch.segment_ids_ABT, axis=1) == 1
    assert np.array_equal(opens, batch.inputs_ABT[:, 1:] == tokenizer.bos) and opens.any() and ids.max() > 0
    masked = epoch(corpus, mask_boundary_loss=True)
    left_out = batch.loss_mask_ABT & ~masked.loss_mask_ABT
    assert np.array_equal(left_out, batch.inputs_ABT == tokenizer.bos)


def test_bins_have_bos_ahead_of_each_document_and_predict_the_rest(llama3, tmp_path):
    folder, tokenizer = llama3
    source = {"path": write_rows(tmp_path / "web.jsonl", TEXTS).path}
    corpus = corpus_of(tmp_path, folder, source, packing={"mode": "best_fit"})
    documents = {tuple(ids[1:]): ids for ids in ids_of(TEXTS, tokenizer)}
    batch, num_pieces = epoch(corpus), 0
    for inputs, targets, scored, ids in zip(*batch[:4], strict=True):
        assert np.array_equal(scored, ids >= 0)
        for number in range(ids.max() + 1):
            at = ids == number
            num_pieces += 1
            assert inputs[at][1:].tolist() == targets[at][:-1].tolist()
            if inputs[at][0] == tokenizer.bos and targets[at][-1] == tokenizer.eot:
                assert tuple(targets[at].tolist()) in documents
    assert num_pieces >= corpus.details["web"]["documents"] > 60
    assert (batch.inputs_ABT == tokenizer.bos).sum() == corpus.details["web"]["documents"]
    assert not (batch.targets_ABT == tokenizer.bos).any()
    kept = corpus.details["web"]["tokens"] - corpus.details["web"]["documents"]
    assert batch.loss_mask_ABT.sum() == kept == np.round(corpus.details["web"]["utilization"] * batch.targets_ABT.size)


def test_conversations_have_one_bos_that_no_answer_counts(llama3, tmp_path):
    folder, tokenizer = llama3
    talks = [
        [{"role": "assistant", "content": "y"}, {"role": "user", "content": f"{i}" + " x" * (i % 3)}]
        for i in range(120)
    ]
    chat = ChatConfig(user="{content}", assistant="{content}.")
    store = prepare_documents(talks, tokenizer, tmp_path / "talks", chat=chat)
    first = tokenizer.encode("y.").tolist()
    rest = tokenizer.encode("0", opens_document=False).tolist()
    length = int(store.document_tokens_N[0])
    assert store.stream[:length].tolist() == [tokenizer.bos, *first, *rest, tokenizer.eot]
    assert store.scored_stream[:length].tolist() == [0, *[1] * len(first), *[0] * len(rest), 0]
    start, stop = store.text_span(0)
    assert store.scored_stream[start:stop].tolist() == [*[1] * len(first), *[0] * len(rest)]
    assert store.facts.num_scored == 120 * len(first)
    source = {"path": str(tmp_path / "talks"), "format": "messages"}
    for mode in ("stream", "best_fit"):
        section = {"assistant": chat.assistant, "user": chat.user}
        batch = epoch(corpus_of(tmp_path, folder, source, packing={"mode": mode}, chat=section))
        opens = batch.inputs_ABT[:, 1:] == tokenizer.bos
        assert opens.sum() > 30
        assert np.array_equal(np.diff(np.maximum(batch.segment_ids_ABT, 0), axis=1) == 1, opens)
        assert not batch.loss_mask_ABT[batch.targets_ABT == tokenizer.bos].any() and batch.loss_mask_ABT.any()
    spelling = ChatConfig(user="{content}", assistant="<|begin_of_text|>{content}.")
    spelled = prepare_documents(talks, tokenizer, tmp_path / "spelled", chat=spelling)
    assert (spelled.stream[:] == tokenizer.bos).sum() == 120  # the one that opens a document is not written twice


def test_a_run_trains_on_such_batches(llama3, tmp_path):
    folder, tokenizer = llama3
    source = write_rows(tmp_path / "web.jsonl", TEXTS)
    sections = {
        "tokenizer": {"kind": "hf", "path": str(folder)},
        "sources": {"web": {"path": source.path, "held_out": "20%"}},
        "phases": [{"name": "a", "until": "end", "mixture": {"web": 1}}],
        "evalsets": {"primary": {"held_out_of": "web"}},
    }
    setup = build(build_config(tiny_data(tmp_path, **sections)), tmp_path / "store")
    try:
        batch = setup.course.feed[0]
        bos = np.asarray(batch.targets_ABT) == tokenizer.bos
        assert bos.any() and np.array_equal(np.asarray(batch.loss_mask_ABT), ~bos)
    finally:
        setup.close()


# --- evals --------------------------------------------------------------------------------------------------


def test_what_is_held_out_and_measured_does_not_depend_on_bos(llama3, tmp_path):
    folder, tokenizer = llama3
    source = write_rows(tmp_path / "web.jsonl", TEXTS)
    held_out = corpus_of(tmp_path, folder, {"path": source.path}).evalsets["primary"]
    store = prepare_store("web", source, tokenizer, tmp_path / "store")
    lengths = np.array([len(ids) for ids in ids_of(TEXTS, tokenizer, opening=False)])
    split = split_documents(lengths, store.documents["hash"], 0.2)
    texts = [TEXTS[i] for i in split.held_out]
    expected = cut_windows(
        "primary", [tokenizer.encode(text) for text in texts], tokenizer.token_bytes_V, tokenizer.bos, SEQ_LEN
    )
    sets = {"own": {"path": write_rows(tmp_path / "own.jsonl", texts).path}}
    elsewhere = {"path": write_rows(tmp_path / "other.jsonl", [f"other {text}" for text in TEXTS]).path}
    own = corpus_of(tmp_path, folder, elsewhere, evalsets={"primary": sets["own"]}).evalsets["primary"]
    for found in (held_out, own):
        assert found.content_hash == expected.content_hash and found.num_documents == len(texts) > 20
        assert np.array_equal(found.tokens_NT1, expected.tokens_NT1)
        assert np.array_equal(found.num_bytes_N, expected.num_bytes_N)
        assert not (found.tokens_NT1[:, 1:][found.scored_NT] == tokenizer.bos).any()
    assert held_out.num_bytes == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("texts", [TEXTS, TEXTS[:9]], ids=["by hash", "the tail"])
def test_the_split_is_that_of_a_store_without_bos(llama3, tmp_path, texts):
    _, tokenizer = llama3
    np.concatenate(ids_of(texts, tokenizer, opening=False)).astype("<u2").tofile(tmp_path / "flat.bin")
    paths = (str(tmp_path / "flat.bin"), write_rows(tmp_path / "web.jsonl", texts).path)
    plain, opened = (prepare_store("web", SourceConfig(path=p), tokenizer, tmp_path / "store") for p in paths)
    assert (plain.facts.opening_tokens, opened.facts.opening_tokens) == (0, 1)
    cuts = set()
    for share in np.linspace(0.02, 0.98, 49):
        expected, found = (split_store(store, tokenizer, share) for store in (plain, opened))
        assert np.array_equal(found.keep_N, expected.keep_N) and (len(found.held_out) or found.cut)
        assert found.cut == (expected.cut and (expected.cut[0], expected.cut[1] + 1))
        documents = (eval_documents(store, tokenizer, split) for store, split in ((plain, expected), (opened, found)))
        for one, other in zip(*documents, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist() and one[1:3] == other[1:3]
        cuts.add(found.cut)
    assert len(cuts) > 30 if len(texts) == 9 else cuts == {None}


@pytest.mark.parametrize("share", ["1%", "35%", "99%"])
def test_a_divided_document_is_cut_in_its_text(llama3, tmp_path, share):
    folder, tokenizer = llama3
    (tmp_path / "book.txt").write_text(" ".join(TEXTS))
    for mode in ("stream", "best_fit"):
        source = {"path": str(tmp_path / "book.txt"), "held_out": share}
        corpus = corpus_of(
            tmp_path, folder, source, packing={"mode": mode}, evalsets={"primary": {"held_out_of": "web"}, "seq_len": 8}
        )
        evalset = corpus.evalsets["primary"]
        stream = corpus.streams["web"] if mode == "stream" else corpus.streams["web"].tokens
        tail = evalset.tokens_NT1[:, 1:][evalset.scored_NT].tolist()
        assert stream[:].tolist() + tail == [tokenizer.bos, *tokenizer.encode(" ".join(TEXTS)).tolist()]
        assert len(stream) > 1 and evalset.tokens_NT1[0, 0] == tokenizer.bos
