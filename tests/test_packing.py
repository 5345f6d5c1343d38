"""Bins of documents: against a slow packing, by hand, and by counting every token of data that names itself."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter, namedtuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from curriculum.cli.plan import table
from curriculum.config import build_config
from curriculum.data.corpus import find_sizes, load_corpus
from curriculum.data.packing import Bins, best_fit_decreasing, find_packing, pack, prepare_packing
from curriculum.errors import InputError
from curriculum.plan import plan
from phases.batches import DataPlan
from phases.declared import Curriculum
from phases.lr import LrSchedule
from phases.resolve import resolve
from phases.schedule import Phase, SourceSupply

EOT = 0
BLOCK = 8
Row = namedtuple("Row", "inputs_T targets_T scored_T segment_ids_T")
lengths_of = st.lists(st.integers(1, 40), min_size=1, max_size=80)


def bins_of(lengths, block=BLOCK, cut=None, scored=None):
    """Bins over documents 1000 * d + 1, 1000 * d + 2 ..., the last token of each end-of-text but in the cut one."""
    documents = [1000 * d + np.arange(1, n + 1) for d, n in enumerate(lengths, start=1)]
    for d, document in enumerate(documents):
        if d != cut:
            document[-1] = EOT
    pieces, bins = pack(np.array(lengths), block)
    return Bins(np.concatenate(documents), EOT, block, pieces, bins, scored)


def row_of(bins, offset, length):
    return Row(*(column_RT[0] for column_RT in bins.read(np.array([offset]), length)))


def data_plan(streams, seq_len=BLOCK, batch=3, epochs=3):
    sizes = {name: len(s.bins) * s.block_tokens for name, s in streams.items()}
    supplies = {name: SourceSupply(n) for name, n in sizes.items()}
    total = -(-epochs * max(sizes.values()) * len(sizes) // (batch * seq_len)) + 2
    phases = (Phase("a", "end", {n: float(size) for n, size in sizes.items()}),)
    schedule = resolve(Curriculum(phases, supplies, LrSchedule(), total_steps=total, batch_size=batch, seq_len=seq_len))
    return DataPlan(schedule, 3, sizes, BLOCK)


# --- the packing --------------------------------------------------------------------------------------------


def slow_best_fit_decreasing(lengths, capacity):
    """In a loop over items and bins: how full each bin is. Which of equally full bins takes an item is no matter."""
    filled: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [b for b, taken in enumerate(filled) if taken + length <= capacity]
        if fitting:
            filled[max(fitting, key=filled.__getitem__)] += length
        else:
            filled.append(length)
    return sorted(filled)


@settings(max_examples=300)
@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), min_size=1))))
def test_the_bins_are_those_of_the_slow_way(case):
    capacity, lengths = case
    found = best_fit_decreasing(np.array(lengths), capacity)
    assert sorted(np.bincount(found, lengths).tolist()) == slow_best_fit_decreasing(lengths, capacity)


def test_many_documents_against_the_slow_way():
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(3, 1, 2000)).astype(np.int64)
    lengths = lengths[lengths <= 100]
    found = best_fit_decreasing(lengths, 100)
    assert sorted(np.bincount(found, lengths).tolist()) == slow_best_fit_decreasing(lengths.tolist(), 100)
    assert len(lengths) > 1900


def test_a_packing_by_hand():
    # Bins of 8: 20 is two full bins and 4. Then 6, 5, 4, 2 and 1: 5 opens a second bin and 4 a third; 2 goes to 6,
    # which has the least room that takes it, and 1 to 5, which then has less room (3) than 4 has.
    pieces, bins = pack(np.array([1, 6, 20, 2, 5]), 8)
    assert bins.tolist() == [1, 2, 4, 6, 7]
    assert pieces.tolist() == [(7, 8, 1), (15, 8, 0), (1, 6, 1), (27, 2, 1), (0, 1, 1), (29, 5, 1), (23, 4, 0)]
    # One that fills a bin is not divided, and one of no rest has none.
    pieces, bins = pack(np.array([8, 16]), 8)
    assert pieces.tolist() == [(0, 8, 1), (8, 8, 1), (16, 8, 0)] and bins.tolist() == [1, 2, 3]


def test_what_opens_a_document_is_in_no_piece():
    # Documents of 3, 11 and 1 tokens behind a bos each, which stand at 0, 4 and 16.
    pieces, bins = pack(np.array([4, 12, 2]), 8, opening_tokens=1)
    assert pieces.tolist() == [(5, 8, 1), (1, 3, 1), (13, 3, 0), (17, 1, 1)] and bins.tolist() == [1, 4]
    bos, stream = 9, np.array([9, 11, 12, EOT, 9, *range(21, 31), EOT, 9, EOT])
    row = row_of(Bins(stream, EOT, 8, pieces, bins, bos=bos), 8, 8)
    assert row.inputs_T.tolist() == [bos, 11, 12, 28, 29, 30, bos, EOT]
    assert row.targets_T.tolist() == [11, 12, EOT, 29, 30, EOT, EOT, EOT]
    assert row.segment_ids_T.tolist() == [0, 0, 0, 1, 1, 1, 2, -1] and row.scored_T.tolist() == [True] * 7 + [False]


@settings(max_examples=200)
@given(lengths_of, st.integers(1, 20))
def test_every_token_stands_in_one_bin_and_no_bin_is_over_full(lengths, block):
    pieces, bins = pack(np.array(lengths), block)
    assert bins[-1] == len(pieces) and (np.diff(bins, prepend=np.uint64(0)) > 0).all()
    filled = [int(part["tokens"].sum()) for part in np.split(pieces, bins[:-1].astype(int))]
    assert max(filled) <= block and sum(filled) == sum(lengths)
    spans = sorted((int(p["start"]), int(p["start"]) + int(p["tokens"])) for p in pieces)
    assert [0, *(stop for _, stop in spans)] == [*(start for start, _ in spans), sum(lengths)]
    first_tokens = (np.cumsum(lengths) - lengths).tolist()
    assert sorted(pieces["start"][pieces["opens"] == 1].tolist()) == first_tokens
    # A document is cut only where it must be.
    assert len(pieces) == sum(-(-n // block) for n in lengths)


# --- rows ---------------------------------------------------------------------------------------------------


def test_rows_by_hand():
    # Document 1: 1001..1010 and end-of-text, 11 tokens: a full bin and 3. Document 2: 2001 2002 2003 0.
    bins = bins_of([11, 4])
    full, rest = row_of(bins, 0, 8), row_of(bins, 8, 8)
    assert full.inputs_T.tolist() == [0, 1001, 1002, 1003, 1004, 1005, 1006, 1007]
    assert full.targets_T.tolist() == [1001, 1002, 1003, 1004, 1005, 1006, 1007, 1008]
    assert full.segment_ids_T.tolist() == [0] * 8 and full.scored_T.all()
    # The second piece of document 1 begins with the token before it; the last slot is padding.
    assert rest.inputs_T.tolist() == [1008, 1009, 1010, 0, 2001, 2002, 2003, 0]
    assert rest.targets_T.tolist() == [1009, 1010, 0, 2001, 2002, 2003, 0, 0]
    assert rest.segment_ids_T.tolist() == [0, 0, 0, 1, 1, 1, 1, -1]
    assert rest.scored_T.tolist() == [True] * 7 + [False]
    assert [len(column) for column in rest] == [8] * 4 and rest.scored_T.dtype == bool


def test_shorter_rows_cut_a_bin():
    bins = bins_of([11, 4])
    left, right = row_of(bins, 8, 4), row_of(bins, 12, 4)
    assert left.inputs_T.tolist() == [1008, 1009, 1010, 0] and left.targets_T.tolist() == [1009, 1010, 0, 2001]
    assert left.segment_ids_T.tolist() == [0, 0, 0, 1]
    # The row begins inside document 2: with the token before, counted from 0 again.
    assert right.inputs_T.tolist() == [2001, 2002, 2003, 0] and right.targets_T.tolist() == [2002, 2003, 0, 0]
    assert right.segment_ids_T.tolist() == [0, 0, 0, -1]
    padding = row_of(bins_of([2]), 4, 4)
    assert padding.inputs_T.tolist() == padding.targets_T.tolist() == [EOT] * 4
    assert padding.segment_ids_T.tolist() == [-1] * 4 and not padding.scored_T.any()


def test_the_head_of_a_document_ends_without_end_of_text():
    bins = bins_of([3, 4], cut=1)  # 1001 1002 0 and 2001 2002 2003 2004
    row = row_of(bins, 0, 8)
    assert row.targets_T.tolist() == [1001, 1002, 0, 2001, 2002, 2003, 2004, 0]
    assert row.inputs_T.tolist() == [0, 1001, 1002, 0, 2001, 2002, 2003, 0]
    assert row.segment_ids_T.tolist() == [0, 0, 0, 1, 1, 1, 1, -1]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_ids_of_any_type(dtype):
    pieces, bins = pack(np.array([11, 4]), BLOCK)
    row = row_of(Bins(np.arange(40_000, 40_015).astype(dtype), EOT, BLOCK, pieces, bins), 8, 8)
    assert row.targets_T.tolist() == [*range(40_008, 40_015), 0] and row.targets_T.dtype == np.int32
    assert row.inputs_T.tolist() == [40_007, 40_008, 40_009, 0, 40_011, 40_012, 40_013, 0]


@settings(max_examples=100)
@given(lengths_of, st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_shorter_rows_hold_what_the_bin_holds(lengths, length, with_scored):
    scored = np.random.default_rng(len(lengths)).random(sum(lengths)) < 0.5 if with_scored else None
    bins = bins_of(lengths, scored=scored)
    for offset in range(0, len(bins.bins) * BLOCK, BLOCK):
        whole = row_of(bins, offset, BLOCK)
        parts = [row_of(bins, offset + within, length) for within in range(0, BLOCK, length)]
        for column in ("inputs_T", "targets_T", "scored_T"):
            assert np.concatenate([getattr(p, column) for p in parts]).tolist() == getattr(whole, column).tolist()
        for i, part in enumerate(parts):
            ids = whole.segment_ids_T[i * length : (i + 1) * length]
            assert part.segment_ids_T.tolist() == np.where(ids < 0, -1, ids - ids[0]).tolist()


@settings(max_examples=50)
@given(lengths_of, st.sampled_from([2, 8]), st.booleans())
def test_many_rows_at_once_are_those_read_alone(lengths, length, with_scored):
    scored = np.random.default_rng(len(lengths)).random(sum(lengths)) < 0.5 if with_scored else None
    bins = bins_of(lengths, scored=scored)
    offsets_R = np.random.default_rng(1).integers(0, len(bins.bins) * BLOCK // length, 7) * length
    together = bins.read(offsets_R, length)
    for row, offset in enumerate(offsets_R.tolist()):
        for column_RT, column_T in zip(together, row_of(bins, offset, length), strict=True):
            assert column_RT[row].tolist() == column_T.tolist() and column_RT.dtype == column_T.dtype


@pytest.mark.parametrize("seq_len", [8, 4, 1])
def test_every_token_is_a_target_exactly_once_an_epoch(seq_len):
    rng = np.random.default_rng(1)
    lengths = {"web": rng.integers(1, 30, 40).tolist(), "law": rng.integers(1, 9, 25).tolist()}
    # No end-of-text: every token names its document and its place, so that none can be taken for another.
    streams = {}
    for name, counts in lengths.items():
        documents = [1000 * d + np.arange(n) for d, n in enumerate(counts, start=1)]
        streams[name] = Bins(np.concatenate(documents), EOT, BLOCK, *pack(np.array(counts), BLOCK))
    order = data_plan(streams, seq_len)
    drawn = {name: [] for name in streams}
    for step in range(order.schedule.total_steps):
        batch = order.batch(step, streams, EOT)
        assert (batch.loss_mask_ABT == (batch.segment_ids_ABT >= 0)).all()
        for row, source in enumerate(batch.source_ids_AB[0].tolist()):
            slots = (array[0, row] for array in (batch.inputs_ABT, batch.targets_ABT, batch.loss_mask_ABT))
            drawn[order.sources[source]] += list(zip(*(s.tolist() for s in slots), strict=True))
    for name, counts in lengths.items():
        expected = Counter()
        for d, n in enumerate(counts, start=1):
            expected.update((1000 * d + i - 1 if i else EOT, 1000 * d + i) for i in range(n))
        assert len(expected) == sum(counts)
        epoch_slots = order.tokens_per_epoch[name]
        assert epoch_slots == len(streams[name].bins) * BLOCK and len(drawn[name]) >= 2 * epoch_slots
        epochs = [drawn[name][i : i + epoch_slots] for i in range(0, len(drawn[name]) - epoch_slots + 1, epoch_slots)]
        for epoch in epochs:
            assert Counter((i, t) for i, t, is_scored in epoch if is_scored) == expected
        assert epochs[0] != epochs[1]


def test_grad_accum_and_asking_alone_change_no_data():
    streams = {"web": bins_of([3, 9, 30, 4, 4, 7, 1, 1, 6] * 4), "law": bins_of([2, 2, 5])}
    order = data_plan(streams, batch=6)
    for step, draws in enumerate(order.draws(0, 5)):
        whole, split = order.batch(step, streams, EOT), order.batch(step, streams, EOT, 3, draws)
        assert split.inputs_ABT.shape == (3, 2, BLOCK)
        for a, b in zip(whole, split, strict=True):
            assert np.array_equal(a.reshape(-1), b.reshape(-1)) and a.dtype == b.dtype


def test_which_targets_are_scored():
    # Targets of the one bin: 1001 1002 0 | 2001 0 | 3001 0 | padding, in some order of the documents.
    scored = np.array([1, 0, 1, 1, 1, 1, 1], np.uint8)  # not 1002

    def targets(scored=None, **options):
        streams = {"web": bins_of([3, 2, 2], scored=scored)}
        batch = data_plan(streams, batch=1).batch(0, streams, EOT, **options)
        assert not batch.loss_mask_ABT[batch.segment_ids_ABT < 0].any()
        return sorted(batch.targets_ABT[batch.loss_mask_ABT].tolist())

    assert targets() == [0, 0, 0, 1001, 1002, 2001, 3001]
    assert targets(mask_boundary_loss=True) == [0, 0, 0, 1002]
    assert targets(train_on_eos=False) == [1001, 1002, 2001, 3001]
    assert targets(mask_boundary_loss=True, train_on_eos=False) == [1002]
    assert targets(scored) == [0, 0, 0, 1001, 2001, 3001]
    assert targets(scored, mask_boundary_loss=True, train_on_eos=False) == []


# --- on disk ------------------------------------------------------------------------------------------------

LENGTHS = np.random.default_rng(2).integers(1, 60, 500)
BUILD = """
import os, signal, sys
import numpy as np
from curriculum.data import packing
if sys.argv[2] == "kill":
    packing.write_sidecar = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
