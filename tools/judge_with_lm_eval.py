"""Have an outside judge, lm-evaluation-harness, score an exported run, and compare its bits per byte with curriculum's.

    curriculum train CONFIG --run-dir runs/base
    make parity    # or: pip install 'curriculum[judge]'
    python tools/judge_with_lm_eval.py runs/base --sets general domain

Exports the run as a Hugging Face folder, writes the documents of each eval set and a task over them into another, runs
lm-eval on it offline (output type loglikelihood_rolling, the model in float32 through transformers), and compares bits
per byte with those of `curriculum eval`. Prints a Markdown table; exits with 1 if they differ by more than --tolerance.

What must agree for that, and how:

- The first token of a document is predicted from the token that opens documents. lm-eval uses the tokenizer's bos
  token, which is that one in an exported folder; `add_bos_token=False` keeps it from being added twice.
- lm-eval's windows have `max_length` tokens, which is set to the run's `evalsets.seq_len`. Both cut a document into
  disjoint windows of that many targets, each with the token before it as context. They differ only in a last window
  that is shorter: lm-eval fills its context up with tokens that the window before has scored, while curriculum begins
  it with one token, like every other window. So documents of at most one window, or of a multiple of it, are cut alike
  and must agree. The table also has the difference over all documents: what the longer context is worth to the model.
- The bytes are those of the document's UTF-8 text, decoded from the tokens of the set. A document whose text does not
  encode to the same tokens and bytes again, as can happen with a normalising tokenizer, is left out and counted.
"""

import json
import math
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from results import json_parser, write_json


def main(argv: list[str] | None = None) -> None:
    parser = json_parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--sets", nargs="+", metavar="NAME", help="eval sets of the run (default: all of them)")
    parser.add_argument("--step", metavar="latest|gold|STEP", help="which checkpoint (default: gold, or latest)")
    parser.add_argument("--weights", default="raw", help="raw, ema or mean:PHASE (default: raw)")
    parser.add_argument("--store-dir", type=Path, help="as in `curriculum eval`")
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, help="most bits per byte of difference (default: 0.001)"
    )
    args = parser.parse_args(argv)

    from curriculum.errors import InputError
    from curriculum.evaluate import evaluate
    from curriculum.export import export

    checkpoint = {"step": args.step, "weights": args.weights}
    stores = {} if args.store_dir is None else {"store_dir": args.store_dir}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            ours = evaluate(args.run, sets=args.sets, **checkpoint, **stores)
            folder = Path(scratch) / "exported"
            export(args.run, folder, format="hf", **checkpoint)
            documents = {name: documents_of(args.run, evalset) for name, evalset in ours.evalsets.items()}
        except InputError as error:
            parser.exit(2, f"{error}\n")
        theirs = judged(folder, documents, Path(scratch), ours)
    figures = {name: compared(ours, name, documents[name], theirs[name]) for name in documents}
    print("\n".join(table(figures)))
    write_json(args.json, figures)
    if told := problems(figures, args.tolerance):
        sys.exit("\n".join(told))


def problems(figures: dict[str, dict], tolerance: float) -> list[str]:
    """Why the two results cannot be said to agree, one message per set; empty if they agree."""
    told = []
    for name, of_set in figures.items():
        alike = of_set["alike"]
        if not alike["documents"]:
            told.append(
                f"{name}: no document is cut the same way into windows of {of_set['seq_len']} tokens: nothing to "
                "compare"
            )
        elif not abs(alike["difference"]) <= tolerance:
            told.append(f"{name}: differs by {alike['difference']:+.1e} bits per byte, expected at most {tolerance:g}")
    return told


def documents_of(run: Path, evalset) -> dict[int, str]:
    """The text of each document of a set, by its number; without those whose tokens do not round-trip exactly."""
    from curriculum.data.tokenizers.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(run / "tokenizer")
    texts = {}
    for document in range(evalset.num_documents):
        rows = evalset.document_N == document
        scored_NT = evalset.scored_NT[rows]
        ids = evalset.tokens_NT1[rows][:, 1:][scored_NT]
        text = tokenizer.decode_bytes(ids, opens_document=True).decode(errors="replace")
        size = int(evalset.num_bytes_N[rows].sum())
        if len(text.encode()) == size and np.array_equal(tokenizer.encode(text), ids):
            texts[document] = text
    return texts


