"""Time an eval against the forward pass alone: what padding, sums and fetching the results cost.

    python tools/bench_eval.py [--sizes tiny medium] [--vocab-size 50257] [--json FILE]

`limit` is a jitted forward pass with its mean loss, over full micro-batches on the device: no accuracy, no sums per
window, nothing fetched. `limit, accuracy` also works out whether each target is the likeliest token, which an eval
reports too. The two `at once` reduce the logits of all ids at once instead of block by block. The eval is that of
training (`make_suite`), over sets of documents with long-tailed lengths, about 700 tokens on average. All variants take
turns in one process. `slots` are windows x seq_len, `tokens` the slots that are scored: the others are padding behind a
document's last token and in the last micro-batch of a set.

Ratios are to `limit`, from medians over the rounds. On a shared machine, trust those of processor seconds.
"""

from dataclasses import replace
from functools import partial

from results import in_turns, json_parser, report

SIZES = {  # seq_len, training batch, the `model` section
    "tiny": (128, 16, {"preset": "tiny"}),  # the quickstart's
    "medium": (256, 16, {"preset": "tiny", "n_layer": 6, "n_head": 6, "n_kv_head": 6, "d_model": 384, "d_ff": 1536}),
}
SETS = ("primary", "general", "domain", "code")


def main(argv: list[str] | None = None) -> None:
    parser = json_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny"])
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--windows", type=int, default=96, help="windows of each set")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args(argv)
    rows = [row for size in args.sizes for row in measure(size, args.vocab_size, args.windows, args.rounds)]
    report(rows, args.json, "jax")


def measure(size: str, vocab_size: int, num_windows: int, num_rounds: int) -> list[dict]:
    """A row for each limit, and one each for evals of three sets and of four."""
    from curriculum.train.device import tune_malloc

    tune_malloc()
    import jax
    import numpy as np

    from curriculum.config import build_config
    from curriculum.model.loss import score_targets
    from curriculum.model.transformer import init_params, transformer
    from curriculum.schema.adaptation import resolved_model
    from curriculum.train.compiled import make_suite
    from curriculum.train.mesh import make_mesh, place_rows, place_state

    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    seq_len, batch_size, model_section = SIZES[size]
    config = build_config(
        {
            "model": model_section,
            "sources": {"text": {"path": "text"}},
            "phases": [{"name": "all", "until": "end", "mixture": {"text": 1}}],
            "evalsets": {"primary": {"path": "text"}},
            "train": {"steps": 1, "batch_size": batch_size, "seq_len": seq_len},
        },
        check_paths=False,
    )
    mesh = make_mesh(config.mesh)
    architecture = resolved_model(config, vocab_size)
    model, params = transformer(architecture), place_state(mesh, init_params(architecture, seed=0))
    evalsets = [make_evalset(name, seed, vocab_size, seq_len, num_windows) for seed, name in enumerate(SETS)]
    suites = {n: make_suite(config, mesh, model, evalsets[:n]) for n in (3, 4)}
    num_rows = {
        n: [arrays[0].shape[0] for some in s._micro_batches.values() for arrays in some] for n, s in suites.items()
    }
    rows = num_rows[3][0]
    tokens_BT1 = np.random.default_rng(9).integers(1, vocab_size, (rows, seq_len + 1), np.int32)
    batches = [[place_rows(mesh, tokens_BT1[:, at]) for at in (slice(-1), slice(1, None))] for _ in num_rows[3]]

    def forward(model, with_accuracy, params, inputs_BT, targets_BT):
        scores = score_targets(model, params, inputs_BT, targets_BT)
        return (scores["nats"].mean(), scores["correct"].mean()) if with_accuracy else scores["nats"].mean()

    def over_batches(model, with_accuracy):
        compiled_forward = jax.jit(partial(forward, model, with_accuracy))
        return lambda: jax.block_until_ready([compiled_forward(params, *batch) for batch in batches])

    at_once = replace(model, vocab_shards=2)  # as where ids are split over devices: there are no blocks
    work = {
        "limit": over_batches(model, False),
        "limit, at once": over_batches(at_once, False),
        "limit, accuracy": over_batches(model, True),
        "limit, accuracy, at once": over_batches(at_once, True),
    }
    limits = tuple(work)
    work |= {f"eval of {n} sets": partial(suites[n].run, params) for n in suites}
    compilations = {}
    for name, run in work.items():
        compiled.clear()
        run()
        compilations[name] = len(compiled)
    compiled.clear()
    taken = in_turns(work, num_rounds)
    assert not compiled, "something was compiled while it was timed"
    slots = dict.fromkeys(limits, len(batches) * rows * seq_len)
    tokens = dict(slots)
    for n in suites:
        slots[f"eval of {n} sets"] = sum(num_rows[n]) * seq_len
        tokens[f"eval of {n} sets"] = sum(evalset.num_tokens for evalset in evalsets[:n])
    results = []
    for name in work:
        wall, cpu = np.median(taken[name], axis=0).tolist()
        limit, cpu_limit = (slots["limit"] / np.median(taken["limit"], axis=0)).tolist()
        results.append(
            {
                "size": size,
                "variant": name,
                "compilations": compilations[name],
                "slots": slots[name],
                "tokens": tokens[name],
                "ms_median": round(wall * 1e3, 2),
                "slots_per_sec": round(slots[name] / wall),
                "tokens_per_sec": round(tokens[name] / wall),
                "slots_ratio": round(slots[name] / wall / limit, 3),
                "slots_cpu_ratio": round(slots[name] / cpu / cpu_limit, 3),
                "tokens_ratio": round(tokens[name] / wall / limit, 3),
                "tokens_cpu_ratio": round(tokens[name] / cpu / cpu_limit, 3),
            }
        )
    return results


def make_evalset(name: str, seed: int, vocab_size: int, seq_len: int, num_windows: int):
    import numpy as np

    from evalsets.evalset import cut_windows

    random = np.random.default_rng(seed)
    lengths = random.lognormal(6, 1.1, max(30, num_windows)).astype(int) + 1
    documents = [random.integers(1, vocab_size, length) for length in lengths]
    return cut_windows(name, documents, np.ones(vocab_size, int), 0, seq_len, num_windows)


if __name__ == "__main__":
    main()
