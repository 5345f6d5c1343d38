"""Runs that measured other text: sets by their content, under other names, and in bits per byte where windows differ."""

import json
import math

import numpy as np
import pytest
from related_runs import begun, cut_otherwise
from tiny_run import tiny_data, tiny_train, write_corpus
from written_run import windows, write_run

from curriculum.errors import InputError
from curriculum.views.compare import compare
from curriculum.views.compare_text import table


def test_sets_of_other_text_are_refused_by_name_and_sets_of_one_run_are_listed(tmp_path):
    losses = {"val": lambda step: 3.0, "law": lambda step: 2.0}
    first = write_run(tmp_path / "first", {**losses, "mine": lambda step: 1.0})
    second = write_run(tmp_path / "second", losses, hashes={"law": "0123456789abcdef"})
    third = write_run(tmp_path / "third", losses)
    comparison = compare([first, second, third])
    assert [(c.name, [m.run for m in c.runs]) for c in comparison.sets] == [
        ("val", ["first", "second", "third"]),
        ("law", ["first", "third"]),
    ]
    assert list(comparison.refused) == ["law"] and len(comparison.refused["law"]) == 1
    assert (
        "first and second measured different text (content hash-of-law and 0123456789ab)"
        in comparison.refused["law"][0]
    )
    assert comparison.only == {"mine": ("first",)}
    shown = "\n".join(table(comparison))
    assert (
        "law: not compared: first and second measured different text" in shown
        and "mine: measured only by first" in shown
    )


def test_one_text_is_compared_under_two_names(tmp_path):
    """An adapted run whose primary set is the domain has the base's primary text under another name."""
    base = write_run(tmp_path / "base", {"val": lambda step: 3.0, "law": lambda step: 4.0, "code": lambda step: 1.0})
    losses = {"val": lambda step: 3.5, "books": lambda step: 3.25, "poems": lambda step: 5.0}
    hashes = {"val": "hash-of-law", "books": "hash-of-val"}
    adapted = write_run(tmp_path / "adapted", losses, hashes=hashes)
    comparison = compare([base, adapted])
    compared = {c.title: [(m.run, m.set, m.loss) for m in c.runs] for c in comparison.sets}
    assert compared == {
        "val (books in adapted)": [("base", "val", 3.0), ("adapted", "books", 3.25)],
        "law (val in adapted)": [("base", "law", 4.0), ("adapted", "val", 3.5)],
    }
    assert [c.runs[1].difference.delta for c in comparison.sets] == pytest.approx([0.25, -0.5])
    (why,) = comparison.refused["val"]
    assert why.startswith("base and adapted measured different text (content hash-of-val and hash-of-law)")
    assert comparison.only == {"code": ("base",), "poems": ("adapted",)} and comparison.alone == ()
    shown = table(comparison)
    assert any(line.startswith("  val (books in adapted)  base ") for line in shown)
    assert any(line.startswith("law (val in adapted): adapted at step 100 is better than base") for line in shown)
    told = comparison.to_json()["sets"][0]
    assert (told["name"], [m["set"] for m in told["runs"]]) == ("val", ["val", "books"])
    results = adapted / "evals/100.npz"
    arrays = dict(np.load(results))
    np.savez(results, **arrays | {key: 2 * arrays[key] for key in ("books.tokens", "books.nats")})
    with pytest.raises(
        InputError, match=r"val \(books in adapted\): evals/100.npz of adapted and evals/100.npz of base"
    ):
        compare([base, adapted])


def test_other_windows_of_the_same_documents_are_compared_in_bits_per_byte(tmp_path):
    # Texts 1 to 4 of 20, 40, 20 and 20 bytes; the second run lacks text 4, has a text 9, and cuts them otherwise.
    # Over texts 1 to 3 the rise is (2 + 2 - 1) nats / 80 bytes = 0.0375. u = 2 - 0.75, 2 - 1.5, -1 - 0.75, so
    # SE^2 = 3/2 (1.25^2 + 0.5^2 + 1.75^2) / 80^2 = 7.3125 / 6400 = 0.0338^2, in nats per byte.
    first = cut_otherwise([10.0, 20.0, 10.0, 50.0], [20, 40, 20, 20], [1, 2, 3, 4], [1, 2, 1, 2])
    second = cut_otherwise([12.0, 22.0, 9.0, 10.0], [20, 40, 20, 120], [1, 2, 3, 9], [2, 4, 2, 1])
    paths = [
        write_run(tmp_path / name, {"val": lambda step, of_run=of_run: of_run}, hashes={"val": name})
        for name, of_run in (("first", first), ("second", second))
    ]
    comparison = compare(paths)
    (compared,) = comparison.sets
    assert (compared.unit, comparison.refused, comparison.alone) == ("bits per byte", {}, ())
    d = compared.runs[1].difference
    assert (d.num_clusters, d.clusters, d.share) == (3, "documents", pytest.approx(80 / 200))
    assert d.delta == pytest.approx(0.0375 / math.log(2))
    sem = math.sqrt(7.3125) / 80 / math.log(2)
    assert d.sem == pytest.approx(sem)
    assert d.interval[1] == pytest.approx(d.delta + 4.30265 * sem, rel=1e-5)  # Student's t with 2 degrees of freedom
    verdict = "no difference shown between second at step 100 and first at step 100: +0.0541 bits per byte (95 %"
    assert compared.runs[1].verdict.startswith(verdict)
    shown = "\n".join(table(comparison))
    assert "+0.0541 bpb  -0.1557 to +0.2639" in shown and "or bits per byte where it says bpb" in shown
    assert "over the 3 documents that both measured, 40 % of the bytes" in shown

    # A third run with the windows of the first is compared with it in nats, and a fourth without any of its texts is not.
    third = write_run(tmp_path / "third", {"val": lambda step: first}, hashes={"val": "first"})
    stranger = cut_otherwise([1.0], [20], [77], [1])
    fourth = write_run(tmp_path / "fourth", {"val": lambda step: stranger}, hashes={"val": "fourth"}, until=20)
    comparison = compare([*paths, third, fourth])
    told = [(c.unit, [m.run for m in c.runs]) for c in comparison.sets]
    assert told == [("nats per token", ["first", "third"]), ("bits per byte", ["first", "second"])]
    assert comparison.alone == ("fourth",) and comparison.common == 10_000
    assert comparison.refused == {
        "val": ("first and fourth measured different text (content first and fourth): they share no document",)
    }


