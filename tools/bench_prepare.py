"""Time the preparing of text, JSONL, parquet and arrow against tiktoken's own rates, and measure its peak memory.

    python tools/bench_prepare.py [--megabytes N] [--json FILE]

The corpus is the modules of Python's standard library, cut into documents of about 4,000 characters, shuffled with a
fixed seed and repeated to N megabytes. The tokenizer is 4,096 byte pairs trained on the corpus. Each format is prepared
into a new store: reading, hashing, encoding, writing, checksums and the reading back that verifies them. The rows take
turns; each is the median of its rounds.

`one thread` is encode_to_numpy, document by document, in one thread; the first ratio is to its rate times the cores.
`processes` is the same in one process per core at once, each with its share of the documents: what the cores can do,
as they share caches and clocks; the second ratio is to its rate. `all threads` is encode_ordinary_batch with one thread
per core, what a user of tiktoken would call; the third ratio is to its rate. `x_cpu` compares bytes per second of
processor time with those of `one thread`: what a row costs beyond encoding, however busy the machine is.
Memory: the peak of a process that prepares N/2 megabytes, and of one that prepares 2N.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from results import in_turns, json_parser, report

from curriculum.data.prepare import prepare_store
from curriculum.data.sources import SourceConfig
from curriculum.data.tokenizers.tokenizer import END_OF_TEXT, NUM_THREADS, Tokenizer, load_tokenizer
from curriculum.data.tokenizers.vocabulary import train_bpe

FORMATS = ("text", "jsonl", "parquet", "arrow")
DOCUMENT_CHARACTERS, FILES, ROUNDS = 4000, 8, 3


def read_documents() -> list[str]:
    """The standard library as shuffled documents."""
    documents = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace").replace("\0", "")
            documents += [text[i : i + DOCUMENT_CHARACTERS] for i in range(0, len(text), DOCUMENT_CHARACTERS)]
    order = np.random.default_rng(0).permutation(len(documents))
    return [documents[i] for i in order]


def repeat(documents: list[str], megabytes: float) -> list[str]:
    out, left = [], megabytes * 1e6
    while left > 0:
        for document in documents:
            out.append(document)
            left -= len(document.encode())
            if left <= 0:
                break
    return out


def write_corpus(documents: list[str], folder: Path) -> None:
    """Write the documents in each format: plain text as 8 files, the other formats as one file each."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in FORMATS:
        (folder / name).mkdir(parents=True)
    for i in range(FILES):
        (folder / "text" / f"{i}.txt").write_text("\n".join(documents[i::FILES]), encoding="utf-8")
    with open(folder / "jsonl" / "rows.jsonl", "w", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(documents))
    table = pa.table({"id": range(len(documents)), "text": documents})
    pq.write_table(table, folder / "parquet" / "rows.parquet", row_group_size=1000)
    with pa.OSFile(str(folder / "arrow" / "rows.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)


def prepare(source: Path, tokenizer: Tokenizer) -> None:
    with tempfile.TemporaryDirectory() as store_dir:
        prepare_store("bench", SourceConfig(path=str(source)), tokenizer, store_dir)


def tiktoken_encoding(tokenizer: Tokenizer):
    import tiktoken

    ranks = {token: token_id for token_id, token in enumerate(tokenizer.tokens) if token}
    return tiktoken.Encoding(
        "bench", pat_str=tokenizer.pattern, mergeable_ranks=ranks, special_tokens=tokenizer.special_tokens
    )


def measure_rates(
    documents: list[str], tokenizer: Tokenizer, folder: Path
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of text per second and per processor second, by row: medians of rounds in which the rows take turns."""
    encoding = tiktoken_encoding(tokenizer)
    num_bytes = sum(len(document.encode()) for document in documents)

    def one_thread():
        for document in documents:
            encoding.encode_to_numpy(document, disallowed_special=())

    def all_threads():
        encoding.encode_ordinary_batch(documents, num_threads=NUM_THREADS)

    def encode(part: int) -> None:
        for document in documents[part::NUM_THREADS]:
            encoding.encode_to_numpy(document, disallowed_special=())

    rows = {
        "one thread": one_thread,
        "processes": lambda: in_processes(encode),
        "all threads": all_threads,
        **{name: partial(prepare, folder / name, tokenizer) for name in FORMATS},
    }
    taken = in_turns(rows, ROUNDS)  # the first round imports libraries and fills the disk's cache
    rates = {name: num_bytes / np.median(times, axis=0) for name, times in taken.items()}
    return tuple({name: float(of[i]) for name, of in rates.items()} for i in range(2))


def in_processes(work: Callable[[int], None]) -> None:
    """Run `work` on each core's part, in one process per core at once."""
    for part in range(NUM_THREADS):
        if os.fork() == 0:
            work(part)
            os._exit(0)
    for _ in range(NUM_THREADS):
        os.wait()


def peak_memory_mb(source: Path, tokenizer_dir: Path) -> int:
    """Peak memory of preparing in a new process, libraries and tokenizer included."""
    command = [sys.executable, __file__, "--weigh", str(source), str(tokenizer_dir)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return round(int(told.split()[-1]) / 1e6)


def weigh(source: str, tokenizer_dir: str) -> None:
    prepare(Path(source), load_tokenizer(tokenizer_dir))
    # Not ru_maxrss, which starts from the memory of the parent when it forked.
    status = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")))


def main():
    parser = json_parser(__doc__)
    parser.add_argument("--megabytes", type=float, default=16)
    parser.add_argument("--weigh", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.weigh:
        weigh(*args.weigh)
        return
    documents = [text for text in read_documents() if text.strip() and END_OF_TEXT not in text]
    tokenizer = train_bpe(repeat(documents, 4), 4096)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        tokenizer.save(folder / "tokenizer")
        measured = repeat(documents, args.megabytes)
        write_corpus(measured, folder / "rates")
        rates, cpu_rates = measure_rates(measured, tokenizer, folder / "rates")
        sizes = (args.megabytes / 2, args.megabytes * 2)
        for size in sizes:
            write_corpus(repeat(documents, size), folder / f"{size:g}")
        peaks = {
            name: [peak_memory_mb(folder / f"{size:g}" / name, folder / "tokenizer") for size in sizes]
            for name in FORMATS
        }
    limit = rates["one thread"] * NUM_THREADS
    rows = [
        {
            "what": name,
            "MB_per_s": round(rate / 1e6, 2),
            "x_one_thread_times_cores": round(rate / limit, 3),
            "x_processes": round(rate / rates["processes"], 3),
            "x_all_threads": round(rate / rates["all threads"], 3),
            "x_cpu": round(cpu_rates[name] / cpu_rates["one thread"], 3),
            **{f"peak_MB_of_{size:g}": peak for size, peak in zip(sizes, peaks.get(name, (None, None)), strict=True)},
        }
        for name, rate in rates.items()
    ]
    report(rows, args.json, "tiktoken", vocab_size=tokenizer.vocab_size, documents=len(measured))


if __name__ == "__main__":
    main()
