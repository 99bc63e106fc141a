"""Times of a machine: for a kernel, for a collective, and for the host that issues them.

    Kernel      matrix product   tiles over processors, in waves; never faster than its traffic to memory
                attention        the same, with the throughput of its own kernels
                memory           bytes / achieved bandwidth; every kernel has a floor
    Collective  within a host    a measured table of sizes and times
                between hosts    a ring: the slower of network and links, and a latency for every hop
    Transfer    to and from host memory: bytes / what the link gives each GPU
    Entry       of the host      time to issue it; small models wait for this
                HostCompute      bytes / what host memory and this rank's cores give

Every number comes from a profile (`profile_file`), with its source. Nothing here is about a model or about the engine.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fullshard.programs.plan_tool.program import (
    Allocate,
    Collective,
    Entry,
    Free,
    HostCompute,
    HostWork,
    Kernel,
    Launch,
    Transfer,
)

MICRO = 1e-6
MILLI = 1e-3
GIGA = 1e9
TERA = 1e12
GIB = 1 << 30
MIB = 1 << 20
BITS_PER_BYTE = 8

CHECKPOINT_IN_FORWARD = 0.5
"""Share of `checkpoint_us` in forward, where torch notes the state of the random numbers and what it does not keep; in backward it
restores that state and runs the call again. On an H200 0.9 of 1.8 ms were in forward."""

FAKE_COPY = 0.22
"""Host time of each copy that the fake group makes, in operations of a model: a copy has no module and no gradient."""

SPLITS = (1, 2, 4, 8)
"""Numbers of parts into which a library may cut the inner dimension of a product, so that all processors have work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """Memory of the device, and the part of it that torch's allocator never sees."""

    TITLE: ClassVar[str] = "memory of the device"

    capacity_gib: float
    """Total in the driver's report."""
    outside_gib: float
    """Memory taken outside of torch: the context of the device, kernels, buffers of the collectives' library."""
    workspace_mib: float
    """Memory that the library for matrix products holds inside of torch's, for each thread that multiplies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatmulFacts:
    """Matrix products."""

    TITLE: ClassVar[str] = "matrix products"

    peak_tflops: Mapping[str, float]
    """Peaks in the data sheet by dtype, without sparsity."""
    efficiency: Mapping[str, float]
    """Share of the peak that large products reach in a long run, by dtype."""
    processors: int
    """Number of processors, each of which works on one tile at a time."""
    tiles: tuple[tuple[float, float, float], ...]
    """Rows, columns and relative throughput of the tiles that the library chooses from."""
    short_inner: float
    """A tile's start and end cost as much as this many elements of the inner dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionFacts:
    """Fused attention. Shares are of the peak of matrix products."""

    TITLE: ClassVar[str] = "attention"

    forward: float
    """The share for long sequences and heads of 128."""
    backward: float
    half_length: float
    """The length of sequences that reach half of it."""
    half_width: float
    """The width of heads that reach half of what endlessly wide ones would."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficFacts:
    """Kernels that only read and write memory."""

    TITLE: ClassVar[str] = "memory traffic"

    peak_tb_s: float
    """Rate in the data sheet."""
    efficiency: float
    """The share that large kernels reach."""
    floor_us: float
    """The shortest kernel, of any kind."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """Times of the host to issue work."""

    TITLE: ClassVar[str] = "host"

    launch_us: float
    """An operation of torch, with the Python around it."""
    kernel_us: float
    """Each further kernel of the same operation."""
    collective_us: float
    event_us: float
    """Time to record an event, or to let a stream wait for it."""
    allocation_us: float
    """Time to take memory from the allocator, or to give it back."""
    hook_us: float
    """A hook of the engine: one group in one pass."""
    checkpoint_us: float
    """A call whose activations are recomputed, beside its operations: in forward and in backward together."""
    decision_us: float
    """An operation about which a policy of selective recomputation decides, each time it runs; none in compiled blocks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileFacts:
    """Savings of a compiled block."""

    TITLE: ClassVar[str] = "compiled blocks"

    traffic: float
    """The share of the time of memory-bound kernels that is left after fusion."""
    host: float
    """The share of the host's time for operations that is left."""
    activations: float
    """The share of the bytes for backward that is kept, where the step itself recomputes nothing. The compiler recomputes
    what is cheap."""
    recomputed_activations: float
    """The same where the step recomputes blocks, or parts of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFacts:
    """Collectives among the devices of one host."""

    TITLE: ClassVar[str] = "links within a host"

    devices_per_host: int
    all_gather: tuple[tuple[float, float], ...]
    """MiB that a rank has afterwards, and milliseconds, of all devices of a host. Larger ones have the last bandwidth."""
    reduce_scatter: float
    """Its time relative to an all-gather of as many bytes."""
    all_reduce: float
    """The same. A ring has 2, as it sends everything twice; switches that add have less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkFacts:
    """Collectives between hosts."""

    TITLE: ClassVar[str] = "network between hosts"

    gbit_per_device: float
    """Rate in each direction; the bandwidth of a host divided by its devices."""
    efficiency: float
    """The share that large messages reach."""
    base_us: float
    """Fixed time of every collective between hosts."""
    hop_us: float
    """Time from host to host."""
    link_hop_us: float
    """Time from device to device within a host, in a ring that also goes through the network."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadFacts:
    """Host memory and the links to it, for shards that are there."""

    TITLE: ClassVar[str] = "host memory"

    memory_gib: float
    """Memory of a host, for all its ranks."""
    memory_gb_s: float
    """Rate at which all cores of a host together read and write."""
    cores: int
    """Cores of a host."""
    core_gb_s: float
    """Highest rate at which one core reads and writes while it updates parameters."""
    norm_gb_s: float
    """Rate at which norms of gradients read: torch computes them on one core."""
    to_device_gb_s: float
    """Rate from pinned memory, when one device copies."""
    to_host_gb_s: float
    """Rate to pinned memory. Both ways at the same time are as fast."""
    unpinned_gb_s: float
    """Rate from and to memory that is not pinned."""
    latency_us: float
    """Fixed time of every copy."""
    devices_per_link: int
    """Number of devices that share one link when all copy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapFacts:
    """Compute and collectives at the same time."""

    TITLE: ClassVar[str] = "overlap"

    compute_slowdown: float
    """Time of a kernel while a collective runs on the same device, relative to alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Hosts of one kind of device, as a profile describes them."""

    name: str
    title: str
    aliases: tuple[str, ...]
    memory: MemoryFacts
    matmul: MatmulFacts
    attention: AttentionFacts
    traffic: TrafficFacts
    host: HostFacts
    compiled: CompileFacts
    links: LinkFacts
    network: NetworkFacts
    overlap: OverlapFacts
    offload: OffloadFacts
    sources: Mapping[str, str]
    """Origin of each value, by its full name, such as "matmul.efficiency"."""
    bands: Mapping[str, float]
    """The relative error of a section's times, by its name."""
    is_fake_group: bool = False
    """Collectives are those of torch's fake group: this rank copies its own piece, and nothing is sent."""

    # --- memory

    @property
    def usable_bytes(self) -> int:
        """Memory that torch's allocator can reserve."""
        return int((self.memory.capacity_gib - self.memory.outside_gib) * GIB)

    @property
    def workspace_bytes(self) -> int:
        """Memory of torch's allocator that the library for matrix products holds for a thread."""
        return int(self.memory.workspace_mib * MIB)

    # --- kernels

    def kernel_seconds(self, kernel: Kernel, *, is_compiled: bool = False) -> float:
        """Return how long a kernel runs by itself.

        Args:
            kernel: the work.
            is_compiled: it belongs to a compiled block, whose memory-bound kernels are fused.
        """
        floor = self.traffic.floor_us * MICRO * kernel.launches
        seconds = kernel.nbytes / self.bytes_per_second
        match kernel.kind:
            case "matmul":
                seconds = max(seconds, self._matmul_seconds(kernel))
            case "attention":
                seconds = max(seconds, self._attention_seconds(kernel))
            case "memory" if is_compiled:
                return (seconds + floor) * self.compiled.traffic
        return seconds + floor

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth of memory that large kernels reach."""
        return self.traffic.peak_tb_s * TERA * self.traffic.efficiency

    def flops_per_second(self, dtype: str) -> float:
        """Return the flops per second of large matrix products. A dtype that the profile does not know computes like float32."""
        known = dtype if dtype in self.matmul.peak_tflops else "float32"
        return self.matmul.peak_tflops[known] * TERA * self.matmul.efficiency[known]

    def peak_flops(self, dtype: str) -> float:
        """Return the data sheet's throughput, for utilisation. A dtype that is not known counts as float32."""
        known = dtype if dtype in self.matmul.peak_tflops else "float32"
        return self.matmul.peak_tflops[known] * TERA

    def _matmul_seconds(self, kernel: Kernel) -> float:
        rate = self.flops_per_second(kernel.dtype)
        if len(kernel.shape) != 4:
            return kernel.flops / rate
        batch, rows, columns, inner = kernel.shape
        facts = self.matmul
        # Each candidate takes longer for a larger product, so the least of them does, too.
        return min(
            math.ceil(self._num_tiles(kernel.shape, tile) * split / facts.processors)
            * (2 * tile[0] * tile[1] * (inner / split + facts.short_inner))
            / (rate / facts.processors * tile[2])
            # The parts are added up in float32.
            + (split - 1) * 4 * batch * rows * columns / self.bytes_per_second
            for tile in facts.tiles
            for split in SPLITS
        )

    def _num_tiles(self, shape: tuple[int, ...], tile: tuple[float, float, float]) -> int:
        batch, rows, columns, _ = shape
        return batch * min(
            math.ceil(rows / tile[0]) * math.ceil(columns / tile[1]),
            math.ceil(rows / tile[1]) * math.ceil(columns / tile[0]),
        )

    def _attention_seconds(self, kernel: Kernel) -> float:
        facts = self.attention
        share = facts.backward if "backward" in kernel.name else facts.forward
        rate = self.peak_flops(kernel.dtype) * share
        if len(kernel.shape) == 4:
            heads, queries, keys, width = kernel.shape
            rate *= (width / (width + facts.half_width)) * (1 + facts.half_width / 128)
            rate *= keys / (keys + facts.half_length)
            rate *= min(1.0, heads * max(1.0, queries / 128) / self.matmul.processors)
        return kernel.flops / rate

    # --- collectives

    def collective_seconds(self, collective: Collective) -> float:
        """Return how long a collective runs, from when all ranks have come."""
        if collective.ranks <= 1:
            return self.traffic.floor_us * MICRO
        if self.is_fake_group:
            return self._fake_seconds(collective)
        if (collective.ranks - 1) * collective.stride < self.links.devices_per_host:
            return self._seconds_within_host(collective.kind, collective.nbytes, collective.ranks)
        return self._seconds_between_hosts(collective)

    def hosts_of(self, collective: Collective) -> int:
        """Return how many hosts the ranks of a collective are on."""
        return math.ceil(collective.ranks / self._ranks_per_host(collective))

    def _ranks_per_host(self, collective: Collective) -> int:
        return min(collective.ranks, max(1, self.links.devices_per_host // collective.stride))

    def _seconds_within_host(self, kind: str, nbytes: int, ranks: int) -> float:
        """Scale the table: of what a rank has in the end, its own part does not travel."""
        own = 1 - 1 / max(2, self.links.devices_per_host)
        seconds = self._table_seconds(nbytes / MIB) * (1 - 1 / ranks) / own
        return seconds * self._relative_to_all_gather(kind)

    def _relative_to_all_gather(self, kind: str) -> float:
        return {
            "reduce_scatter": self.links.reduce_scatter,
            "all_reduce": self.links.all_reduce,
        }.get(kind, 1.0)

    def _table_seconds(self, mib: float) -> float:
        """Interpolate the table by logarithms; beyond its end the time grows with the bytes."""
        table = self.links.all_gather
        if mib <= table[0][0]:
            return table[0][1] * MILLI
        if mib >= table[-1][0]:
            return table[-1][1] * MILLI * mib / table[-1][0]
        index = bisect_left(table, mib, key=lambda row: row[0])
        (small, fast), (large, slow) = table[index - 1 : index + 1]
        share = math.log(mib / small) / math.log(large / small)
        return MILLI * fast * math.exp(share * math.log(slow / fast))

    def _seconds_between_hosts(self, collective: Collective) -> float:
        """Return the time of a ring through all hosts; of an all-reduce also that of a tree, if it is less.

        A ring enters and leaves each host once per device, so all network cards work at once. Groups that have only
        some devices of each host share the cards with the groups of the others.
        """
        ranks, hosts = collective.ranks, self.hosts_of(collective)
        per_host = self._ranks_per_host(collective)
        sent = collective.nbytes * (1 - 1 / ranks)
        network = sent / (self.network_bytes_per_second * per_host)
        links = self._seconds_within_host("all_gather", collective.nbytes, per_host)
        seconds = max(network, links if per_host > 1 else 0.0)
        latency = (hosts * self.network.hop_us + (ranks - hosts) * self.network.link_hop_us) * MICRO
        base = self.network.base_us * MICRO
        if collective.kind == "all_reduce":
            depth = math.ceil(math.log2(hosts)) * self.network.hop_us
            tree = 2 * (depth + (per_host - 1) * self.network.link_hop_us) * MICRO
            return base + 2 * seconds + min(2 * latency, tree)
        if collective.kind == "reduce_scatter":
            seconds = max(network, links * self.links.reduce_scatter if per_host > 1 else 0.0)
        return base + seconds + latency

    @property
    def network_bytes_per_second(self) -> float:
        """Bytes per second that one device sends to other hosts in large messages."""
        return self.network.gbit_per_device * GIGA / BITS_PER_BYTE * self.network.efficiency

    def _fake_seconds(self, collective: Collective) -> float:
        """Return the time of the copies with which torch's fake group stands in for a collective."""
        copies = _fake_copies(collective)
        copied = collective.nbytes // collective.ranks * copies // collective.messages
        return copies * self.traffic.floor_us * MICRO + 2 * copied / self.bytes_per_second

    def with_network(
        self, *, gbit_per_device: float | None = None, gbit_per_host: float | None = None
    ) -> Machine:
        """Return the same machine with another network; exactly one bandwidth must be given."""
        if gbit_per_device is None:
            assert gbit_per_host is not None
            gbit_per_device = gbit_per_host / self.links.devices_per_host
        network = replace(self.network, gbit_per_device=gbit_per_device)
        sources = {**self.sources, "network.gbit_per_device": "given by the user"}
        return replace(self, network=network, sources=sources)

    def with_fake_group(self) -> Machine:
        """Return the same machine with torch's fake group, on which one process plays one rank of many."""
        return replace(self, is_fake_group=True)

    # --- host memory

    def ranks_on_host(self, ranks: int) -> int:
        """Return how many of a run's ranks share a host."""
        return 1 if self.is_fake_group else min(ranks, self.links.devices_per_host)

    @property
    def host_memory_bytes(self) -> int:
        """The memory of a host."""
        return int(self.offload.memory_gib * GIB)

    def transfer_seconds(self, transfer: Transfer) -> float:
        """Return how long a copy takes while every rank of the host makes one like it."""
        facts, ranks = self.offload, self.ranks_on_host(transfer.ranks)
        rate = facts.unpinned_gb_s
        if transfer.is_pinned:
            is_up = transfer.direction == "to device"
            rate = facts.to_device_gb_s if is_up else facts.to_host_gb_s
        rate = min(rate / min(ranks, facts.devices_per_link), facts.memory_gb_s / ranks)
        return facts.latency_us * MICRO + transfer.nbytes / (rate * GIGA)

    def host_kernel_seconds(self, kernel: Kernel, ranks: int) -> float:
        """Return how long the host computes on its memory while every rank of the host does."""
        facts, here = self.offload, self.ranks_on_host(ranks)
        cores = max(1, facts.cores // here)  # as the trainer sets the number of threads
        rate = min(cores * facts.core_gb_s, facts.memory_gb_s / here)
        if kernel.name.endswith("norm"):
            rate = min(rate, facts.norm_gb_s)
        return kernel.nbytes / (rate * GIGA)

    # --- the host

    def host_seconds(self, entry: Entry, *, is_compiled: bool = False) -> float:
        """Return how long the host needs to issue an entry of a program."""
        host = self.host
        match entry:
            case Launch(work=Kernel(launches=launches)):
                seconds = host.launch_us + max(0, launches - 1) * host.kernel_us
                return MICRO * seconds * (self.compiled.host if is_compiled else 1.0)
            case Launch(work=Collective() as collective):
                copies = _fake_copies(collective) if self.is_fake_group else 0
                return MICRO * (host.collective_us + copies * FAKE_COPY * host.launch_us)
            case Launch(work=Transfer()):
                return MICRO * host.launch_us
            case HostWork(count=count, kind="checkpoint"):
                return MICRO * host.checkpoint_us * CHECKPOINT_IN_FORWARD * count
            case HostWork(count=count, kind="recomputation"):
                return MICRO * host.checkpoint_us * (1 - CHECKPOINT_IN_FORWARD) * count
            case HostWork(count=count, kind="decision"):
                return 0.0 if is_compiled else MICRO * host.decision_us * count
            case HostWork(count=count):
                return MICRO * host.hook_us * count
            case HostCompute(kernel=kernel, ranks=ranks):
                return MICRO * host.launch_us + self.host_kernel_seconds(kernel, ranks)
            case Allocate() | Free():
                return MICRO * host.allocation_us
        return MICRO * host.event_us


def _fake_copies(collective: Collective) -> int:
    """Return how many copies torch's fake group makes: of a gather's messages one for each other rank."""
    others = collective.ranks - 1 if collective.kind == "all_gather" else 1
    return others * collective.messages