def test_runs_of_two_tokenizers_and_lengths_are_compared_by_the_documents_of_both(tmp_path):
    write_corpus(tmp_path)
    evalsets = tiny_data(tmp_path)["evalsets"]
    tiny_train(tmp_path, tmp_path / "bytes")
    tokenizer = {"kind": "bpe", "vocab_size": 300}
    tiny_train(tmp_path, tmp_path / "bpe", tokenizer=tokenizer, evalsets={**evalsets, "seq_len": 16})
    comparison = compare([tmp_path / "bytes", tmp_path / "bpe"])
    assert [(c.name, c.unit) for c in comparison.sets] == [("val", "bits per byte"), ("law", "bits per byte")]
    for compared, key in zip(comparison.sets, ("primary", "law"), strict=True):
        # Each run by its own texts, a document at a time.
        bits, sizes = [], []
        for m in compared.runs:
            with np.load(tmp_path / m.run / f"evals/{m.step}.npz") as file:
                texts = file[f"{key}.text"].tolist()
                bits.append(dict.fromkeys(texts, 0.0)), sizes.append(dict.fromkeys(texts, 0))
                for text, nats, num_bytes in zip(texts, file[f"{key}.nats"], file[f"{key}.bytes"], strict=True):
                    bits[-1][text] += nats / math.log(2)
                    sizes[-1][text] += num_bytes
        both = sizes[0].keys() & sizes[1].keys()
        assert len(both) >= 10 and all(sizes[0][text] == sizes[1][text] for text in both)
        delta = sum(bits[1][text] - bits[0][text] for text in both) / sum(sizes[0][text] for text in both)
        d = compared.runs[1].difference
        assert (d.num_clusters, d.delta) == (len(both), pytest.approx(delta, rel=1e-9)) and d.delta < 0
        assert d.share == sum(sizes[0][text] for text in both) / max(sum(of_run.values()) for of_run in sizes)


def test_documents_of_evals_that_do_not_tell_them_apart_are_not_guessed(tmp_path):
    told = cut_otherwise([10.0, 20.0], [20, 40], [1, 2], [1, 2])
    paths = [
        write_run(tmp_path / name, {"val": lambda step, of_run=of_run: of_run}, hashes={"val": name})
        for name, of_run in (("new", told), ("old", told._replace(text_N=None)))
    ]
    with pytest.raises(InputError, match="no eval set can be compared") as caught:
        compare(paths)
    assert "the evals of old are of a version that did not record which document is which" in caught.value.details[0]

    # Runs that tell them are compared, though one that does not comes first.
    more = cut_otherwise([11.0, 21.0], [20, 40], [1, 2], [2, 2])
    paths.append(write_run(tmp_path / "more", {"val": lambda step: more}, hashes={"val": "more"}))
    comparison = compare([paths[1], paths[0], paths[2]])
    assert [[m.run for m in c.runs] for c in comparison.sets] == [["new", "more"]] and comparison.alone == ("old",)
    assert [why.split(" measured")[0] for why in comparison.refused["val"]] == ["old and new", "old and more"]
    # Nor one that shares nothing.
    apart = cut_otherwise([11.0], [20], [5], [2])
    paths.append(write_run(tmp_path / "apart", {"val": lambda step: apart}, hashes={"val": "apart"}))
    comparison = compare([paths[3], paths[0], paths[2]])
    assert [[m.run for m in c.runs] for c in comparison.sets] == [["new", "more"]] and comparison.alone == ("apart",)
    # The last eval need not be on file if an earlier one is compared.
    (tmp_path / "new/evals/100.npz").unlink()
    assert [c.runs[1].step for c in compare([paths[0], paths[2]], at=40).sets] == [40]


