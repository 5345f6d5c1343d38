"""From per-window sums of nats to the reported metrics: sums first, one division each.

A metric is a field in `summary.py` and a line of `summarise`. If it needs another sum per window, also add an array to
`WindowResults`, None by default, and the number of each token to `score_targets` in `curriculum/model/loss.py`.
"""

import math
from typing import NamedTuple

import numpy as np

from evalsets.summary import Summary

MIN_CLUSTERS = 20


class WindowResults(NamedTuple):
    """What one eval of one set measured, by window, in the set's order.

    The first are sums of what `score_targets` of a `Suite` gives for each token, by its names with `_N`. Only scored
    targets count: neither padding nor the end-of-text that opens a document.

    nats_N: float64, sum over the window of -ln p(target | the tokens before it in the window).
    correct_N: int64, targets that were the most probable token.
    tokens_N: int64, targets.
    bytes_N: int64, UTF-8 bytes of the targets.
    document_N: int64, the document of the window; ~n (below 0) if that is a copy, whose window repeats window n. In
      evals of older runs a copy has a number of its own, as if its text were new.
    text_N: uint64, a hash of the whole text of the window's document, the same for every tokenizer and length.
    Give a new field the default None: evals of older runs do not have it.
    """

    nats_N: np.ndarray
    correct_N: np.ndarray
    tokens_N: np.ndarray
    bytes_N: np.ndarray
    document_N: np.ndarray
    text_N: np.ndarray | None = None


def summarise(results: WindowResults) -> Summary:
    """The metrics of one set. Raises ValueError if it holds no token."""
    nats = float(np.sum(results.nats_N, dtype=np.float64))
    tokens = int(np.sum(results.tokens_N, dtype=np.int64))
    num_bytes = int(np.sum(results.bytes_N, dtype=np.int64))
    if tokens == 0:
        raise ValueError(f"{len(results.tokens_N)} windows with no scored token, expected at least one token")
    cluster_N, kind = clusters(results.document_N)
    _, sem = clustered_ratio(results.nats_N, results.tokens_N, cluster_N)
    loss = nats / tokens
    with np.errstate(over="ignore"):
        perplexity = float(np.exp(loss))
    return Summary(
        loss=loss,
        perplexity=perplexity,
        bpb=nats / (math.log(2) * num_bytes) if num_bytes else None,
        accuracy=int(np.sum(results.correct_N, dtype=np.int64)) / tokens,
        sem=float(sem) if cluster_N.max() > 0 else None,
        clusters=kind,
    )


def clusters(document_N: np.ndarray) -> tuple[np.ndarray, str]:
    """Groups of windows that a standard error may take as independent: (cluster_N in 0..G-1, kind).

    'documents': windows of one document are alike, so each document is one cluster.
    'blocks': with fewer than 20 documents but at least 20 windows, 20 blocks of neighbouring windows, equal in
    length to within one window. They ignore where documents end: a block across an end only joins windows that are
    independent anyway, while cutting there would leave scraps. There are only 20, so that each is as long as possible:
    neighbouring windows resemble each other, and short blocks would make the error look smaller than it is. Such an
    error covers more text from these few documents, not other documents.
    With fewer than 20 windows too, documents again: single windows of a document are not independent.

    Copies do not count: each of their windows (see `WindowResults`) joins the cluster of the window that it repeats,
    since a model gives both the same nats.
    """
    is_copy_N = document_N < 0
    _, cluster_W = np.unique(document_N[~is_copy_N], return_inverse=True)  # of the W windows that repeat none
    num_windows, num_documents, kind = len(cluster_W), int(cluster_W.max(initial=-1)) + 1, "documents"
    if num_documents < MIN_CLUSTERS <= num_windows:
        cluster_W, kind = np.arange(num_windows) * MIN_CLUSTERS // num_windows, "blocks"
    cluster_N = np.empty(len(document_N), np.int64)
    cluster_N[~is_copy_N] = cluster_W
    cluster_N[is_copy_N] = cluster_N[~document_N[is_copy_N]]
    return cluster_N, kind


