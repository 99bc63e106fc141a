"""Times of kernels, collectives and the host, from the shipped profiles; and how profiles are read."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard.errors import ConfigurationError
from fullshard.programs.plan_tool.machine import FAKE_COPY, MIB, Machine
from fullshard.programs.plan_tool.profile_file import (
    assumptions,
    known_profiles,
    load_profile,
    parse_profile,
    to_toml,
)
from fullshard.programs.plan_tool.program import Collective, HostWork, Kernel, Launch

PROFILES = sorted({path.stem for path in known_profiles().values()})


def matmul(rows: int, columns: int, inner: int, *, dtype: str = "bfloat16") -> Kernel:
    size = 2 if dtype == "bfloat16" else 4
    nbytes = size * (rows * inner + inner * columns + rows * columns)
    flops = 2 * rows * columns * inner
    return Kernel("aten.mm", "matmul", dtype, flops, nbytes, (1, rows, columns, inner))


def attention(length: int, *, name: str = "aten.attention", heads: int = 32) -> Kernel:
    flops = 2 * heads * length * length * 128
    shape = (heads, length, length, 128)
    return Kernel(name, "attention", "bfloat16", flops, 8 * heads * length * 128, shape)


def gather(mib: float, ranks: int, *, stride: int = 1, kind: str = "all_gather") -> Collective:
    return Collective(kind, int(mib * MIB), ranks, stride, "bfloat16")


def rises(values: list[float]) -> bool:
    return all(left <= right for left, right in itertools.pairwise(values))


@pytest.mark.parametrize("name", PROFILES)
def test_more_work_is_never_faster(name: str) -> None:
    machine = load_profile(name)
    sizes = [16, 100, 128, 129, 500, 768, 1000, 4096, 5000, 14336]
    for fixed in (64, 1024, 8192):
        assert rises([machine.kernel_seconds(matmul(n, fixed, fixed)) for n in sizes])
        assert rises([machine.kernel_seconds(matmul(fixed, n, fixed)) for n in sizes])
        assert rises([machine.kernel_seconds(matmul(fixed, fixed, n)) for n in sizes])
    assert rises([machine.kernel_seconds(attention(n)) for n in sizes])
    copies = [
        Kernel("aten.add", "memory", "float32", 0, n) for n in (0, 1, 1 << 10, 1 << 20, 1 << 30)
    ]
    assert rises([machine.kernel_seconds(copy) for copy in copies])


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_more_bytes_are_never_faster_and_cost_less_per_byte(name: str, kind: str) -> None:
    machine = load_profile(name)
    sizes = [2.0**power for power in range(-6, 15)]
    for ranks, stride in ((2, 1), (8, 1), (16, 1), (512, 1), (64, 8)):
        times = [
            machine.collective_seconds(gather(n, ranks, stride=stride, kind=kind)) for n in sizes
        ]
        per_byte = [seconds / size for seconds, size in zip(times, sizes, strict=True)]
        assert rises(times)
        assert all(left >= right * 0.999 for left, right in itertools.pairwise(per_byte))


@pytest.mark.parametrize("name", PROFILES)
def test_more_ranks_are_never_faster_at_equal_bytes(name: str) -> None:
    machine = load_profile(name)
    for kind, mib in itertools.product(
        ("all_gather", "reduce_scatter", "all_reduce"), (0.1, 16, 512)
    ):
        worlds = [1, 2, 4, 8, 16, 64, 512, 4096, 100_000]
        assert rises([machine.collective_seconds(gather(mib, n, kind=kind)) for n in worlds])


@pytest.mark.parametrize("name", PROFILES)
def test_large_products_reach_the_profiles_share_of_the_peak_and_thin_ones_are_bound_by_memory(
    name: str,
) -> None:
    machine = load_profile(name)
    large, thin = matmul(16384, 16384, 8192), matmul(16, 8192, 8192)
    share = large.flops / machine.kernel_seconds(large) / machine.flops_per_second("bfloat16")
    assert 0.93 < share < 1
    assert machine.kernel_seconds(thin) < 1.5 * thin.nbytes / machine.bytes_per_second


@pytest.mark.parametrize("name", PROFILES)
def test_attention_is_slower_per_operation_backward_and_for_short_sequences(name: str) -> None:
    machine = load_profile(name)

    def rate(kernel: Kernel) -> float:
        return kernel.flops / machine.kernel_seconds(kernel)

    assert rate(attention(8192, name="aten.attention_backward")) < rate(attention(8192))
    assert rate(attention(512)) < 0.7 * rate(attention(8192))


def test_the_table_of_8_h100_is_reproduced_whether_its_bandwidth_counts_the_own_part_or_not() -> (
    None
):
    machine = load_profile("h100")
    for mib, reported in ((1, 12.4), (4, 57.2), (16, 229), (64, 383)):
        seconds = machine.collective_seconds(gather(8 * mib, 8))
        for ranks in (7, 8):
            assert ranks * mib * MIB / seconds / 1e9 == pytest.approx(reported, rel=0.15)


def test_the_table_of_8_b200_is_reproduced() -> None:
    machine = load_profile("b200")
    reported = {1: 0.206, 4: 0.281, 16: 0.313, 64: 0.875, 128: 1.659, 256: 3.165}
    for mib, milliseconds in reported.items():
        seconds = machine.collective_seconds(gather(8 * mib, 8))
        assert seconds * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_a_slow_network_limits_groups_of_several_hosts_and_no_others() -> None:
    fast = load_profile("a100-80")
    slow = fast.with_network(gbit_per_host=400)
    assert slow.network.gbit_per_device == 50
    assert slow.collective_seconds(gather(512, 8)) == fast.collective_seconds(gather(512, 8))
    ratio = slow.collective_seconds(gather(512, 64)) / fast.collective_seconds(gather(512, 64))
    assert 1.7 < ratio < 2
    # Replicas of all devices of a host share its cards.
    replicas = slow.collective_seconds(gather(64, 8, stride=8, kind="all_reduce"))
    assert replicas == pytest.approx(2 * 64 * MIB * 7 / 8 / slow.network_bytes_per_second, rel=0.1)


def test_full_sharding_of_a_large_world_takes_longer_than_sharding_a_host_and_adding_replicas() -> (
    None
):
    machine = load_profile("h100")

    def step(*, shards: int, replicas: int, mib: float = 400) -> float:
        gathers = 2 * machine.collective_seconds(gather(mib, shards))
        reduction = machine.collective_seconds(gather(mib, shards, kind="reduce_scatter"))
        added = gather(mib / shards, replicas, stride=shards, kind="all_reduce")
        return gathers + reduction + machine.collective_seconds(added)

    # Within a few hosts the network is as fast as the links; with thousands the ring's hops count.
    assert step(shards=8192, replicas=1) > 3 * step(shards=8, replicas=1024)
    assert step(shards=16, replicas=1) < 1.5 * step(shards=8, replicas=2)


def test_the_host_takes_time_for_everything_that_it_issues() -> None:
    machine = load_profile("h100")
    one = Launch(0, Kernel("aten.add", "memory", "float32", 0, 8), "forward")
    many = Launch(0, replace(one.work, launches=10), "forward")
    assert 0 < machine.host_seconds(one) < machine.host_seconds(many)
    assert machine.host_seconds(one, is_compiled=True) < machine.host_seconds(one)
    assert machine.host_seconds(Launch(1, gather(1, 8), "forward")) > machine.host_seconds(one)
    assert machine.host_seconds(HostWork(3)) == 3 * machine.host_seconds(HostWork(1))


def test_the_fake_group_only_copies() -> None:
    machine = load_profile("h200").with_fake_group()
    whole = gather(512, 64)
    seconds = machine.collective_seconds(whole)
    copied = 2 * 512 * MIB * 63 / 64 / machine.bytes_per_second
    assert seconds == pytest.approx(copied + 63 * 2e-6, rel=0.01)
    assert machine.collective_seconds(gather(512, 64, kind="reduce_scatter")) < seconds / 30
    parts = replace(whole, messages=9)
    assert machine.collective_seconds(parts) == pytest.approx(copied + 9 * 63 * 2e-6, rel=0.01)
    # The host makes each copy, so a call with several messages takes it longer.
    one, nine = (machine.host_seconds(Launch(1, each, "forward")) for each in (whole, parts))
    assert nine - one == pytest.approx(8 * 63 * FAKE_COPY * machine.host.launch_us * 1e-6)


# --- profiles ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROFILES)
def test_every_profile_is_complete_says_where_its_values_come_from_and_survives_writing(
    name: str,
) -> None:
    machine = load_profile(name)
    assert machine.name == name
    assert parse_profile(to_toml(machine), where="written") == machine
    assert all(len(each.source) > 2 for each in assumptions(machine))
    assert machine.usable_bytes > 0


def test_a_profile_is_found_by_its_aliases_and_by_its_path(tmp_path) -> None:
    assert load_profile("A100") == load_profile("a100-80")
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(load_profile("b200")))
    assert load_profile(path) == load_profile(str(path)) == load_profile("b200")


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'h1000'.*Did you mean h100\?.*a100-40.*b200.*h200"
    ):
        load_profile("h1000")
    with pytest.raises(ConfigurationError, match=r"no file .*missing\.toml"):
        load_profile("missing.toml")


def older_text(*, is_synchronous: str) -> str:
    """Return a profile as version 0.1 has written it."""
    old = {"turn_us": "3000.0", "is_synchronous": is_synchronous}
    lines = [f'{name} = {value}\nsource.{name} = "measured"\n' for name, value in old.items()]
    return to_toml(load_profile("h100")).replace("[compiled]", f"{''.join(lines)}\n[compiled]")


def test_a_profile_of_a_gpu_that_an_older_version_has_written_is_read() -> None:
    read = parse_profile(older_text(is_synchronous="false"), where="old.toml")
    assert read == load_profile("h100")


@pytest.mark.parametrize("name", ["cpu", "CPU", "gloo", "laptop", "a file"])
def test_a_cpu_is_refused_with_what_to_plan_instead(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(older_text(is_synchronous="true"))
    with pytest.raises(ConfigurationError, match=r"Plans are of GPUs.*--gpu h100"):
        load_profile(path if name == "a file" else name)


def bad_text(machine: Machine) -> str:
    text = to_toml(machine)
    for right, wrong in (
        ("processors = 132", "procesors = 132"),
        ("\nlaunch_us = ", "\nlaunch_us = -"),
        ("\nhop_us = 14.0", '\nhop_us = "fast"'),
        ("floor_us = 2.0\n", ""),
        ("[overlap]", "[overlaps]"),
        ("peak_tb_s = 3.35", "peak_tb_s = inf"),
    ):
        assert right in text
        text = text.replace(right, wrong)
    return text


def test_a_bad_profile_is_refused_in_one_message_with_all_offenders() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_profile(bad_text(load_profile("h100")), where="bad.toml")
    message = str(caught.value)
    for offender in (
        "matmul.processors is missing",
        "matmul.procesors is not known. Did you mean matmul.processors?",
        "host.launch_us must be 0 or more",
        "network.hop_us must be a finite number, got 'fast'",
        "traffic.floor_us is missing",
        "[overlap] is missing",
        "overlaps is not known. Did you mean overlap?",
        "traffic.peak_tb_s must be a finite number",
    ):
        assert offender in message
    with pytest.raises(ConfigurationError, match="is not TOML"):
        parse_profile("[", where="broken")


def test_values_that_contradict_each_other_are_refused() -> None:
    text = to_toml(load_profile("h100")).replace("[8.0, 0.59]", "[200.0, 0.59]")
    with pytest.raises(ConfigurationError, match="sizes that rise"):
        parse_profile(text, where="bad")
    text = to_toml(load_profile("h100")).replace("outside_gib = 1.6", "outside_gib = 100")
    with pytest.raises(ConfigurationError, match=r"less than memory\.capacity_gib"):
        parse_profile(text, where="bad")
