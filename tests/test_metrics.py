"""Sums to metrics; the standard error against a hand-worked example and a bootstrap, quantiles against tables."""

import math

import numpy as np
import pytest

from evalsets.metrics import (
    WindowResults,
    clustered_ratio,
    clusters,
    difference_of_recipes,
    paired_by_text,
    paired_difference,
    student_quantile,
    summarise,
)


def results(nats, tokens, document, correct=None, num_bytes=None):
    zeros = [0] * len(nats)
    return WindowResults(
        nats_N=np.array(nats, np.float64),
        correct_N=np.array(zeros if correct is None else correct, np.int64),
        tokens_N=np.array(tokens, np.int64),
        bytes_N=np.array(tokens if num_bytes is None else num_bytes, np.int64),
        document_N=np.array(document, np.int64),
    )


def test_three_documents_by_hand():
    # Loss 24 / 12 = 2. u = (3 - 2*2) + (5 - 2*2), 10 - 2*4, 6 - 2*4 = 0, 2, -2 over the three documents.
    # SE^2 = 3/2 * (0 + 4 + 4) / 12^2 = 12 / 144. Taken a window at a time it would be 4/3 * 10 / 144.
    summary = summarise(
        results([3, 5, 10, 6], [2, 2, 4, 4], [0, 0, 1, 2], correct=[1, 0, 2, 0], num_bytes=[4, 4, 8, 8])
    )
    assert summary.loss == 2.0
    assert summary.perplexity == pytest.approx(math.e**2, rel=1e-15)
    assert summary.bpb == pytest.approx(1 / math.log(2), rel=1e-15)  # 24 nats in 24 bytes
    assert summary.accuracy == 0.25
    assert summary.sem == pytest.approx(math.sqrt(1 / 12), rel=1e-15)
    assert summary.clusters == "documents"


def test_two_documents_by_hand():
    # Loss 8 / 4 = 2, u = 3 - 2*2, 5 - 2*2 = -1, 1. SE^2 = 2/1 * 2 / 4^2.
    summary = summarise(results([3, 5], [2, 2], [0, 1]))
    assert (summary.loss, summary.sem, summary.clusters) == (2.0, 0.5, "documents")


def test_means_are_over_tokens_not_over_windows():
    # A mean of the windows' means would be (1 + 3) / 2.
    assert summarise(results([9, 3], [9, 1], [0, 1])).loss == 1.2


def test_sem_agrees_with_a_bootstrap_over_documents():
    rng = np.random.default_rng(0)
    num_documents = 300
    windows_D = rng.integers(1, 6, num_documents)
    document_N = np.repeat(np.arange(num_documents), windows_D)
    tokens_N = rng.integers(1, 65, len(document_N))
    difficulty_D = rng.normal(3.0, 0.5, num_documents)
    nats_N = tokens_N * (difficulty_D[document_N] + rng.normal(0, 0.2, len(document_N)))
    summary = summarise(results(nats_N, tokens_N, document_N))

    nats_D = np.array([sum(nats_N[document_N == d]) for d in range(num_documents)])
    tokens_D = np.array([sum(tokens_N[document_N == d]) for d in range(num_documents)])
    drawn = rng.integers(0, num_documents, (4000, num_documents))
    bootstrap = np.std(nats_D[drawn].sum(axis=1) / tokens_D[drawn].sum(axis=1), ddof=1)
    assert summary.clusters == "documents"
    assert summary.sem == pytest.approx(bootstrap, rel=0.1)
    # Windows of a document are alike here: as if independent, the error would be a good deal too small.
    assert clustered_ratio(nats_N, tokens_N, np.arange(len(nats_N)))[1] < 0.8 * bootstrap


def test_clusters_are_documents_from_twenty_on():
    document_N = np.repeat(np.arange(20), 3)
    cluster_N, kind = clusters(document_N)
    assert kind == "documents" and cluster_N.tolist() == document_N.tolist()
    cluster_N, kind = clusters(np.repeat(np.arange(0, 200, 10), 3))
    assert kind == "documents" and cluster_N.tolist() == document_N.tolist()


def test_clusters_of_few_documents_are_twenty_blocks():
    cluster_N, kind = clusters(np.repeat(np.arange(19), [32] + [1] * 18))  # 50 windows
    assert kind == "blocks"
    assert cluster_N.tolist() == sorted(cluster_N)
    assert np.bincount(cluster_N).tolist() == [3, 2] * 10
    cluster_N, kind = clusters(np.zeros(20, int))
    assert kind == "blocks" and cluster_N.tolist() == list(range(20))


