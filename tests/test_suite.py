"""The compiled pass: against a float64 loop over documents, and what its results must not depend on."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evalsets.evalset import cut_windows
from evalsets.metrics import summarise
from evalsets.suite import Suite, _sum_pairwise, summed_by_window

EOT, VOCAB_SIZE, WIDTH, SEQ_LEN = 0, 17, 8, 12
TOKEN_BYTES_V = np.array([0, *range(1, VOCAB_SIZE)])


def tiny_params():
    rng = np.random.default_rng(1)
    shapes = {"embed_VD": (VOCAB_SIZE, WIDTH), "context_DD": (WIDTH, WIDTH), "head_DV": (WIDTH, VOCAB_SIZE)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def tiny_scores(params, inputs_BT, targets_BT):
    """A causal model: the last token and the mean of all so far in the window."""
    embedded_BTD = params["embed_VD"][inputs_BT]
    mean_BTD = jnp.cumsum(embedded_BTD, axis=1) / jnp.arange(1, inputs_BT.shape[1] + 1)[:, None]
    logits_BTV = jnp.tanh(embedded_BTD + mean_BTD @ params["context_DD"]) @ params["head_DV"]
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
    nats_BT = jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT
    return {"nats": nats_BT, "correct": jnp.argmax(logits_BTV, axis=-1) == targets_BT}


def tiny_documents(seed, num_documents):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB_SIZE, length) for length in rng.integers(1, 60, num_documents)]


def tiny_evalset(name, seed, num_documents):
    return cut_windows(name, tiny_documents(seed, num_documents), TOKEN_BYTES_V, EOT, SEQ_LEN)


def four_evalsets():
    return [tiny_evalset(name, seed, n) for seed, (name, n) in enumerate(dict(a=30, b=5, c=1, d=25).items())]


def assert_equal(got, expected):
    assert len(expected.nats_N) > 0 and np.all(expected.nats_N > 0)
    for field, array in expected._asdict().items():
        assert np.array_equal(getattr(got, field), array), field


def traced(traces, score=tiny_scores):
    """Scores that note the shapes of each tracing."""

    def scores(params, inputs_BT, targets_BT):
        traces.append((inputs_BT.shape, targets_BT.shape))
        return score(params, inputs_BT, targets_BT)

    return scores


def loop_over_tokens(documents, scored=None):
    """Per document, in float64, a token at a time: (nats, correct, tokens, bytes); all are scored, or those of masks."""
    params = {name: array.astype(np.float64) for name, array in tiny_params().items()}
    rows = []
    for i, document in enumerate(documents):
        nats = correct = 0
        prefixed = [EOT, *document.tolist()]
        targets = np.arange(len(document)) if scored is None else np.flatnonzero(scored[i])
        for t in targets.tolist():
            target = document[t]
            context = params["embed_VD"][prefixed[t - t % SEQ_LEN : t + 1]]
            hidden = np.tanh(context[-1] + context.mean(axis=0) @ params["context_DD"])
            logits = hidden @ params["head_DV"]
            nats += math.log(sum(math.exp(x) for x in logits)) - logits[target]
            correct += int(np.argmax(logits) == target)
        rows.append((nats, correct, len(targets), int(TOKEN_BYTES_V[document[targets]].sum())))
    return np.array(rows).T


def test_progress_is_told_in_windows_and_changes_nothing():
    evalsets = [*four_evalsets(), replace(four_evalsets()[3], name="again")]
    suite, told = Suite(evalsets, tiny_scores, micro_batch_size=4), []
    results = suite.run(tiny_params(), progress=lambda done, total: told.append((done, total)))
    sizes = [evalset.num_windows for evalset in four_evalsets()]  # one content is measured once
    batches = [min(4, size - start) for size in sizes for start in range(0, size, 4)]
    waited_for = [*(sum(batches[: max(i - 1, 0)]) for i in range(len(batches))), sum(sizes)]  # two are under way
    assert set(batches) > {4} and told == [(windows, sum(sizes)) for windows in waited_for]
    for name, expected in suite.run(tiny_params()).items():
        assert_equal(results[name], expected)


def test_equals_a_float64_loop():
    documents = tiny_documents(seed=3, num_documents=30)
    evalset = cut_windows("set", documents, TOKEN_BYTES_V, EOT, SEQ_LEN)
    results = Suite([evalset], tiny_scores, micro_batch_size=4).run(tiny_params())["set"]
    nats_D, correct_D, tokens_D, bytes_D = loop_over_tokens(documents)

    assert np.bincount(results.document_N, results.nats_N) == pytest.approx(nats_D, rel=2e-6)
    assert np.bincount(results.document_N, results.correct_N).tolist() == correct_D.tolist()
    assert results.nats_N.dtype == np.float64
    summary = summarise(results)
    loss = sum(nats_D) / sum(tokens_D)
    variance = 30 / 29 * sum((n - loss * t) ** 2 for n, t in zip(nats_D, tokens_D, strict=True)) / sum(tokens_D) ** 2
    # float32 logits and logsumexp: parts in 1e7 of each token's nats.
    assert summary.loss == pytest.approx(loss, rel=1e-6)
    assert summary.bpb == pytest.approx(sum(nats_D) / sum(bytes_D) / math.log(2), rel=1e-6)
    assert summary.accuracy == sum(correct_D) / sum(tokens_D)
    assert summary.sem == pytest.approx(math.sqrt(variance), rel=1e-5)
    assert summary.clusters == "documents"


def answers_of(documents, seed):
    """Documents with stretches of them scored: (documents, masks)."""
    rng = np.random.default_rng(seed)
    return documents, [np.repeat(rng.random(len(d) // 7 + 1) < 0.4, 7)[: len(d)] for d in documents]


def test_answers_equal_a_float64_loop():
    documents, scored = answers_of(tiny_documents(seed=3, num_documents=30), seed=1)
    evalset = cut_windows("set", documents, TOKEN_BYTES_V, EOT, SEQ_LEN, scored=scored)
    assert 0 < evalset.num_windows < cut_windows("set", documents, TOKEN_BYTES_V, EOT, SEQ_LEN).num_windows
    nats, correct, tokens, num_bytes = loop_over_tokens(documents, scored).sum(axis=1)
    assert 100 < tokens < sum(map(len, documents))
    results = Suite([evalset], tiny_scores, micro_batch_size=4).run(tiny_params())["set"]
    summary = summarise(results)
    assert (results.tokens_N.sum(), results.bytes_N.sum()) == (tokens, num_bytes)
    assert summary.loss == pytest.approx(nats / tokens, rel=1e-6)
    assert summary.bpb == pytest.approx(nats / num_bytes / math.log(2), rel=1e-6)
    assert summary.accuracy == correct / tokens


def test_a_set_of_answers_changes_nothing_for_the_others_and_traces_nothing_anew():
    documents, scored = answers_of(tiny_documents(seed=3, num_documents=30), seed=1)
    answers = cut_windows("answers", documents, TOKEN_BYTES_V, EOT, SEQ_LEN, scored=scored)
    alone = Suite(four_evalsets(), tiny_scores, micro_batch_size=8).run(tiny_params())
    suite = Suite([answers, *four_evalsets()], tiny_scores, micro_batch_size=8)
    together = suite.run(tiny_params())
    assert suite._sum_windows._cache_size() == 1
    for name, expected in alone.items():
        assert_equal(together[name], expected)


def test_independent_of_set_order_and_of_other_sets():
    evalsets = four_evalsets()
    params = tiny_params()
    suite = Suite(evalsets, tiny_scores, micro_batch_size=8)
    together = suite.run(params)
    assert list(together) == ["a", "b", "c", "d"]
    backwards = Suite(evalsets[::-1], tiny_scores, micro_batch_size=8).run(params)
    assert list(backwards) == ["d", "c", "b", "a"]
    for name in together:
        assert_equal(backwards[name], together[name])
        assert_equal(suite.run(params, [name])[name], together[name])
    alone = Suite(evalsets[1:2], tiny_scores, micro_batch_size=8).run(params)
    assert_equal(alone["b"], together["b"])


@pytest.fixture(scope="module")
def micro_batches_of_16():
    return Suite(four_evalsets(), tiny_scores, micro_batch_size=16).run(tiny_params())


@pytest.mark.parametrize("micro_batch_size", [1, 7, 32])
def test_independent_of_micro_batch_size(micro_batches_of_16, micro_batch_size):
    results = Suite(four_evalsets(), tiny_scores, micro_batch_size=micro_batch_size).run(tiny_params())
    assert len(results) == 4
    for name, expected in micro_batches_of_16.items():
        assert results[name].nats_N == pytest.approx(expected.nats_N, rel=1e-6)
        assert results[name].correct_N.tolist() == expected.correct_N.tolist()
        assert summarise(results[name]).loss == pytest.approx(summarise(expected).loss, rel=1e-6)


EIGHT_DEVICES = """
import jax
jax.config.update("jax_num_cpu_devices", 8)
import json
import numpy as np
import test_suite as here
from evalsets.suite import Suite

mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
placed = []

def put(array):
    placed.append(jax.device_put(array, rows))
    return placed[-1]

suite = Suite(here.four_evalsets(), here.tiny_scores, 16, put, results_sharding=everywhere)
params = jax.device_put(here.tiny_params(), everywhere)
results = suite.run(params)
sums = [s for batches in suite._micro_batches.values() for s in suite._sum_windows(params, *batches[0]).values()]
print(json.dumps({
    "devices": min(len(array.sharding.device_set) for array in placed),
    "num_programs": suite._sum_windows._cache_size(),
    "sums_everywhere": [array.is_fully_replicated for array in sums],
    "nats": {name: r.nats_N.tolist() for name, r in results.items()},
}))
"""


def test_independent_of_device_count(micro_batches_of_16):
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), str(here)]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", EIGHT_DEVICES], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    sharded = json.loads(done.stdout)
    assert (sharded["devices"], sharded["num_programs"]) == (8, 1)
    assert len(sharded["sums_everywhere"]) >= 8 and all(sharded["sums_everywhere"])
    assert list(sharded["nats"]) == list(micro_batches_of_16) == ["a", "b", "c", "d"]
    for name, results in micro_batches_of_16.items():
        assert sharded["nats"][name] == pytest.approx(results.nats_N.tolist(), rel=1e-6)


def test_traced_once_over_four_sets_and_several_evals():
    traces = []
    suite = Suite(four_evalsets(), traced(traces), micro_batch_size=8)
    assert not traces
    first = suite.run(tiny_params())
    second = suite.run({name: array * 2 for name, array in tiny_params().items()})
    suite.run(tiny_params(), ["c"])
    assert traces == [((8, SEQ_LEN), (8, SEQ_LEN))]
    assert summarise(first["a"]).loss != summarise(second["a"]).loss


def test_another_function_over_the_same_windows():
    placed, traces = [], []

    def put(array):
        placed.append(array)
        return jax.device_put(array)

    def halved(*arguments):
        scores = tiny_scores(*arguments)
        return scores | {"nats": scores["nats"] / 2}

    suite = Suite(four_evalsets(), tiny_scores, micro_batch_size=8, put=put)
    num_placed = len(placed)
    expected = suite.run(tiny_params())
    other = suite.using(summed_by_window(traced(traces, halved)))
    assert not traces
    found, again = other.run(tiny_params()), other.run(tiny_params(), ["b"])
    assert (len(traces), len(placed)) == (1, num_placed)
    assert list(found) == list(expected) == ["a", "b", "c", "d"]
    for name, results in expected.items():  # halving is exact
        assert_equal(found[name], results._replace(nats_N=results.nats_N / 2))
    assert_equal(again["b"], found["b"])
    assert_equal(suite.run(tiny_params())["a"], expected["a"])
    assert suite._sum_windows._cache_size() == 1


def test_compiled_before_there_are_parameters():
    evalsets, traces = four_evalsets(), []
    expected = Suite(evalsets, tiny_scores, 16).run(tiny_params())
    suite = Suite(evalsets, traced(traces), 16)
    suite.compile(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny_params()))
    assert len(traces) == 1
    results = suite.run(tiny_params())
    for name in expected:
        assert_equal(results[name], expected[name])
    assert len(traces) == 1
    with pytest.raises(TypeError, match="float32.*float16"):  # nothing is compiled for others behind one's back
        suite.run(jax.tree.map(np.float16, tiny_params()))


def test_one_text_under_two_names_is_measured_once():
    a, b, *_ = four_evalsets()
    calls = []

    def counted(params, tokens_BT1, scored_BT):
        calls.append(tokens_BT1)
        return measure(params, tokens_BT1, scored_BT)

    suite = Suite([a, replace(a, name="again"), b], tiny_scores, micro_batch_size=8)
    measure, suite._sum_windows = suite._sum_windows, counted
    results = suite.run(tiny_params())
    assert list(results) == ["a", "again", "b"]
    assert_equal(results["again"], results["a"])
    assert len(calls) == -(-a.num_windows // 8) + -(-b.num_windows // 8)
    calls.clear()
    assert_equal(suite.run(tiny_params(), ["again"])["again"], results["a"])
    assert len(calls) == -(-a.num_windows // 8)


def test_the_results_tell_the_copies_of_a_document():
    documents = tiny_documents(seed=3, num_documents=25)
    evalset = cut_windows("a", [*documents, *documents[:4] * 5], TOKEN_BYTES_V, EOT, SEQ_LEN)
    once = cut_windows("b", documents, TOKEN_BYTES_V, EOT, SEQ_LEN)
    results = Suite([evalset, once], tiny_scores).run(tiny_params())
    assert results["b"].document_N.tolist() == once.document_N.tolist()
    document_N, repeated_N = results["a"].document_N, ~results["a"].document_N[once.num_windows :]
    assert document_N[: once.num_windows].tolist() == once.document_N.tolist()
    assert repeated_N.tolist() == np.tile(np.flatnonzero(once.document_N < 4), 5).tolist()
    for field in ("nats_N", "tokens_N", "bytes_N"):
        of_windows = getattr(results["a"], field)
        assert np.allclose(of_windows[once.num_windows :], of_windows[repeated_N], rtol=1e-6)


def test_padding_never_matters():
    evalset = tiny_evalset("set", seed=5, num_documents=20)
    padding_NT = np.arange(SEQ_LEN) >= evalset.num_tokens_N[:, None]
    filled_NT1 = evalset.tokens_NT1.copy()
    filled_NT1[:, 1:][padding_NT] = np.random.default_rng(0).integers(1, VOCAB_SIZE, padding_NT.sum())
    assert padding_NT.sum() > 50
    expected = Suite([evalset], tiny_scores, micro_batch_size=8).run(tiny_params())["set"]
    filled = Suite([replace(evalset, tokens_NT1=filled_NT1)], tiny_scores, micro_batch_size=8)
    assert_equal(filled.run(tiny_params())["set"], expected)


def test_nan_in_the_padding_stays_there_and_a_scored_nan_shows():
    def nan_at_padding(params, inputs_BT, targets_BT):
        scores = tiny_scores(params, inputs_BT, targets_BT)
        return scores | {"nats": jnp.where(targets_BT == params["broken_id"], jnp.nan, scores["nats"])}

    evalset = tiny_evalset("set", seed=5, num_documents=20)
    suite = Suite([evalset], nan_at_padding, micro_batch_size=8)
    results = suite.run(tiny_params() | {"broken_id": np.int32(EOT)})["set"]
    assert_equal(results, Suite([evalset], tiny_scores, micro_batch_size=8).run(tiny_params())["set"])
    broken = suite.run(tiny_params() | {"broken_id": np.int32(3)})["set"]
    holds_3 = np.any(evalset.tokens_NT1[:, 1:] == 3, axis=1)
    assert 0 < holds_3.sum() < len(holds_3)
    assert np.array_equal(np.isnan(broken.nats_N), holds_3)


@pytest.mark.parametrize("gives", [lambda scores: tuple(scores.values()), lambda scores: {"nats": scores["nats"]},
                                   lambda scores: scores | {"another": scores["correct"]}])  # fmt: skip
def test_scores_that_no_results_have_are_told(gives):
    suite = Suite(four_evalsets(), lambda *arguments: gives(tiny_scores(*arguments)))
    with pytest.raises(
        ValueError, match="score_targets gave .*, expected a dict of nats, correct.*; for another score"
    ):
        suite.run(tiny_params())


def test_no_names_no_work():
    suite = Suite(four_evalsets(), tiny_scores)
    assert suite.run(tiny_params(), []) == {}
    assert suite._sum_windows._cache_size() == 0
    assert list(suite.run(tiny_params(), ["d", "b"])) == ["d", "b"]


@pytest.mark.parametrize("length", [1, 2, 3, 1000, 1024])
def test_sum_within_its_stated_error(length):
    terms_BT = np.random.default_rng(length).exponential(3.0, (5, length)).astype(np.float32)
    exact_B = [math.fsum(row) for row in terms_BT.tolist()]
    bound = math.ceil(math.log2(length)) * 2.0**-24
    assert np.asarray(jax.jit(_sum_pairwise)(terms_BT)) == pytest.approx(exact_B, rel=bound, abs=0)


def test_errors():
    evalset = tiny_evalset("set", seed=0, num_documents=3)
    longer = cut_windows("longer", tiny_documents(0, 3), TOKEN_BYTES_V, EOT, SEQ_LEN + 1)
    with pytest.raises(ValueError, match=r"different seq_len \(set 12, longer 13\)"):
        Suite([evalset, longer], tiny_scores)
    with pytest.raises(ValueError, match="expected each name once"):
        Suite([evalset, evalset], tiny_scores)
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        Suite([evalset], tiny_scores, micro_batch_size=0)
    with pytest.raises(ValueError, match=r"no eval set 'sett' in the suite \(sets: set\)"):
        Suite([evalset], tiny_scores).run(tiny_params(), ["sett"])
