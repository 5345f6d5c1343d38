"""The judge from outside: its figures are lm-eval's, ours, and their difference."""

import json
from pathlib import Path

import judge_with_lm_eval as tool
import numpy as np
import pytest
from hf_folders import write_folder
from tiny_run import tiny_train, write_corpus

from curriculum.data.tokenizers.hf_writer import write_hf_tokenizer
from curriculum.data.tokenizers.tokenizer import byte_tokenizer, load_tokenizer
from evalsets.evalset import cut_windows
from evalsets.metrics import WindowResults


class Ours:
    """Three documents of 3, 5 and 8 tokens of 2 bytes in windows of 4: the last fills two windows, the second not."""

    step = 7
    results = {
        "law": WindowResults(
            nats_N=np.array([3.0, 5.0, 1.0, 4.0, 6.0]),
            correct_N=np.zeros(5, int),
            tokens_N=np.array([3, 4, 1, 4, 4]),
            bytes_N=np.array([6, 8, 2, 8, 8]),
            document_N=np.array([0, 1, 1, 2, 2]),
        )
    }

    class law:
        seq_len, num_documents, document_N = 4, 4, np.array([0, 1, 1, 2, 2])

    evalsets = {"law": law}


def test_documents_that_are_cut_alike_are_compared_on_their_own():
    found = tool.compared(Ours, "law", {0: "a", 1: "b", 2: "c"}, {0: 3.0, 1: 5.5, 2: 10.0})
    assert (found["step"], found["seq_len"], found["left_out"]) == (7, 4, 1)
    alike, both = found["alike"], found["all"]
    # 13 nats on 22 bytes; all: 19 against 18.5 on 32. A bit is ln 2 = 0.693147 nats.
    assert (alike["documents"], alike["bytes"], alike["difference"]) == (2, 22, 0)
    assert alike["ours"] == pytest.approx(13 / (22 * 0.6931471805599453), rel=1e-12)
    assert (both["documents"], both["bytes"]) == (3, 32)
    assert both["difference"] == pytest.approx(-0.5 / (32 * 0.6931471805599453), rel=1e-9)
    assert tool.problems({"law": found}, 1e-3) == []
    lines = tool.table({"law": found})
    assert lines[2] == "| law | 2, cut alike | 22 | 0.852502 | 0.852502 | +0.0e+00 |"
    assert lines[3].startswith("| law | 3, all | 32 | 0.856") and lines[4].startswith("| law | 1 left out |")


def test_a_difference_is_told_and_so_is_that_there_is_nothing_to_compare():
    differs = tool.compared(Ours, "law", {0: "a"}, {0: 3.1})
    assert tool.problems({"law": differs}, 1e-3) == ["law: differs by +2.4e-02 bits per byte, expected at most 0.001"]
    assert tool.problems({"law": differs}, 0.03) == []
    none = tool.compared(Ours, "law", {1: "b"}, {1: 6.0})
    expected = ["law: no document is cut the same way into windows of 4 tokens: nothing to compare"]
    assert tool.problems({"law": none}, 1e-3) == expected and none["alike"]["difference"] is None
    assert tool.table({"law": none})[2] == "| law | 0, cut alike | 0 | | | |"


def test_documents_are_judged_without_the_blank_that_a_tokenizer_puts_before_them(tmp_path):
    tokenizer = load_tokenizer(write_folder("llama2", tmp_path / "folder"))
    tokenizer.save(tmp_path / "tokenizer")
    texts = ["Der Wille zur Wahrheit", " behind a blank", "na\u00efve"]
    ids = [tokenizer.encode(text) for text in texts]
    sizes = [len(text.encode()) for text in texts]
    sizes[2] += 1  # as of a text that was normalised: it is left out
    evalset = cut_windows("law", ids, tokenizer.token_bytes_V, tokenizer.bos, 4, document_bytes=sizes)
    assert tool.documents_of(tmp_path, evalset) == dict(enumerate(texts[:2]))


def test_a_set_of_which_all_documents_are_left_out_is_told(tmp_path):
    theirs = tool.judged(tmp_path, {"law": {}}, tmp_path, Ours)
    found = tool.compared(Ours, "law", {}, theirs["law"])
    assert found["left_out"] == 4 and found["all"]["documents"] == 0
    assert tool.problems({"law": found}, 1e-3) == [
        "law: no document is cut the same way into windows of 4 tokens: nothing to compare"
    ]
    assert tool.table({"law": found})[-1].startswith("| law | 4 left out |")


def test_a_run_that_is_not_there_is_told(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        tool.main([str(tmp_path / "nowhere")])
    assert ended.value.code == 2 and "holds no run" in capsys.readouterr().err


def tokenizer_that_puts_bos_before_a_text(folder: Path) -> dict:
    """The section of a config: the bytes as a tokenizer of Hugging Face, which opens each text by itself."""
    folder.mkdir()
    write_hf_tokenizer(byte_tokenizer(), folder)
    definition = json.loads((folder / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return {"kind": "hf", "path": str(folder)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte", "hf"])
def test_lm_eval_agrees_on_a_run(tmp_path, capsys, kind):
    pytest.importorskip("lm_eval")
    corpus = write_corpus(tmp_path)
    evalsets = {"seq_len": 128, "primary": {"held_out_of": "web"}, "sets": {"law": {"held_out_of": "law"}}}
    tokenizer = {"kind": "byte"} if kind == "byte" else tokenizer_that_puts_bos_before_a_text(tmp_path / "tokenizer")
    tiny_train(corpus, tmp_path / "run", evalsets=evalsets, tokenizer=tokenizer)
    arguments = [str(tmp_path / "run"), "--store-dir", str(tmp_path / "store"), "--sets", "law", "val"]
    tool.main([*arguments, "--json", str(tmp_path / "figures.json")])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures.keys() == {"law", "val"} and capsys.readouterr().out.count("cut alike") == 2
    for of_set in figures.values():
        assert of_set["step"] == 12 and of_set["left_out"] == 0 and of_set["seq_len"] == 128
        assert 0 < of_set["alike"]["documents"] < of_set["all"]["documents"]
        assert abs(of_set["alike"]["difference"]) < 1e-6 < abs(of_set["all"]["difference"])