@pytest.mark.parametrize(
    "num_documents, num_windows, num", [(1, 1, 1), (5, 19, 5), (5, 20, 20), (19, 60, 20), (20, 60, 20), (21, 21, 21)]
)
def test_the_number_of_clusters(num_documents, num_windows, num):
    document_N = np.minimum(np.arange(num_windows), num_documents - 1)
    assert clusters(document_N)[0].max() + 1 == num


def test_blocks_by_hand():
    # One document, 20 windows of 1 token, half at 1 nat and half at 3: u = -+1, SE^2 = 20/19 * 20 / 20^2.
    summary = summarise(results([1, 3] * 10, [1] * 20, [0] * 20))
    assert summary.clusters == "blocks"
    assert summary.sem == pytest.approx(math.sqrt(1 / 19), rel=1e-15)


def test_copies_of_a_document_are_one_cluster():
    # Documents of 2, 1 and 1 windows; the first stands three times and the last twice.
    document = [0, 0, 1, ~0, ~1, 2, ~0, ~1, ~5]
    cluster_N, kind = clusters(np.array(document))
    assert kind == "documents" and cluster_N.tolist() == [0, 0, 1, 0, 0, 2, 0, 0, 2]
    # Loss 32 / 16 = 2. u = 3 * (3 - 2*2 + 5 - 2*2) = 0, 1 - 2*2 = -3, 2 * (3.5 - 2*1) = 3.
    nats, tokens = [3, 5, 1, 3, 5, 3.5, 3, 5, 3.5], [2, 2, 2, 2, 2, 1, 2, 2, 1]
    summary = summarise(results(nats, tokens, document))
    assert (summary.loss, summary.clusters) == (2.0, "documents")
    assert summary.sem == pytest.approx(math.sqrt(3 / 2 * (9 + 9)) / 16, rel=1e-15)
    assert summarise(results([1.0, 1.0], [1, 1], [0, ~0])).sem is None


def test_blocks_are_of_distinct_windows_and_hold_their_copies():
    document = np.repeat([0, 1], [30, 20])
    first_N, kind = clusters(document)
    assert kind == "blocks" and np.bincount(first_N).tolist() == [3, 2] * 10
    # The second document again, before and after the first: as many blocks, of the same windows.
    copied = np.concatenate([np.full(20, 1), np.full(30, 0), ~np.arange(20)])
    cluster_N, kind = clusters(copied)
    assert kind == "blocks" and cluster_N[:50].tolist() == first_N.tolist()
    assert cluster_N[50:].tolist() == first_N[:20].tolist()
    # 30 windows of which 10 are distinct are too few for blocks.
    cluster_N, kind = clusters(np.concatenate([np.repeat([0, 1], 5), np.tile(~np.arange(10), 2)]))
    assert kind == "documents" and cluster_N.tolist() == ([0] * 5 + [1] * 5) * 3


def test_one_cluster_has_no_standard_error():
    summary = summarise(results([1.0, 3.0], [1, 1], [0, 0]))
    assert (summary.sem, summary.clusters, summary.loss) == (None, "documents", 2.0)


def test_equal_windows_have_no_error_at_all():
    assert summarise(results([2.5] * 40, [1] * 40, range(40))).sem == 0.0


@pytest.mark.filterwarnings("error")
def test_non_finite_and_huge_losses():
    assert summarise(results([1e4, 1e4], [1, 1], [0, 1])).perplexity == math.inf
    diverged = summarise(results([math.inf, 1.0], [1, 1], [0, 1]))
    assert diverged.loss == diverged.perplexity == diverged.bpb == math.inf and math.isnan(diverged.sem)
    unknown = summarise(results([math.nan, 1.0], [1, 1], [0, 1]))
    assert all(math.isnan(x) for x in (unknown.loss, unknown.perplexity, unknown.bpb, unknown.sem))


def test_no_bytes_no_bits_per_byte():
    assert summarise(results([1.0, 2.0], [1, 1], [0, 1], num_bytes=[0, 0])).bpb is None


@pytest.mark.parametrize("num_windows", [0, 2])
def test_no_token_is_an_error(num_windows):
    with pytest.raises(ValueError, match=f"{num_windows} windows with no scored token"):
        summarise(results([0.0] * num_windows, [0] * num_windows, range(num_windows)))


