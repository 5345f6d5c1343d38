"""Which sets of several runs are put together, worked by hand: a letter is a text, each run a {name: text}."""

import pytest

from curriculum.views.same_text import same_text, set_title


@pytest.mark.parametrize(
    "runs, expected",
    [
        ([{"val": "a", "law": "b"}, {"val": "a", "law": "c"}], [["val", "val"], ["law", None], [None, "law"]]),
        ([{"val": "a"}, {"val": "b", "books": "a"}], [["val", "books"], [None, "val"]]),
        # Under the same name first, also where that is not the first name of the text.
        ([{"val": "a", "general": "a"}, {"general": "a"}], [["val", None], ["general", "general"]]),
        ([{"val": "a", "general": "a"}, {"books": "a", "general": "a"}],
         [["val", None], ["general", "general"], [None, "books"]]),
        ([{"val": "a", "general": "a"}] * 2, [["val", "val"], ["general", "general"]]),
        ([{"val": "a"}, {"books": "a"}, {"val": "a"}], [["val", "books", "val"]]),
        ([{"val": "a"}, {"books": "a"}, {"books": "a"}], [["val", "books", "books"]]),
        ([{"val": "a", "general": "a"}, {"general": "a"}, {"books": "a"}],
         [["val", None, None], ["general", "general", "books"]]),
        # What is left of two runs is put together too.
        ([{"val": "a"}, {"val": "a", "books": "a"}, {"val": "a", "books": "a"}],
         [["val", "val", "val"], [None, "books", "books"]]),
        ([{"law": "b"}, {"val": "a"}, {"books": "a", "law": "c"}],
         [["law", None, None], [None, None, "law"], [None, "val", "books"]]),
        ([{"val": None}, {"val": None}], [["val", None], [None, "val"]]),
    ],
)  # fmt: skip
def test_sets_of_one_text_are_put_together(runs, expected):
    found = same_text(runs)
    assert [[group.get(run) for run in range(len(runs))] for group in found] == expected
    assert all(list(group) == sorted(group) for group in found)


def test_every_name_of_a_text_is_told():
    assert set_title({"base": "val", "other": "val"}) == "val"
    assert set_title({"base": "val", "a": "books", "other": "val", "b": "books"}) == "val (books in a and b)"
    assert set_title({"base": "val", "a": "books", "b": "text"}) == "val (books in a, text in b)"