def judged(folder: Path, documents: dict, scratch: Path, ours) -> dict[str, dict[int, float]]:
    """The nats that lm-eval gives each document of each set."""
    if not any(documents.values()):
        return {name: {} for name in documents}
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    seq_len = {evalset.seq_len for evalset in ours.evalsets.values()}
    model = HFLM(
        pretrained=str(folder),
        dtype="float32",
        device="cuda" if torch.cuda.is_available() else "cpu",
        max_length=seq_len.pop(),
        batch_size=16,
        add_bos_token=False,
    )
    tasks = {f"curriculum_{name}": name for name, texts in documents.items() if texts}
    for task, name in tasks.items():
        write_task(scratch / "tasks", task, documents[name], scratch / "cache")
    manager = TaskManager(include_path=str(scratch / "tasks"), include_defaults=False)
    found = simple_evaluate(model, tasks=list(tasks), task_manager=manager, log_samples=True, bootstrap_iters=0)
    nats: dict[str, dict[int, float]] = {name: {} for name in documents}
    for task, samples in found["samples"].items():
        nats[tasks[task]] = {sample["doc"]["document"]: -float(sample["bits_per_byte"][0]) for sample in samples}
    return nats


def write_task(folder: Path, task: str, documents: dict[int, str], cache: Path) -> None:
    """Write an lm-eval task that scores each document whole."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / f"{task}.jsonl"
    rows = ({"document": number, "text": text} for number, text in documents.items())
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    described = {
        "task": task,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(cache)},
        "test_split": "test",
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    (folder / f"{task}.yaml").write_text(json.dumps(described, indent=2) + "\n")  # JSON is YAML


def compared(ours, name: str, documents: dict[int, str], their_nats: dict[int, float]) -> dict:
    """Bits per byte of curriculum and of lm-eval, over all documents and over those that both cut alike."""
    results, seq_len = ours.results[name], ours.evalsets[name].seq_len
    rows = []  # tokens, bytes, our nats, their nats
    for document in documents:
        of = ours.evalsets[name].document_N == document
        sums = (array[of].sum() for array in (results.tokens_N, results.bytes_N, results.nats_N))
        rows.append((*sums, their_nats[document]))
    tokens_D, bytes_D, ours_D, theirs_D = np.array(rows, np.float64).reshape(-1, 4).T
    alike_D = (tokens_D <= seq_len) | (tokens_D % seq_len == 0)

    def bits_per_byte(of_D: np.ndarray) -> dict:
        size = math.log(2) * bytes_D[of_D].sum()
        if not size:
            return {"documents": 0, "bytes": 0, "ours": None, "lm_eval": None, "difference": None}
        mine, its = (float(nats_D[of_D].sum() / size) for nats_D in (ours_D, theirs_D))
        figures = {"ours": mine, "lm_eval": its, "difference": its - mine}
        return {"documents": int(of_D.sum()), "bytes": int(bytes_D[of_D].sum()), **figures}

    left_out = ours.evalsets[name].num_documents - len(documents)
    both = {"alike": bits_per_byte(alike_D), "all": bits_per_byte(np.ones_like(alike_D))}
    return {"step": ours.step, "seq_len": seq_len, "left_out": left_out, **both}


def table(figures: dict[str, dict]) -> list[str]:
    lines = ["| eval set | documents | bytes | ours | lm-eval | difference |", "|---|---|---:|---:|---:|---:|"]
    for name, of_set in figures.items():
        for key, what in (("alike", "cut alike"), ("all", "all")):
            found = of_set[key]
            if not found["documents"]:
                lines.append(f"| {name} | 0, {what} | 0 | | | |")
                continue
            numbers = f"{found['ours']:.6f} | {found['lm_eval']:.6f} | {found['difference']:+.1e}"
            lines.append(f"| {name} | {found['documents']:,}, {what} | {found['bytes']:,} | {numbers} |")
        if of_set["left_out"]:
            lines.append(f"| {name} | {of_set['left_out']:,} left out | | | | |")
    return lines


if __name__ == "__main__":
    main()