def test_windows_that_are_infinite_under_both_checkpoints_differ_by_what_is_no_number():
    nats_N, tokens_N = np.array([np.inf, 1.0]), np.array([1, 1])
    paired = paired_difference(nats_N, nats_N, tokens_N, np.array([0, 1]))  # a warning would be an error here
    assert np.isnan(paired.delta) and np.isnan(paired.sem)


def test_the_difference_of_two_recipes_by_hand():
    # Means 3.1 of 3.0 and 3.2, 2.2 of 2.0, 2.2 and 2.4. Seeds: 0.02 / 2 + 0.04 / 3. Text: the first recipe is 0.1 up or
    # down on each of 20 documents of one token, 20 / 19 * 20 * 0.01 / 20^2.
    by_document_N = np.tile([0.1, -0.1], 10)
    now_RN = np.array([[3.0], [3.2]]) + by_document_N
    before_RN = np.array([[2.0], [2.2], [2.4]]) + np.zeros(20)
    found = difference_of_recipes(now_RN, before_RN, np.ones(20, np.int64), np.arange(20))
    assert found.delta == pytest.approx(0.9) and found.num_clusters == 20
    assert found.sem_seeds == pytest.approx(math.sqrt(0.01 + 0.04 / 3))
    assert found.df_seeds == pytest.approx(2.882, abs=1e-3)
    assert found.sem_text == pytest.approx(math.sqrt(0.01 / 19))
    # With t of 19 degrees of freedom from a printed table; that of 2.882 lies between 3.182 (of 3) and 4.303 (of 2).
    alike = difference_of_recipes(
        now_RN[:1].repeat(2, 0), before_RN[:1].repeat(2, 0), np.ones(20, np.int64), np.arange(20)
    )
    assert alike.sem_seeds == 0 and alike.half_width(0.025) == pytest.approx(2.0930 * found.sem_text, rel=1e-4)
    t_seeds = math.sqrt(found.half_width(0.025) ** 2 - 2.093**2 * 0.01 / 19) / found.sem_seeds
    assert 3.182 < t_seeds < 3.4


@pytest.mark.parametrize("num_now, num_before", [(2, 2), (3, 3), (5, 3)])
@pytest.mark.parametrize("ratio", [1, 3, 1000])
@pytest.mark.parametrize("spread", [0.0, 0.01, 0.1])
def test_the_interval_of_two_equal_recipes_holds_zero_as_often_as_it_says(num_now, num_before, ratio, spread):
    """Recipes differ by document; seeds as a whole, `spread` and `ratio` times less in the second, and by document."""
    rng = np.random.default_rng(1)
    tokens_N, document_N = np.full(40, 10), np.arange(40)
    missed = 0
    for _ in range(1000):
        of_text_N = rng.normal(0, 0.2, 40)
        now_RN, before_RN = (
            10 * (of_text_N + rng.normal(0, 0.03, 40) + rng.normal(0, sd, (num, 1)) + rng.normal(0, 0.02, (num, 40)))
            for num, sd in ((num_now, spread), (num_before, spread / ratio))
        )
        found = difference_of_recipes(now_RN, before_RN, tokens_N, document_N)
        missed += abs(found.delta) > found.half_width(0.025)
    assert missed <= 70  # 50 are promised


@pytest.mark.parametrize("num_now, num_before, num_documents", [(1, 3, 20), (3, 1, 20), (2, 2, 1)])
def test_recipes_of_one_run_or_a_set_of_one_document_have_no_error(num_now, num_before, num_documents):
    tokens_N, document_N = np.ones(num_documents, np.int64), np.arange(num_documents)
    now_RN, before_RN = np.full((num_now, num_documents), 3.0), np.full((num_before, num_documents), 2.5)
    found = difference_of_recipes(now_RN, before_RN, tokens_N, document_N)
    assert found.delta == 0.5 and np.isnan([found.sem_seeds, found.df_seeds, found.sem_text]).all()


