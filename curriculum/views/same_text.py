"""Which eval sets of several runs hold the same text: by the content hash of their windows, not by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from curriculum.record.wording import listed


def same_text(hashes: Sequence[Mapping[str, str | None]]) -> list[dict[int, str]]:
    """The sets of one text together, each as {run: its name there}, ordered by the names of the first runs.

    `hashes`: of each run the content hash of each set by name; a set without one is alone. A set meets its namesakes of
    the first run that holds the text; a run that has none of that run's names for it joins the most of them with its
    first. What is left over is put together in the same way.
    """
    texts: dict[object, dict[int, list[str]]] = {}
    for run, of_run in enumerate(hashes):
        for name, content_hash in of_run.items():
            texts.setdefault(content_hash or (run, name), {}).setdefault(run, []).append(name)
    found = []
    for left in texts.values():
        while left:
            names = next(iter(left.values()))
            groups = [{run: name for run, own in left.items() if name in own} for name in names]
            widest = max(groups, key=len)
            widest |= {run: own[0] for run, own in left.items() if not set(own) & set(names)}
            found += [dict(sorted(group.items())) for group in groups]
            taken = {item for group in groups for item in group.items()}
            left = {run: rest for run, own in left.items() if (rest := [n for n in own if (run, n) not in taken])}
    order = list(dict.fromkeys(name for of_run in hashes for name in of_run))
    return sorted(found, key=lambda group: order.index(next(iter(group.values()))))


def set_title(names: Mapping[str, str]) -> str:
    """What to call the sets of one text, {run: its name there}: `val`, or `val (books in adapted)`."""
    name, *_ = names.values()
    others = [other for other in dict.fromkeys(names.values()) if other != name]
    told = [f"{other} in {listed([run for run, its in names.items() if its == other])}" for other in others]
    return f"{name} ({', '.join(told)})" if told else name
