"""The loss, and which held-out windows it is taken of by whom."""

from itertools import chain

import pytest
import torch
import torch.nn.functional as F

from fullshard.programs.train.evaluation import shares, spread_evenly, window_losses


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_ranks_take_each_window_once_and_as_many_batches(count: int, world: int, rows: int) -> None:
    chosen = [10 * number for number in range(count)]
    of_ranks = [list(shares(chosen, rank=rank, world=world, rows=rows)) for rank in range(world)]
    assert len({len(batches) for batches in of_ranks}) == 1
    pairs = [
        (window, weight)
        for windows, weights in chain.from_iterable(of_ranks)
        for window, weight in zip(windows, weights, strict=True)
    ]
    assert all(
        len(windows) == len(weights) == rows for windows, weights in chain.from_iterable(of_ranks)
    )
    assert sorted(window for window, weight in pairs if weight) == chosen
    assert {weight for _, weight in pairs} <= {0.0, 1.0}


def test_windows_are_spread_over_all_there_are() -> None:
    assert spread_evenly(5, 100) == [0, 20, 40, 60, 80]
    assert spread_evenly(5, 7) == [0, 1, 2, 4, 5]
    assert spread_evenly(64, 3) == [0, 1, 2]


class Guesser:
    """A source whose scores are the tokens' own."""

    def scores(self, model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return F.one_hot(tokens, 4).to(torch.bfloat16)


def test_the_loss_of_a_window_is_that_of_its_next_tokens() -> None:
    windows = torch.tensor([[0, 0, 0], [0, 1, 2]])
    right, wrong = window_losses(Guesser(), torch.nn.Identity(), windows).tolist()
    others = torch.tensor([1.0, 0.0, 0.0, 0.0]).exp().sum().log().item()
    assert right == pytest.approx(others - 1)
    assert wrong == pytest.approx(others)
