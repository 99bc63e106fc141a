"""Plans of exchanges: every piece arrives where it belongs, once, and owners have equal work."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st
from torch import Tensor

from fullshard.layout.sharding import Sharding
from fullshard.optim.matrices.owners import Bucket, CutParam, assign_owners, plan_buckets


def by_rows(shape: tuple[int, ...], rows: list[list[int]]) -> CutParam:
    """A parameter that is cut by rows over ranks; one list of ranks for each replica."""
    cut = -(-shape[0] // len(rows[0]))
    cells = range(0, shape[0], cut)
    sharding = Sharding(
        shape=shape,
        cuts=(cells, *((0,) for _ in shape[1:])),
        holders=tuple(tuple(row[: len(cells)]) for row in rows),
    )
    return CutParam(sharding=sharding, stack=0 if len(shape) == 3 else None, anyone_owns=True)


def flat(shape: tuple[int, ...], before: int, piece: int, ranks: list[int]) -> CutParam:
    """A parameter that begins after some elements of a range that is cut into pieces."""
    numel = torch.Size(shape).numel()
    sharding = Sharding(
        shape=shape, flat=True, cuts=(range(-before, numel, piece),), holders=(tuple(ranks),)
    )
    return CutParam(sharding=sharding, stack=0 if len(shape) == 3 else None, anyone_owns=False)


def local(param: CutParam, tensor: Tensor, rank: int) -> Tensor:
    cell = param.sharding.cell_of(rank)
    if cell is None:
        return tensor.new_empty(0)
    extent = param.sharding.extent(cell)
    source = tensor.flatten() if param.sharding.flat else tensor
    return source[
        tuple(slice(a, b) for a, b in zip(extent.start, extent.stop, strict=True))
    ].clone()


def carry(sent: list[Tensor], sizes: list[tuple[int, ...]]) -> list[Tensor]:
    """Do what an all-to-all does."""
    parts = [tensor.split(list(each)) for tensor, each in zip(sent, sizes, strict=True)]
    return [torch.cat([each[to] for each in parts]) for to in range(len(sent))]


def exchange(params: list[CutParam], ranks: list[int], bucket_numel: int) -> list[list[Tensor]]:
    """Negate each matrix at its owner; return what every rank has of all parameters then."""
    tensors = [
        torch.arange(1.0, 1 + torch.Size(p.sharding.shape).numel()).view(p.sharding.shape)
        for p in params
    ]
    locals_ = [[local(p, t, rank) for p, t in zip(params, tensors, strict=True)] for rank in ranks]
    results = [[torch.zeros_like(each) for each in of_rank] for of_rank in locals_]
    plans = [plan_buckets(params, ranks, rank, bucket_numel) for rank in ranks]
    assert len({len(plan) for plan in plans}) == 1
    for together in zip(*plans, strict=True):
        assert len({bucket.text for bucket in together}) == 1
        one_bucket(together, locals_, results)
    return results


def one_bucket(
    together: tuple[Bucket, ...], locals_: list[list[Tensor]], results: list[list[Tensor]]
) -> None:
    sent = [
        torch.cat([v.flatten() for v in bucket.sent.views(of_rank)] or [torch.empty(0)])
        for bucket, of_rank in zip(together, locals_, strict=True)
    ]
    arrived = carry(sent, [bucket.sent.sizes for bucket in together])
    updates = []
    for bucket, message in zip(together, arrived, strict=True):
        matrices = [torch.full(each.block.shape, float("nan")) for each in bucket.owned]
        for view, part in zip(
            bucket.gathered.views(matrices), bucket.gathered.split(message), strict=True
        ):
            view.copy_(part)
        assert not any(each.isnan().any() for each in matrices), "an owner has whole matrices"
        views = bucket.scattered.views([-each for each in matrices])
        updates.append(torch.cat([v.flatten() for v in views] or [torch.empty(0)]))
    arrived = carry(updates, [bucket.scattered.sizes for bucket in together])
    for bucket, message, of_rank in zip(together, arrived, results, strict=True):
        for view, part in zip(
            bucket.received.views(of_rank), bucket.received.split(message), strict=True
        ):
            view.sub_(part)  # twice would show


@given(st.data())
def test_every_piece_arrives_once(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 5))
    replicas = data.draw(st.integers(1, 2))
    ranks = list(range(10, 10 + world * replicas))
    rows = [ranks[at * world :][:world] for at in range(replicas)]
    sizes = st.integers(1, 6)
    shapes = data.draw(
        st.lists(
            st.one_of(st.tuples(sizes, sizes), st.tuples(sizes, sizes, sizes)),
            min_size=1,
            max_size=4,
        )
    )
    params = []
    for shape in shapes:
        numel = torch.Size(shape).numel()
        if replicas == 1 and data.draw(st.booleans()):
            before = data.draw(st.integers(0, 5))
            piece = -(-(before + numel) // world)
            params.append(flat(shape, before, piece, ranks))
        else:
            params.append(by_rows(shape, rows))
    results = exchange(params, ranks, data.draw(st.integers(1, 100)))
    for rank, of_rank in zip(ranks, results, strict=True):
        for param, result in zip(params, of_rank, strict=True):
            size = torch.Size(param.sharding.shape)
            whole = torch.arange(1.0, 1 + size.numel()).view(size)
            assert torch.equal(result, local(param, whole, rank))


def test_owners_have_equal_work_over_replicas_too() -> None:
    rows = [[0, 1, 2, 3], [4, 5, 6, 7]]
    params = [by_rows((64, 64), rows) for _ in range(32)] + [by_rows((64, 16), rows)] * 8
    owners = [matrix.owner for matrix in assign_owners(params, range(8))]
    assert sorted(owners.count(rank) for rank in range(8)) == [5] * 8


def test_a_matrix_that_a_rank_holds_whole_stays_there() -> None:
    params = [by_rows((4, 5, 6), [[0, 1], [2, 3]])]
    matrices = assign_owners(params, range(4))
    assert {matrix.owner for matrix in matrices if matrix.block.start[0] < 2} == {0, 2}
    assert {matrix.owner for matrix in matrices if matrix.block.start[0] >= 2} == {1, 3}


def test_thousands_of_ranks_are_planned_at_once() -> None:
    world = 4096
    params = [by_rows((8192, 1024), [list(range(world))]) for _ in range(40)]
    (bucket,) = plan_buckets(params, range(world), 17, 1 << 25)
    assert len(bucket.sent.windows) == 40
    assert bucket.sent.sizes.count(2 * 1024) == 40
    assert len(bucket.gathered.windows) == len(bucket.owned) * world
