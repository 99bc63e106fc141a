"""Torch's errors about plain tensors beside sharded parameters say what to do; all other errors stay as they are."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor.experimental import implicit_replication

from fullshard import LifecycleError, UnsupportedError, clip_grad_norm_, fully_shard
from fullshard.divergence.watchdog import process_end
from tests.helpers.fake import fake_world


class Tied(nn.Module):
    """Its forward uses the weight of a module that is sharded by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x), self.second.weight) * self.scale


def sharded_pair() -> nn.Sequential:
    model = nn.Sequential()
    model.first, model.second = nn.Linear(4, 4), nn.Linear(4, 4)
    return fully_shard(model)


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", ()))


def sharded(*, together: bool = False) -> Tied:
    model = Tied()
    if not together:
        fully_shard(model.first)
        fully_shard(model.second)
    return fully_shard(model)


def test_a_weight_that_another_forward_uses_has_its_remedy_once() -> None:
    with fake_world(2):
        model = nn.Sequential(sharded())
        fully_shard(model)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") as caught:
            model(torch.ones(2, 4))
        assert notes(caught.value).count("A parameter that fullshard has sharded") == 1
        assert "do not shard its module by itself" in notes(caught.value)
        sharded(together=True)(torch.ones(2, 4)).sum().backward()


def test_a_weight_that_is_used_outside_of_all_forwards_has_its_remedy_at_the_process_s_end() -> (
    None
):
    with fake_world(2):
        model = sharded()
        with pytest.raises(RuntimeError) as caught:
            F.linear(torch.ones(2, 4), model.first.weight)
        process_end._explained(caught.value)
        process_end._explained(caught.value)
        assert notes(caught.value).count("param.full_tensor() on all ranks") == 1
    other = RuntimeError("something else")
    process_end._explained(other)
    assert not notes(other)


def test_other_errors_of_a_forward_have_no_remedy() -> None:
    with fake_world(2):
        model = sharded(together=True)
        with pytest.raises(RuntimeError) as caught:
            model(torch.ones(2, 3))
        assert not notes(caught.value)


def test_a_state_dict_of_whole_tensors_names_what_is_sharded_and_how_it_is_loaded() -> None:
    whole = Tied().state_dict()
    with fake_world(2):
        model = sharded()
        with pytest.raises(RuntimeError) as caught:
            model.load_state_dict(whole)
        # Until 2.12, torch takes a tensor of one number for a replicated one, and loads it.
        named = sorted(whole.keys() - ({"scale"} if torch.__version__ < "2.13" else set()))
        _, *lines, remedy = str(caught.value).splitlines()
        assert sorted(line.strip() for line in lines) == [
            f"{name} is sharded, and the state dict has a whole tensor." for name in named
        ]
        assert "set_model_state_dict" in remedy

        # Also from above, and with errors of other kinds, which stay.
        outer = nn.ModuleDict({"net": model, "plain": nn.Linear(2, 2)})
        of_outer = {f"net.{name}": value for name, value in whole.items()}
        of_outer["plain.weight"] = torch.ones(3)
        with pytest.raises(RuntimeError) as caught:
            outer.load_state_dict(of_outer)
        text = str(caught.value)
        assert "net.second.bias is sharded" in text and text.count("set_model_state_dict") == 1
        assert (
            "size mismatch for plain.weight" in text
            and 'key(s) in state_dict: "plain.bias"' in text
        )


def load_in_every_right_way() -> None:
    whole = {name: torch.full_like(value, 3.0) for name, value in Tied().state_dict().items()}
    model = sharded()
    options = StateDictOptions(full_state_dict=True)
    for load in (
        lambda: set_model_state_dict(model, whole, options=options),
        lambda: _load_implicitly(model, whole),
        lambda: model.load_state_dict(sharded().state_dict()),
    ):
        load()
    with pytest.raises(RuntimeError, match="Unexpected key") as caught:
        model.load_state_dict({**model.state_dict(), "other": torch.ones(3)})
    assert "sharded" not in str(caught.value)


def _load_implicitly(model: nn.Module, whole: dict[str, Any]) -> None:
    with implicit_replication(), warnings.catch_warnings(action="ignore"):
        model.load_state_dict(whole)
    for param in model.parameters():
        assert torch.equal(param.full_tensor(), torch.full(param.shape, 3.0))  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:Found a non-scalar tensor")
def test_state_dicts_that_can_be_loaded_are(world: Any) -> None:
    world(2).run(load_in_every_right_way)


def test_an_optimizer_s_error_names_parameters_by_their_paths() -> None:
    with fake_world(2):
        root = nn.Sequential(sharded_pair())
        fully_shard(root)
        root(torch.ones(2, 4)).sum().backward()
        with pytest.raises(UnsupportedError) as caught:
            torch.optim.LBFGS(root.parameters()).step(lambda: 0.0)
    paths = [f"{name}.{kind}" for name in ("first", "second") for kind in ("weight", "bias")]
    assert f"0: {', '.join(f'0.{path}' for path in paths)}" in str(caught.value)


def test_errors_about_unsharded_parameters_name_them_by_their_paths() -> None:
    with fake_world(2):
        root: Any = nn.Sequential(sharded_pair(), nn.Linear(4, 4))
        root[0].unshard()  # before a forward tells where the module is
        root[0].reshard()
        fully_shard(root)
        root(torch.ones(2, 4)).sum().backward()
        root[0].unshard()
        params = list(root[0].parameters())
        optimizer = torch.optim.SGD(params, lr=0.1)
        paths = r"\['0.first.weight', '0.first.bias', '0.second.weight', '0.second.bias'\]"
        with pytest.raises(LifecycleError, match=f"these are unsharded now: {paths}"):
            clip_grad_norm_(params, 1.0)
        clip_grad_norm_(root, 1.0)
        root[0].reshard()
        with pytest.raises(LifecycleError, match=f"SGD was made while .* unsharded.*: {paths}"):
            optimizer.step()
        torch.optim.SGD(root.parameters(), lr=0.1).step()