def test_documents_of_two_tokenizers_are_paired_by_their_text():
    now = results([1, 2, 4, 1, 2, 7], [9] * 6, [0, 0, 1, ~0, ~1, 3], num_bytes=[5, 5, 20, 5, 5, 8])
    now = now._replace(text_N=np.array([11, 11, 12, 11, 11, 13], np.uint64))  # 11 twice, of 3 nats and 10 bytes
    before = results([9, 5, 6, 8], [3] * 4, [0, 1, 2, 3], num_bytes=[20, 10, 9, 70])
    before = before._replace(text_N=np.array([12, 11, 13, 2**64 - 1], np.uint64))  # 13 has another byte
    # Texts 11 and 12: (3 - 5) + (4 - 9) = -7 nats over 30 bytes of 38 and 109.
    found = paired_by_text(now, before)
    assert (found.num_documents, found.share) == (2, 30 / 109)
    assert found.delta == pytest.approx(-7 / 30 / math.log(2))
    u = -2 + 10 * 7 / 30  # and -u for the other
    assert found.sem == pytest.approx(math.sqrt(2 * 2 * u**2) / 30 / math.log(2))
    back = paired_by_text(before, now)
    assert (back.delta, back.sem, back.share) == pytest.approx((-found.delta, found.sem, found.share))
    one = paired_by_text(now, before._replace(text_N=np.array([12, 1, 2, 3], np.uint64)))
    assert (one.num_documents, one.delta) == (1, pytest.approx(-5 / 20 / math.log(2))) and math.isnan(one.sem)
    assert paired_by_text(now, before._replace(text_N=np.array([4, 1, 2, 3], np.uint64))) is None
    nothing = now._replace(bytes_N=np.where(now.text_N == 11, 0, now.bytes_N))
    lost = paired_by_text(nothing, before._replace(bytes_N=np.where(before.text_N == 11, 0, before.bytes_N)))
    assert (lost.num_documents, lost.delta) == (1, one.delta)


# scipy 1.17.1, stats.t.isf
TAILS = (0.2, 0.025, 8.333333333333333e-5, 1e-8, 1e-12)
QUANTILES = {
    1: (1.3763819204711736, 12.706204736174705, 3819.718546939026, 31830988.61837906, 318309886183.7907),
    2: (1.060660171779821, 4.302652729749464, 77.44998412956674, 7071.067705799458, 707106.7811854869),
    3: (0.9784723123633038, 3.1824463052837086, 23.601563788808278, 479.5250695797382, 10331.108244292487),
    4: (0.9409645772351811, 2.7764451051977943, 13.653122408957785, 131.59473694062356, 1316.0727465592565),
    5: (0.9195437802408267, 2.5705818356363155, 10.053012839620113, 62.4045061109673, 393.95695957760375),
    7: (0.8960296443137649, 2.3646242515927844, 7.272458852079211, 27.802283188119887, 104.02182926264722),
    10: (0.8790578285505889, 2.2281388519862753, 5.827267022762699, 15.895687652513546, 40.5320961786626),
    15: (0.8662449731949516, 2.131449545559776, 4.973668188441579, 10.714732022790736, 20.638607310216088),
    20: (0.8599644397323866, 2.0859634472658652, 4.616901378567894, 8.942883259935037, 15.15114959210309),
    22: (0.8582660516582044, 2.0738730679040254, 4.526646880919673, 8.530616477049122, 13.982948301327356),
    39: (0.8509350199201243, 2.022690920036761, 4.165030777282085, 7.021869598116248, 10.087196511192301),
    1000: (0.8419808221624284, 1.9623390808264085, 3.7791539394519704, 5.657912337679105, 7.124228925314409),
}


@pytest.mark.parametrize("column", range(len(TAILS)))
def test_student_quantiles_are_those_of_the_tables(column):
    df = np.array([[*QUANTILES], [*reversed(QUANTILES)]])
    expected = [[row[column] for row in QUANTILES.values()], [row[column] for row in reversed(QUANTILES.values())]]
    np.testing.assert_allclose(student_quantile(TAILS[column], df), expected, rtol=1e-11)


def test_student_quantiles_at_the_ends():
    assert student_quantile(0.0, 5) == math.inf and student_quantile(0.5, 5) == pytest.approx(0, abs=1e-15)
    assert np.isnan(student_quantile(0.1, np.array([0, -1]))).all()
    assert student_quantile(1e-30, 22) > student_quantile(1e-20, 22) > 20
    assert student_quantile(0.025, 1_000_000) == pytest.approx(
        1.9599663568, rel=1e-9
    )  # of the normal distribution, nearly
    for tail in (-1e-9, 0.51, math.nan):
        with pytest.raises(ValueError, match="expected 0 to 0.5"):
            student_quantile(tail, 5)
