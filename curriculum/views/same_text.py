"""Which eval sets of several runs hold the same text: by the content hash of their windows, not by their names."""

from collections.abc import Mapping, Sequence

from curriculum.record.wording import listed


def same_text(hashes: Sequence[Mapping[str, str | None]]) -> list[dict[int, str]]:
    """Group the sets that hold one text, each group as {run: its name there}, in the order in which the names appear.

    `hashes`: for each run, the content hash of each set by name. A set without a hash is a group of its own.
    A run may hold a text under several names. Each name that the first run has for it starts a group, which the same
    name in other runs joins. A run that has none of these names joins the largest group with its first name. Sets that
    are left over are grouped in the same way.
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
    """A title for the sets of one text, {run: its name there}: `val`, or `val (books in adapted)`."""
    name, *_ = names.values()
    others = [other for other in dict.fromkeys(names.values()) if other != name]
    told = [f"{other} in {listed([run for run, its in names.items() if its == other])}" for other in others]
    return f"{name} ({', '.join(told)})" if told else name
