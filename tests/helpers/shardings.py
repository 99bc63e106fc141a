"""Random tensors cut in random ways, for property tests."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from fullshard.layout.blocks import Block
from fullshard.layout.sharding import Cuts, Sharding

shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@st.composite
def cuts_of(draw: st.DrawFn, size: int, *, before: int = 0) -> Cuts:
    """Regular or not, with the first cut up to ``before`` elements before the tensor."""
    if draw(st.booleans()):
        return range(-draw(st.integers(0, before)), max(size, 1), draw(st.integers(1, size + 3)))
    return (0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))))


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    """With one list of holders, of which some may have nothing."""
    shape = draw(shapes)
    flat = draw(st.booleans())
    if flat:
        cuts: tuple[Cuts, ...] = (draw(cuts_of(math.prod(shape), before=12)),)
    else:
        cuts = tuple(draw(cuts_of(size)) for size in shape)
    ranks = range(math.prod(map(len, cuts)) + draw(st.integers(0, 2)))
    order = draw(st.none() | st.permutations(range(len(shape))).map(tuple))
    return Sharding(
        shape=shape,
        order=order,
        flat=flat,
        cuts=cuts,
        holders=(tuple(draw(st.permutations(ranks))),),
    )


@st.composite
def blocks_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Block:
    """Any block of a tensor, which may be empty."""
    edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Block(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))
