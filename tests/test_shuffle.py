"""The permutation is a bijection for every size, key and epoch, and mixes well."""

from collections import Counter

import numpy as np
import pytest

from phases.shuffle import permute, stream_key


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 255, 256, 257, 1000, 65_537])
def test_bijection_for_every_size(size):
    for epoch in range(3):
        order = permute(np.arange(size), size, stream_key(7, "web"), np.full(size, epoch))
        assert np.array_equal(np.sort(order), np.arange(size))


def test_epochs_seeds_and_names_give_other_orders():
    def order(seed, name, epoch):
        return permute(np.arange(1000), 1000, stream_key(seed, name), np.full(1000, epoch))

    orders = [order(1, "web", 0), order(1, "web", 1), order(2, "web", 0), order(1, "code", 0)]
    for i in range(4):
        for j in range(i):
            assert (orders[i] == orders[j]).mean() < 0.02


def test_epochs_may_be_mixed_in_one_call():
    key = stream_key(3, "a")
    epochs = np.arange(60) // 20
    mixed = permute(np.arange(60) % 20, 20, key, epochs)
    for epoch in range(3):
        alone = permute(np.arange(20), 20, key, np.full(20, epoch))
        assert np.array_equal(mixed[epochs == epoch], alone)


@pytest.mark.parametrize("size", [3, 17, 19_531, 1 << 40])
def test_one_index_at_a_time_is_as_many(size):
    """Few rows walk as plain integers, many as arrays."""
    indices, key, epochs = np.arange(300) * 7919 % size, stream_key(3, "a"), np.arange(300) // 50
    alone = [int(permute(int(i), size, key, int(e))) for i, e in zip(indices, epochs, strict=True)]
    assert permute(indices, size, key, epochs).tolist() == alone


def test_every_order_of_four_is_about_equally_likely():
    orders = Counter(
        tuple(permute(np.arange(4), 4, stream_key(seed, "a"), np.zeros(4, np.int64))) for seed in range(4800)
    )
    assert len(orders) == 24
    # 200 expected of each, standard deviation 14
    assert 130 < min(orders.values()) and max(orders.values()) < 270


def test_displacement_is_that_of_a_random_order():
    n = 20_000
    order = permute(np.arange(n), n, stream_key(0, "x"), np.zeros(n, np.int64))
    assert abs(np.abs(order - np.arange(n)).mean() / n - 1 / 3) < 0.01
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03


def test_the_order_never_changes():
    """These numbers are a promise: a run resumed with a later version reads the same data."""
    assert permute(np.arange(8), 8, stream_key(1337, "web"), np.zeros(8, np.int64)).tolist() == [5, 2, 0, 7, 6, 4, 3, 1]
    later = [
        (16, [15, 5, 14, 3, 7]),
        (17, [1, 12, 4, 15, 8]),
        (2**24 + 1, [14861591, 13591538, 14298170, 7200144, 5880022]),
        (2**40, [324806927559, 512403566391, 471048372599, 276179141681, 33403476737]),
    ]
    for size, first in later:
        assert permute(np.arange(5), size, stream_key(1337, "web"), 3).tolist() == first


def test_size_zero_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        permute(np.arange(0), 0, 1, np.arange(0))
