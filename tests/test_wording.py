import pytest

from curriculum.record.wording import (
    columns,
    epochs_text,
    first_of,
    largest,
    listed,
    moment,
    percent_done,
    printable,
    size_text,
)


@pytest.mark.parametrize(
    ("done", "total", "digits", "text"),
    [(0, 3, 0, "0"), (2, 3, 0, "67"), (5, 9, 1, "55.6"), (478, 480, 0, "99"), (480, 480, 0, "100"), (9999, 10000, 1, "99.9"),
     (9994, 10000, 1, "99.9"), (10000, 10000, 1, "100.0"), (1, 3, 1, "33.3")],
)  # fmt: skip
def test_only_what_is_complete_has_100_per_cent(done, total, digits, text):
    assert percent_done(done, total, digits) == text


@pytest.mark.parametrize(
    ("epochs", "text"),
    [
        (0.0, "0"),
        (4e-5, "<0.0001"),
        (1e-4, "0.0001"),
        (0.25, "0.25"),
        (0.12345, "0.123"),
        (12.34, "12.3"),
        (999.4, "999"),
        (999.5, "1,000"),
        (999.6, "1,000"),
        (1470.4, "1,470"),
    ],
)
def test_epochs_have_three_digits_and_no_exponent(epochs, text):
    assert epochs_text(epochs) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1500, "1.5 kB"),
        (38_912, "38.9 kB"),
        (5e6, "5.0 MB"),
        (999_940_000, "999.9 MB"),
        (999_960_000, "1.0 GB"),
        (1.2345e12, "1,234.5 GB"),
    ],
)
def test_a_size_has_the_unit_that_it_fills(num_bytes, text):
    assert size_text(num_bytes) == text


def test_a_moment_keeps_the_offset_of_its_zone():
    assert moment("2026-11-25T18:40:59+01:00") == "2026-11-25 18:40+01:00"
    assert moment("2026-11-25T18:40:59-09:30") == "2026-11-25 18:40-09:30"


def test_names_are_left_out_only_where_there_are_more_than_may_be_named():
    assert [listed(list(names)) for names in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]
    assert [first_of(names, 3) for names in ("abc", "abcde")] == ["a, b, c", "a, b, c and 2 more"]
    assert largest({"a": 1, "b": -3}, str.upper, 2) == ["A", "B"]
    assert largest({"a": 1, "b": -3, "c": 2, "d": 0}, str.upper, 2) == ["B", "C", "2 more"]


def test_what_is_not_printable_is_escaped_unless_it_is_wanted():
    assert printable("汉 'a'\n\x1b[0m") == "汉 'a'\\n\\x1b[0m"
    assert printable("a\n\x1b[0m", also="\n") == "a\n\\x1b[0m"


def test_text_of_any_script_is_shown_as_it_is():
    """A wide blank, joiners of emoji, Hindi and Persian, a French blank; what turns the direction of text is escaped."""
    written = (
        "\u4eca\u5929\u3000\u5b66 \U0001f468\u200d\U0001f469 \u0915\u094d\u200d \u0645\u06cc\u200c\u062e \xab\xa0oui"
    )
    assert printable(written) == written
    assert printable("a\u202eb\u2028\ufeff") == "a\\u202eb\\u2028\\ufeff"


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_with_their_text():
    rows = [("set", "loss", "why"), ("val", "12.5", ""), ("longer", "3", "new")]
    assert columns(rows, right=[1]) == ["  set     loss  why", "  val     12.5", "  longer     3  new"]


def test_columns_are_as_wide_as_they_are_on_a_terminal():
    """Letters of Chinese and full-width ones take two columns, marks and joiners none."""
    rows = [("\u6cd5\u5f8b", "a"), ("cafe\u0301", "b"), ("\uff21\u200d", "c"), ("\xe9", "d")]
    assert columns(rows, right=[]) == ["  \u6cd5\u5f8b  a", "  cafe\u0301  b", "  \uff21\u200d    c", "  \xe9     d"]
    assert columns(rows, right=[0])[3] == "     \xe9  d"
