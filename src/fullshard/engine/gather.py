"""The gather of one group: from one shard per rank to the full parameters on every rank.

    start    memory is taken, this rank's shard is encoded into it, the collective is issued
    finish   compute is ordered after the collective; what was staged is decoded
    release  the memory is given back
    abandon  ... after a failure, in the place of `finish`

Between `start` and `finish` lies the compute that hides the collective. `Routes` has the ways there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import Work

from fullshard import torch_border
from fullshard.engine.routes import Route, Routes
from fullshard.transport.streams import FSDPCommContext
from fullshard.transport.tags import Tag


class Gather:
    """The present gather of one group, by one of its routes.

    Invariants: all memory of a gather is allocated, written and freed on the all-gather stream. At most one route of a
    group has full parameters in memory, or on their way: `route`. ``group`` in a call is the one that observers are told of.
    """

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self.route: Route | None = None
        """The route used last: its parameters are in memory or on their way, if any are."""
        self.unfinished = False
        """Whether a gather was issued that is decoded when compute waits for it, not before."""
        self.work: Work | None = None
        """The work that the host waits for then; None if the stream is ordered after the collective."""
        self._not_before: list[Any] = []
        """Events that the next gather waits for."""
        self._below_autograd = torch_border.below_autograd()
        """Made once, which takes longer than to enter it."""

    def connect(self, context: FSDPCommContext) -> None:
        """Join a model's streams."""
        self._routes.connect(context)
        self._gathered = context.new_event()
        """On the all-gather stream: the full parameters are complete."""
        self._released = context.new_event()
        """On the compute stream: the last read of the gathered memory."""

    def not_before(self, event: Any) -> None:
        """Let the next gather from shards wait for ``event``: the all-gather stream, or the host if there are no streams."""
        self._not_before.append(event)

    def start(self, context: FSDPCommContext, group: Any, tag: Tag, *, kept: bool) -> None:
        """Issue a gather from the shards, or from the post-forward shard that was ``kept``.

        Before: nothing is in memory. After: `finish` comes next, even if it was decoded already.
        """
        routes, observer, asynchronous = self._routes, context.observer, context.asynchronous
        with context.all_gather:
            if context.releases:
                context.wait_for_releases()  # before the allocation: [Note: memory and streams], rule 1
            if self._not_before and not kept:
                self._wait_for_events(asynchronous=asynchronous)
            if kept:
                assert routes.post_forward is not None, "it was kept"
                route = routes.post_forward.route
                assert route is not None, "made when it was kept"
            else:
                route = routes.from_shards or routes.build()
            codec, transport, beside = route.codec, route.transport, route.beside
            work = None
            try:
                extra = None if beside is None else beside.encode()
                if transport is not None and not transport.in_place:
                    work = route.gather_in_one_message(
                        extra, tag, observer, group, async_op=not asynchronous
                    )
                else:
                    with self._below_autograd:
                        codec.encode()
                        outputs, inputs = codec.outputs, codec.inputs
                        # One call for all: each costs the host, and a small message the network's latency.
                        if extra is not None:
                            outputs, inputs = [*outputs, *extra[0]], [*inputs, *extra[1]]
                        if transport is not None:
                            if observer is not None:
                                aside = 0 if beside is None else beside.received_bytes
                                observer.calls("gather", group, codec.received_bytes + aside)
                            work = transport.gather(outputs, inputs, tag, async_op=not asynchronous)
                        elif extra is not None and extra[0]:
                            torch._foreach_copy_(*extra)
                    if observer is not None and transport is not None:
                        observer.called("gather", group, (work,))
            except BaseException:
                # No collective was issued, and nothing will wait for one.
                route.abandon()
                raise
            # From here on a failed step finds the gather, and waits for it (`abandon`).
            self.route, self.work, self.unfinished = route, work, True
            # A gather is decoded at once where the stream alone can wait for it. It is not where the host must wait,
            # nor where decoding takes memory that others release before compute needs this one. Little memory is taken at
            # once where there is room, and in a CUDA graph, where compute would wait for the copy.
            if asynchronous and beside is None:
                at_once = route.is_small and (context.in_capture or context.has_room)
                if at_once or not codec.packed:
                    self._decode(route, context, group)

    def finish(self, context: FSDPCommContext, group: Any) -> None:
        """Order the compute stream after the gather; staged messages are decoded first.

        Before: `start`.
        """
        route, observer = self.route, context.observer
        assert route is not None, "a gather is in flight"
        if self.unfinished:
            if observer is not None:
                observer.begins("all_gather_copy_out", group)
            with context.all_gather:
                if context.releases:
                    context.wait_for_releases()  # memory is taken here, too: rule 1
                self._decode(route, context, group)
            if observer is not None:
                observer.ends("all_gather_copy_out", group)
                observer.memory_of_gathers(group)  # staging is released, other memory was allocated
        if observer is None:
            self._gathered.wait()
        else:
            observer.waits("gather", group, self._gathered)
            self._gathered.wait()
            observer.waited("gather", group, self._gathered)
        kept = self._routes.post_forward
        if kept is not None and route is kept.route:
            self.drop_kept(context, group)  # it has been read

    def _decode(self, route: Route, context: FSDPCommContext, group: Any) -> None:
        """Wait for the collective, where the host must, and make the full parameters; on the all-gather stream."""
        codec, observer = route.codec, context.observer
        # NCCL's collectives order their stream, and return no work. Gloo's are done by a thread, for which the host
        # waits here: as late as possible, when compute needs the parameters.
        if self.work is not None:
            if observer is not None:
                observer.waits("gather", group)
            self.work.wait()
            if observer is not None:
                observer.waited("gather", group)
        if observer is not None and codec.packed:
            # This is the moment with the most memory: staging and full parameters, both.
            codec.allocate_params()
            observer.memory_of_gathers(group)
        with self._below_autograd:
            if route.rows is None:
                codec.decode()
            else:
                codec.decode_from(route.rows)
        if route.staged is not None:
            route.release_staged()
        if route.beside is not None:
            route.beside.decode()
        self.unfinished, self.work = False, None
        self._gathered.record()

    def abandon(self, context: FSDPCommContext) -> None:
        """Give memory of an unfinished gather back without decoding it, which could take more of it."""
        assert self.route is not None, "a gather is in flight"
        with context.all_gather:
            if self.work is not None:
                self.work.wait()
            self.route.abandon()
            self._gathered.record()
        self.unfinished, self.work = False, None

    def release(self, context: FSDPCommContext) -> None:
        """Give gathered memory back, unless it is kept; on the compute stream, which has read it."""
        route = self.route
        assert route is not None, "present memory was gathered"
        self._released.record()
        if not self._routes.keeps_memory:
            route.codec.release()
            if route.beside is not None:
                route.beside.release()
        if context.asynchronous:  # the host has nothing to wait for
            context.releases.append(self._released)

    def drop_kept(self, context: FSDPCommContext, group: Any) -> None:
        """Give the post-forward shard back, which is read by no gather."""
        assert self._routes.post_forward is not None, "one is kept"
        self._routes.post_forward.release()
        if context.observer is not None:
            context.observer.memory_of_gathers(group)

    def _wait_for_events(self, *, asynchronous: bool) -> None:
        for event in self._not_before:
            if asynchronous:
                event.wait()
            else:
                event.synchronize()
        self._not_before.clear()

    @property
    def aliases_shards(self) -> bool:
        """Whether the parameters gathered last are the shards themselves."""
        return self.route is not None and self.route.codec.aliases_shards

    @property
    def held_bytes(self) -> int:
        """Bytes of memory for gathering that there are now: full parameters, staging, a post-forward shard.

        Memory that is allocated and released within one call does not count: shards on their way up from host memory.
        """
        routes = self._routes
        ways = (routes.from_shards, routes.post_forward, routes.beside)
        return sum(way.held_bytes for way in ways if way is not None)