packing.prepare_packing("text", np.random.default_rng(2).integers(1, 60, 500), 16, sys.argv[1])
"""


def build_in_process(folder, kill="", **environment):
    environment = os.environ | environment
    return subprocess.run([sys.executable, "-c", BUILD, str(folder), kill], env=environment, timeout=600).returncode


def contents(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in (folder / "packing").rglob("*") if p.is_file()}


def test_the_bins_are_the_same_in_every_process(tmp_path):
    facts, pieces, bins = prepare_packing("text", LENGTHS, 16, tmp_path / "here")
    assert build_in_process(tmp_path / "there", PYTHONHASHSEED="7") == 0
    assert contents(tmp_path / "here") == contents(tmp_path / "there") and len(contents(tmp_path / "here")) == 3
    assert find_packing("text", 16, tmp_path / "there") == facts
    assert facts.num_tokens == LENGTHS.sum() and facts.num_bins == len(bins) and facts.num_pieces == len(pieces)


def test_utilization_by_hand(tmp_path):
    # 5+3, 4+4, 7: 23 tokens in 24 slots.
    facts = prepare_packing("text", np.array([4, 5, 7, 3, 4]), 8, tmp_path)[0]
    assert facts.num_bins == 3 and facts.tokens_per_epoch == 24 and facts.utilization == 23 / 24


def test_a_packing_belongs_to_its_stream_and_its_length(tmp_path):
    prepare_packing("text", LENGTHS, 16, tmp_path)
    assert find_packing("text", 32, tmp_path) is None and find_packing("other", 16, tmp_path) is None
    assert prepare_packing("other", LENGTHS[:7], 16, tmp_path)[0].num_tokens == LENGTHS[:7].sum()
    assert prepare_packing("text", LENGTHS, 32, tmp_path)[0].block_tokens == 32
    assert len(list((tmp_path / "packing").iterdir())) == 3


def test_it_is_built_once(tmp_path):
    prepare_packing("text", LENGTHS, 16, tmp_path)
    shutil.rmtree(tmp_path / "locks")  # nobody waits for what is there
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    prepare_packing("text", LENGTHS, 16, tmp_path)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before and len(before) == 5


def test_killed_while_it_is_built_nothing_half_stays(tmp_path):
    assert build_in_process(tmp_path, "kill") == -signal.SIGKILL
    assert [p.suffix for p in (tmp_path / "packing").iterdir()] == [".partial"]
    assert find_packing("text", 16, tmp_path) is None
    prepare_packing("other", LENGTHS[:9], 16, tmp_path)  # whatever is built next throws it away
    (other,) = (tmp_path / "packing").iterdir()
    shutil.rmtree(other)
    prepare_packing("text", LENGTHS, 16, tmp_path)
    prepare_packing("text", LENGTHS, 16, tmp_path / "whole")
    assert contents(tmp_path) == contents(tmp_path / "whole") and len(contents(tmp_path)) == 3


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("pieces.bin", lambda b: b[:-1], r"pieces\.bin: .* bytes; the sidecar says .* bytes|pieces\.bin: "),
        ("bins.bin", lambda b: b + b"\0" * 8, r"bins\.bin: .* bytes; the sidecar says"),
        ("pieces.bin", lambda b: b[:20] + bytes([b[20] ^ 1]) + b[21:], r"pieces\.bin or bins\.bin does not match"),
        ("bins.bin", lambda b: bytes([b[0] ^ 1]) + b[1:], r"pieces\.bin or bins\.bin does not match"),
        ("bins.bin", None, r"bins\.bin: No such file"),
        ("packing.json", None, r"packing\.json: No such file"),
        ("packing.json", lambda b: b[:30], r"packing\.json: "),
        ("packing.json", lambda b: b.replace(b'"format_version": 1', b'"format_version": 9'), "format_version 9"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, damage, message):
    prepare_packing("text", LENGTHS, 16, tmp_path)
    (path,) = (tmp_path / "packing").rglob(name)
    content = path.read_bytes()
    path.unlink() if damage is None else path.write_bytes(damage(content))
    with pytest.raises(InputError, match=message) as error:
        prepare_packing("text", LENGTHS, 16, tmp_path)
    assert "delete the folder, and it is packed again" in str(error.value)


# --- in a run -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """web: 120 documents of many lengths; book: one, whose tail is held out."""
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    words = "the quick brown fox jumps over a lazy dog".split()
    texts = [" ".join(rng.choice(words, int(rng.integers(1, 30)))) + f" {i}" for i in range(120)]
    (folder / "web.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "book.txt").write_text(" ".join(texts[:40]) + " the end")
    return folder


def config_of(folder, packing, steps=8, **changes):
    data = {
        "model": {"preset": "tiny", "n_layer": 1, "d_model": 16, "n_head": 2, "n_kv_head": 1, "d_ff": 16},
        "sources": {
            "web": {"path": str(folder / "web.jsonl"), "held_out": "10%"},
            "book": {"path": str(folder / "book.txt"), "held_out": "10%"},
        },
        "packing": packing,
        "phases": [{"name": "a", "until": "end", "mixture": {"web": 0.7, "book": 0.3}}],
        "evalsets": {"primary": {"held_out_of": "web"}, "every": 4},
        "train": {"steps": steps, "batch_size": 4, "seq_len": 32},
        "optim": {"lr": 1e-2, "schedule": "constant"},
        "checkpoint": {"every": 4},
        "logging": {"every": 2, "tensorboard": False},
    }
    return build_config(data | changes)


WEB_ONLY = {"name": "a", "until": "end", "mixture": {"web": 1.0}}


def test_bins_hold_the_training_text_and_nothing_else(folder, tmp_path):
    plain = load_corpus(config_of(folder, {}), tmp_path)
    packed = load_corpus(config_of(folder, {"mode": "best_fit"}), tmp_path)
    for name in ("web", "book"):
        bins, details = packed.streams[name], packed.details[name]
        rows = [row_of(bins, block * 32, 32) for block in range(details["tokens_per_epoch"] // 32)]
        targets = np.concatenate([row.targets_T[row.scored_T] for row in rows])
        assert Counter(targets.tolist()) == Counter(plain.streams[name][:].tolist()) and len(targets) > 500
        assert details["utilization"] == details["tokens"] / details["tokens_per_epoch"] > 0.9
        assert details["stream"] == plain.details[name]["stream"]
    # The book is one document without its end: full bins in its order, then the rest.
    book = plain.streams["book"][:]
    rows = [row_of(packed.streams["book"], offset, 32) for offset in range(0, packed.tokens_per_epoch["book"], 32)]
    assert np.concatenate([row.targets_T for row in rows])[: len(book)].tolist() == book.tolist()
    assert rows[1].inputs_T[0] == book[31] and rows[0].inputs_T[0] == packed.tokenizer.eot
    assert len(book) < packed.tokens_per_epoch["book"] < len(book) + 32


def test_a_plan_knows_of_bins_once_they_are_made(folder, tmp_path):
    stream, packed = config_of(folder, {}), config_of(folder, {"mode": "best_fit"})
    load_corpus(stream, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    p = plan(packed, store_dir=tmp_path)
    assert sorted(tmp_path.rglob("*")) == before and before
    assert p.sources["web"]["tokens_per_epoch"] is None and p.sources["web"]["tokens"] > 500
    assert any("not prepared yet, so epochs are unknown: web, book" in w for w in p.warnings)
    assert "packing best_fit: slots that hold text: web ?, book ?" in table(p)
    corpus = load_corpus(packed, tmp_path)
    p = plan(packed, store_dir=tmp_path)
    assert find_sizes(packed, tmp_path).details == corpus.details
    assert {name: source["tokens_per_epoch"] for name, source in p.sources.items()} == corpus.tokens_per_epoch
    share = {name: f"{corpus.details[name]['utilization']:.2%}" for name in ("web", "book")}
    assert f"packing best_fit: slots that hold text: web {share['web']}, book {share['book']}" in table(p)
    assert not any(line.startswith("packing") for line in table(plan(stream, store_dir=tmp_path)))
    assert plan(stream, store_dir=tmp_path).sources["web"]["utilization"] == 1.0


def test_prepare_says_how_full_the_bins_are(folder, tmp_path):
    from click.testing import CliRunner

    from curriculum.cli.prepare import command

    config = config_of(folder, {"mode": "best_fit"})
    data = {name: section for name, section in config.to_json().items() if name not in ("tokenizer", "optim")}
    data["model"] = {"preset": "tiny"}
    (tmp_path / "c.yaml").write_text(json.dumps(data))
    done = CliRunner().invoke(command, [str(tmp_path / "c.yaml"), "--store-dir", str(tmp_path / "store")])
    assert done.exit_code == 0, done.output
    details = load_corpus(config, tmp_path / "store").details["book"]
    num_bins = details["tokens_per_epoch"] // 32
    assert f", packed into {num_bins} bins, {details['utilization']:.2%} full\n" in done.output and num_bins > 10


def test_a_source_without_training_text_is_refused_in_one_line(folder, tmp_path):
    from curriculum.scheduling import resolve_schedule

    texts = [f"text {i}" for i in range(400)]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    few = {"path": str(tmp_path / "few.jsonl"), "held_out": "99.5%"}
    web = {"path": str(folder / "web.jsonl"), "held_out": "10%"}
    kept = load_corpus(config_of(folder, {}, sources={"web": web, "few": few}, phases=[WEB_ONLY]), tmp_path)
    left = bytes(t for t in kept.streams["few"][:].tolist() if t < 256).decode()
    assert kept.details["few"]["documents"] <= 4
    rows = [text for text in texts if text in left]
    (tmp_path / "left.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    evalsets = {"primary": {"held_out_of": "web"}, "sets": {"left": {"path": str(tmp_path / "left.jsonl")}}}
    both = [{"name": "a", "until": "end", "mixture": {"web": 0.5, "few": 0.5}}]
    for mode in ("stream", "best_fit"):
        changes = {"sources": {"web": web, "few": few}, "evalsets": evalsets}
        config = config_of(folder, {"mode": mode}, phases=both, **changes)
        corpus = load_corpus(config, tmp_path)
        assert corpus.details["few"]["documents"] == corpus.tokens_per_epoch["few"] == 0
        few_is_too_few = r"sources\.few: too few training tokens, expected at least the run"
        with pytest.raises(InputError, match=few_is_too_few):
            resolve_schedule(config, corpus.tokens_per_epoch)
        with pytest.raises(InputError, match=few_is_too_few):
            plan(config, store_dir=tmp_path)
        # Where no phase draws from it, it is nobody's matter.
        plan(config_of(folder, {"mode": mode}, phases=[WEB_ONLY], **changes), store_dir=tmp_path)


def test_a_damaged_packing_is_an_input_error_of_the_plan(folder, tmp_path):
    config = config_of(folder, {"mode": "best_fit"})
    load_corpus(config, tmp_path)
    path = sorted((tmp_path / "packing").rglob("pieces.bin"))[0]
    path.write_bytes(path.read_bytes()[:-16])
    with pytest.raises(InputError, match=r"pieces\.bin: .*delete the folder, and it is packed again"):
        plan(config, store_dir=tmp_path)


def test_an_unknown_mode_is_refused(folder):
    with pytest.raises(InputError, match=r"packing\.mode: .*best"):
        config_of(folder, {"mode": "best-fit"})


def test_a_run_packs_resumes_bit_equal_and_keeps_its_packing(folder, tmp_path):
    import jax

    from curriculum.run import load_run
    from curriculum.train.checkpoints.folder import restore
    from curriculum.train.setup import build
    from curriculum.train.trainer import train

    packing = {"mode": "best_fit", "mask_boundary_loss": True, "train_on_eos": False}
    train(config_of(folder, packing), tmp_path / "whole", store_dir=tmp_path / "store")
    train(config_of(folder, packing, steps=4), tmp_path / "parts", store_dir=tmp_path / "store")
    for key, value, trained in (
        ("mode", "stream", '"best_fit"'),
        ("mask_boundary_loss", False, "true"),
        ("train_on_eos", True, "false"),
        ("document_mask", True, "false"),
    ):
        other = config_of(folder, packing | {key: value})
        with pytest.raises(InputError, match=rf"packing\.{key}: got .*, but the run was trained with {trained}"):
            train(other, tmp_path / "parts", resume="latest", store_dir=tmp_path / "store")
    train(config_of(folder, packing), tmp_path / "parts", resume="latest", store_dir=tmp_path / "store")

    setup = build(config_of(folder, packing), tmp_path / "store")
    like = setup.states.first()
    arrays = []
    for name in ("whole", "parts"):
        state = restore(tmp_path / name / "checkpoints/8", like)
        arrays.append([np.asarray(a).tobytes() for a in jax.tree.leaves(state)])
    batch = setup.course.feed[0]
    setup.course.feed.close()
    assert arrays[0] == arrays[1] and len(arrays[0]) > 10
    inputs, targets, mask = (np.asarray(a) for a in (batch.inputs_ABT, batch.targets_ABT, batch.loss_mask_ABT))
    eot = setup.corpus.tokenizer.eot
    assert mask.any() and not mask[(inputs == eot) | (targets == eot)].any()
    assert mask[(inputs != eot) & (targets != eot)].all()

    runs = [load_run(tmp_path / name) for name in ("whole", "parts")]
    losses = [[row["loss"] for row in run.metrics] for run in runs]
    assert losses[0] == losses[1] and len(losses[0]) == 4 and losses[0][-1] < losses[0][0]
    assert {row["packing_mode"] for row in runs[0].metrics} == {"best_fit"}