def test_a_small_difference_in_bits_per_byte_could_be_another_seeds(tmp_path):
    # 0.002 nats a token between seeds are 0.002 / 4 / ln 2 = 0.00072 bits a byte, where a token has 4 bytes.
    def told(loss, text, document_tokens):
        measured = windows(loss)
        nats_N = measured.nats_N * (1 + 1e-6 * (measured.document_N % 3))
        return measured._replace(nats_N=nats_N, text_N=measured.document_N.astype(np.uint64) + text)

    def verdict(by):
        paths = [
            write_run(tmp_path / f"{name}{by}", {"val": lambda step, loss=loss: told(loss, 7, 1)}, hashes={"val": name})
            for name, loss in (("a", 3.0), ("b", 3.0 + by))
        ]
        (compared,) = compare(paths).sets
        assert compared.unit == "bits per byte"
        return compared.runs[1].verdict

    assert "another seed could reverse it" in verdict(0.005)  # 0.0018 bits, below 2 sqrt(2) x 0.00072 = 0.00204
    assert "another seed could reverse it" not in verdict(0.0063)


def test_a_name_is_said_to_be_of_those_that_measured_its_text(tmp_path):
    base = write_run(tmp_path / "base", {"val": lambda step: 3.0})
    adapted = write_run(tmp_path / "adapted", {"books": lambda step: 3.0}, hashes={"books": "hash-of-val"})
    other = write_run(tmp_path / "other", {"val": lambda step: 3.0}, hashes={"val": "other"})
    comparison = compare([base, adapted, other])
    assert [(c.title, [m.run for m in c.runs]) for c in comparison.sets] == [
        ("val (books in adapted)", ["base", "adapted"])
    ]
    assert comparison.only == {"books": ("base", "adapted")} and list(comparison.refused) == ["val"]


def test_a_text_that_counts_under_one_of_its_names_is_compared(tmp_path):
    """The namesake in the base was first measured after the adapted run began."""
    base = write_run(tmp_path / "base", {"val": lambda step: 3.0, "books": lambda step: 3.0 if step > 80 else None},
                     hashes={"books": "hash-of-val"})  # fmt: skip
    adapted = begun(tmp_path / "adapted", str(base), 80, hashes={"val": "domain", "books": "hash-of-val"}, books=2.0)
    (compared,) = compare([base, adapted]).sets
    assert [(m.set, m.step, m.loss) for m in compared.runs] == [("val", 80, 3.0), ("books", 100, 2.0)]


def test_runs_are_compared_wherever_two_measured_the_same_text(tmp_path):
    losses = {"val": lambda step: 3.0, "law": lambda step: 2.0}
    other = {"hashes": {"law": "other-law"}}
    first = write_run(tmp_path / "first", losses)
    second = write_run(tmp_path / "second", {**losses, "law": lambda step: 2.5}, **other)
    third = write_run(tmp_path / "third", {**losses, "law": lambda step: 2.25}, **other)
    comparison = compare([first, second, third])
    compared = [(c.name, c.content_hash, [m.run for m in c.runs]) for c in comparison.sets]
    assert compared[0] == ("val", "hash-of-val", ["first", "second", "third"])
    assert compared[1] == ("law", "other-law", ["second", "third"])
    assert comparison.sets[1].runs[1].difference.delta == pytest.approx(-0.25)
    assert comparison.sets[1].runs[1].difference.against == "second"
    assert [why.split(" and ")[1].split(" ")[0] for why in comparison.refused["law"]] == ["second", "third"]
    assert [m.run for m in compare([second, first, third]).sets[1].runs] == ["second", "third"]


def test_a_set_whose_content_no_record_tells_is_refused(tmp_path):
    first = write_run(tmp_path / "first", {"val": lambda step: 3.0, "added": lambda step: 2.0})
    events = first / "events.jsonl"
    begun, *rest = events.read_text().splitlines(keepends=True)
    told = json.loads(begun)
    facts = told["evalsets"].pop("added")
    events.write_text(json.dumps(told) + "\n" + "".join(rest))
    with_it = write_run(tmp_path / "second", {"val": lambda step: 3.0, "added": lambda step: 2.0})
    comparison = compare([with_it, first])
    assert [c.name for c in comparison.sets] == ["val"]
    assert comparison.refused["added"] == ("second and first: the record of first has no content hash of it",)

    twice = compare([first, first])
    assert [c.name for c in twice.sets] == ["val"] and list(twice.refused) == ["added"]

    # A `resume` event tells of the sets that were added with it.
    resumed = {**told, "event": "resume", "evalsets": {"added": facts}}
    events.write_text(json.dumps(told) + "\n" + json.dumps(resumed) + "\n" + "".join(rest))
    assert [c.name for c in compare([with_it, first]).sets] == ["val", "added"]