def clustered_ratio(nats_N: np.ndarray, tokens_N: np.ndarray, cluster_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The ratio r = sum nats / sum tokens and its standard error, with windows dependent only within a cluster.

    nats [..., N] may have leading axes, which the results keep; each gets what it would get alone, bit for bit.
    The error is the linearised (Taylor) one of a ratio under cluster sampling (Cochran, Sampling Techniques,
    3rd ed., 6.3 and 9A): SE^2 = G/(G-1) * sum_g u_g^2 / (sum tokens)^2, u_g = sum over cluster g of
    (nats_i - r * tokens_i). In nats per token; NaN with one cluster, or if a window is not finite.
    """
    nats_XN = np.ascontiguousarray(nats_N, np.float64)
    num_clusters = int(cluster_N.max()) + 1
    tokens = np.sum(tokens_N, dtype=np.int64)
    with np.errstate(invalid="ignore"):
        ratio_X = np.sum(nats_XN, axis=-1) / tokens
        if num_clusters < 2:
            return ratio_X, np.full_like(ratio_X, np.nan)
        rest_XN = nats_XN - ratio_X[..., None] * tokens_N
        bins_XN = np.arange(ratio_X.size)[:, None] * num_clusters + cluster_N
        u_XG = np.bincount(bins_XN.ravel(), rest_XN.ravel(), ratio_X.size * num_clusters)
        u_XG = u_XG.reshape(*ratio_X.shape, num_clusters)
        return ratio_X, np.sqrt(num_clusters / (num_clusters - 1) * np.sum(u_XG * u_XG, axis=-1)) / tokens


class Paired(NamedTuple):
    """Rise of a set's loss between two checkpoints, [...], and its standard error over the choice of documents.

    The error is NaN with one cluster, and has `num_clusters` - 1 degrees of freedom. It holds for these two checkpoints
    alone: no jitter is included.
    """

    delta: np.ndarray
    sem: np.ndarray
    num_clusters: int
    clusters: str


def paired_difference(now_N: np.ndarray, before_N: np.ndarray, tokens_N: np.ndarray, document_N: np.ndarray) -> Paired:
    """The difference between two checkpoints' nats of the same windows; exactly 0.0 +- 0.0 if they are equal."""
    cluster_N, kind = clusters(document_N)
    with np.errstate(invalid="ignore"):
        difference_XN = np.asarray(now_N, np.float64) - np.asarray(before_N, np.float64)
    return Paired(*clustered_ratio(difference_XN, tokens_N, cluster_N), int(cluster_N.max()) + 1, kind)


class BetweenRecipes(NamedTuple):
    """Rise of a set's mean loss between two recipes, and its standard errors over the seeds and over the documents.

    The first has `df_seeds` degrees of freedom, a fraction, the second `num_clusters` - 1. All are NaN if a recipe has
    a single run or the set a single cluster.
    """

    delta: float
    sem_seeds: float
    df_seeds: float
    sem_text: float
    num_clusters: int

    def half_width(self, tail: float) -> float:
        """Half of the interval beyond whose ends lies `tail` on each side.

        The two errors are widened apart: pooled, the many degrees of freedom of the documents would stand for the few
        of the seeds, whose variance is often found much too small.
        """
        of_seeds = student_quantile(tail, np.float64(self.df_seeds)) * self.sem_seeds
        of_text = student_quantile(tail, self.num_clusters - 1) * self.sem_text
        return math.hypot(of_seeds, of_text)


def difference_of_recipes(
    now_RN: np.ndarray, before_RN: np.ndarray, tokens_N: np.ndarray, document_N: np.ndarray
) -> BetweenRecipes:
    """The difference between the mean losses of runs [R, N] of two recipes, which differ in their seeds, on one set.

    The two recipes may have different numbers of runs. The error over the seeds is that of two means of unequal
    variances, s_now^2 / R_now + s_before^2 / R_before (Welch, Biometrika 34, 1947); that over the documents is of the
    paired difference between the recipes' means. What seeds do differently on each document is in both.
    """
    of_text = paired_difference(np.mean(now_RN, axis=0), np.mean(before_RN, axis=0), tokens_N, document_N)
    delta, num_clusters = float(of_text.delta), of_text.num_clusters
    if min(len(now_RN), len(before_RN), num_clusters) < 2:
        return BetweenRecipes(delta, math.nan, math.nan, math.nan, num_clusters)
    tokens = np.sum(tokens_N, dtype=np.int64)
    with np.errstate(invalid="ignore"):
        parts_2 = np.array([np.var(np.sum(of, axis=1) / tokens, ddof=1) / len(of) for of in (now_RN, before_RN)])
    df_2 = np.array([len(now_RN) - 1, len(before_RN) - 1])
    variance = float(parts_2.sum())
    df = variance**2 / float(np.sum(parts_2**2 / df_2)) if variance else float(df_2.min())
    return BetweenRecipes(delta, math.sqrt(variance), df, float(of_text.sem), num_clusters)


class PairedTexts(NamedTuple):
    """Rise in bits per byte between two models over the documents that both measured, and its standard error.

    The error is NaN with one document. share: those documents' part of a set's bytes, of the set where it is smaller.
    """

    delta: float
    sem: float
    num_documents: int
    share: float


def paired_by_text(now: WindowResults, before: WindowResults) -> PairedTexts | None:
    """The difference between evals whose windows differ: of other tokenizers or lengths, or of sets that overlap.

    Documents are paired by the hash of their text; copies count once, and a text whose scored bytes differ is not
    paired. None if the two share no document.
    """
    (text_now_D, nats_now_D, bytes_now_D), (text_before_D, nats_before_D, bytes_before_D) = map(_by_text, (now, before))
    _, in_now, in_before = np.intersect1d(text_now_D, text_before_D, assume_unique=True, return_indices=True)
    alike = (bytes_now_D[in_now] == bytes_before_D[in_before]) & (bytes_now_D[in_now] > 0)
    in_now, in_before = in_now[alike], in_before[alike]
    if not len(in_now):
        return None
    bytes_D = bytes_now_D[in_now]
    with np.errstate(invalid="ignore"):
        difference_D = nats_now_D[in_now] - nats_before_D[in_before]
    nats, sem = clustered_ratio(difference_D, bytes_D, np.arange(len(bytes_D)))
    share = bytes_D.sum() / max(bytes_now_D.sum(), bytes_before_D.sum())
    return PairedTexts(float(nats) / math.log(2), float(sem) / math.log(2), len(bytes_D), float(share))


def _by_text(results: WindowResults) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(texts, their nats, their bytes) of the documents that are no copies, in ascending order of `text_N`."""
    own_N = results.document_N >= 0
    text_D, document_W = np.unique(results.text_N[own_N], return_inverse=True)
    nats_D = np.bincount(document_W, results.nats_N[own_N], len(text_D))
    return text_D, nats_D, np.bincount(document_W, results.bytes_N[own_N], len(text_D)).astype(np.int64)


def student_quantile(tail: float, df: np.ndarray | int) -> np.ndarray:
    """The t that Student's T with `df` degrees of freedom exceeds with probability `tail`.

    In the shape of `df`; inf for a tail of 0, NaN for df below 1. Raises ValueError unless 0 <= tail <= 0.5.
    """
    from scipy.special import stdtrit  # a tenth of a second that only verdicts need

    if not 0 <= tail <= 0.5:
        raise ValueError(f"student_quantile: the tail is {tail}, expected 0 to 0.5")
    df = np.asarray(df)
    quantiles = -stdtrit(np.maximum(df, 1), tail) if tail > 0 else np.inf
    return np.where(df < 1, np.nan, quantiles)
