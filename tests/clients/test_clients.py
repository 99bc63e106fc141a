"""Clients of FSDP with fullshard in the place of torch's: `make test-clients` runs them, `make test` does not.

Importing the clients alone takes longer than most other tests together.
"""

import importlib.util
import os

import pytest

from benchmarks.client_rows import ROWS, Row
from benchmarks.clients import Bench, examine, verdicts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),  # each job has its own
    pytest.mark.skipif(
        "FULLSHARD_TEST_CLIENTS" not in os.environ, reason="make test-clients runs it"
    ),
]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    installed = [row for row in ROWS if not missing(row)]
    bench = Bench("cpu", 2, tmp_path_factory.mktemp("clients"), installed)
    yield bench
    bench.close()


def missing(row: Row) -> list[str]:
    return [name for name in row.needs if importlib.util.find_spec(name) is None]


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "cpu" in row.devices], ids=lambda row: row.name
)
def test_a_client_has_the_losses_of_torch_and_exchanges_checkpoints_with_it(bench, row):
    if absent := missing(row):
        pytest.skip(f"not installed: {', '.join(absent)}")
    assert verdicts(row, examine(bench, row)) == []
