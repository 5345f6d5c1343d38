"""The metrics of one eval of one eval set, and how tables write them.

To add a metric, add a field here and a line to `summarise` in `metrics.py`. A field of `Recorded` is in the record of a
run, and so in TensorBoard, W&B and every table of evals; give it the default None, which older runs have. A field of
`Summary` is only where a checkpoint is measured by itself, as by `curriculum eval`.

Imports no numpy, so that looking at a run is quick.
"""

from dataclasses import dataclass, field, fields
from typing import Any


def _metric(title: str, text: str = ".4f", **default: Any) -> Any:
    """A field that tables show under `title`, its number formatted by `text`."""
    return field(metadata={"title": title, "format": text}, **default)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The metrics in the record of a run.

    loss: nats per token, sum nats / sum tokens. Depends on the tokenizer.
    sem: standard error of `loss` in nats per token over the choice of held-out text (not of seeds), clustered
      by `Summary.clusters`, where copies of a document count once. None with one cluster.
    bpb: bits per UTF-8 byte of the scored text, sum nats / (ln 2 * sum bytes). Comparable between tokenizers.
      Special tokens have no bytes, yet their nats count. None when the set has no bytes at all.
    """

    loss: float = _metric("loss")
    sem: float | None = _metric("± sem")
    bpb: float | None = _metric("bpb")


@dataclass(frozen=True, kw_only=True)
class Summary(Recorded):
    """All metrics, each a quotient of sums over all windows.

    So they are means over tokens, never means of the means of windows or batches.

    perplexity: exp(loss); inf where that overflows.
    accuracy: share of tokens that were the most probable one, 0..1.
    clusters: 'documents', or 'blocks' of neighbouring windows where documents are few.
    A run that diverged has NaN or infinities here, never an error.
    """

    perplexity: float = _metric("perplexity", ",.3f")
    accuracy: float = _metric("accuracy", ".2%")
    clusters: str


RECORDED = tuple(metric.name for metric in fields(Recorded))
