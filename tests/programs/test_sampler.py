"""The order of windows: every one once an epoch, from a position alone."""

import itertools

from hypothesis import given, strategies as st

from fullshard.programs.train.sampler import Sampler

windows = st.integers(1, 1500)
seeds = st.integers(0, 2**32)


@given(num_windows=windows, seed=seeds, epoch=st.integers(0, 5))
def test_every_epoch_has_every_window_once(num_windows: int, seed: int, epoch: int) -> None:
    seen = Sampler(num_windows, seed).windows(epoch * num_windows, num_windows)
    assert sorted(seen) == list(range(num_windows))


@given(num_windows=st.integers(20, 300), seed=seeds)
def test_epochs_and_seeds_have_orders_of_their_own(num_windows: int, seed: int) -> None:
    sampler = Sampler(num_windows, seed)
    first = sampler.windows(0, num_windows)
    assert first != tuple(range(num_windows))
    assert first != sampler.windows(num_windows, num_windows)
    assert first != Sampler(num_windows, seed + 1).windows(0, num_windows)


@given(num_windows=windows, seed=seeds, position=st.integers(0, 10_000), data=st.data())
def test_a_position_is_all_there_is_to_know(
    num_windows: int, seed: int, position: int, data: st.DataObject
) -> None:
    """Batches of any sizes, from any position, over the ends of epochs: the same sequence."""
    sizes = data.draw(st.lists(st.integers(0, 40), max_size=8))
    at_once = Sampler(num_windows, seed).windows(position, sum(sizes))
    in_parts: list[int] = []
    for size in sizes:
        in_parts += Sampler(num_windows, seed).windows(position + len(in_parts), size)
    assert tuple(in_parts) == at_once


def test_ranks_that_draw_their_shares_draw_the_global_batch() -> None:
    sampler = Sampler(100, seed=0)
    for ranks in (1, 2, 3, 6):
        share = 6 // ranks
        shares = [sampler.windows(96 + rank * share, share) for rank in range(ranks)]
        assert sum(shares, ()) == sampler.windows(96, 6)


def test_neighbours_do_not_stay_together() -> None:
    """Of the pairs of neighbours in an order of 4096 windows, hardly any are neighbours in the data."""
    order = Sampler(4096, seed=0).windows(0, 4096)
    pairs = list(itertools.pairwise(order))
    assert sum(abs(a - b) == 1 for a, b in pairs) < 12
    # And they come from everywhere: a quarter of them goes from one half to the other, and one back.
    assert 1800 < sum((a < 2048) != (b < 2048) for a, b in pairs) < 2300


def test_billions_of_windows_need_no_table() -> None:
    num_windows = 10**12 + 7
    seen = Sampler(num_windows, seed=3).windows(5 * num_windows - 50, 100)
    assert len(set(seen[:50])) == len(set(seen[50:])) == 50
    assert all(0 <= window < num_windows for window in seen)


def test_the_order_is_the_same_in_every_version() -> None:
    """A resumed run goes on in the order it began with: this must never change."""
    order = "".join(map(str, Sampler(10, seed=0).windows(0, 20)))
    assert order == "3968754120" + "2356198047"
