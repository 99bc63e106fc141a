"""Memory of a run's data: how many tokens of how many sequences, and a digest of samples.

The last tokens are held out. If data are appended, replaced or cut short between two starts, others are the last: tokens
that were held out would be trained on, and windows would come in another order. So a run that is resumed must find the data
that it began with.

    tokens     | s |     | s |     | s |   ...   | s |       the digest has the samples s, spread evenly from end to end

Of data that are not larger than all samples, the digest has every token. A change between two samples is not noticed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fullshard.checkpoint.rank_group import RankGroup
from fullshard.checkpoint.tensor_files import memory_of
from fullshard.errors import ConfigurationError, ranks_text
from fullshard.files import atomic_write, content_of
from fullshard.programs.train.data import Data
from fullshard.programs.train.windows import Tokens

SAMPLES = 512
SAMPLE_TOKENS = 1 << 14
MAX_RECORD_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRecord:
    """The data of a run. Equal records are of the same data, as far as the samples show."""

    tokens: int
    sequences: int
    digest: str

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens in {self.sequences:,} sequence{'s' * (self.sequences > 1)}"

    def write(self, path: Path) -> None:
        """Write it to a file."""
        with atomic_write(path, durable=True) as file:
            file.write(json.dumps(asdict(self), indent=2).encode() + b"\n")


def read_record(path: Path) -> DataRecord | None:
    """Return the record in a file; None if there is no file.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        content = json.loads(content_of(path, max_bytes=MAX_RECORD_BYTES))
        return DataRecord(
            tokens=int(content["tokens"]),
            sequences=int(content["sequences"]),
            digest=str(content["digest"]),
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigurationError(
            f"{path} says which data the run has, and cannot be read: {error!r}. If the data are those of the last start, "
            "remove it."
        ) from error


def record_of(data: Data) -> DataRecord:
    """Return the record of data: of the tokens, not of their files, so another tokenizer or dtype of a file counts, too."""
    sequences = [tokens for tokens, _ in data.split]
    lengths = [len(each) for each in sequences]
    digest = hashlib.sha256(json.dumps(lengths).encode())
    for sample in _samples(sequences, sum(lengths)):
        values = sample.values.long().contiguous()  # whatever the dtype in which a file has them
        digest.update(memory_of(values))
    return DataRecord(tokens=sum(lengths), sequences=len(lengths), digest=digest.hexdigest())


def _samples(sequences: Sequence[Tokens], total: int) -> Iterable[Tokens]:
    """Yield the samples, each in parts if it goes over the end of a sequence."""
    if total <= SAMPLES * SAMPLE_TOKENS:
        yield from sequences
        return
    starts = [number * (total - SAMPLE_TOKENS) // (SAMPLES - 1) for number in range(SAMPLES)]
    begin, waiting = 0, 0
    for sequence in sequences:
        end = begin + len(sequence)
        while waiting < SAMPLES and starts[waiting] < end:
            stop = starts[waiting] + SAMPLE_TOKENS
            first = max(starts[waiting], begin)
            yield sequence.slice(first - begin, min(stop, end) - begin)
            if stop > end:
                break  # the rest of this sample is in the next sequence
            waiting += 1
        begin = end


def record_of_all_ranks(data: Data, ranks: RankGroup) -> DataRecord:
    """Return the record of the data. All ranks call it, and must have opened the same.

    Raises:
        ConfigurationError: they have not; the same on all ranks.
    """
    records = ranks.collect(record_of(data))
    if len(set(records)) > 1:
        by_record: dict[DataRecord, list[int]] = {}
        for rank, record in zip(ranks.ranks, records, strict=True):
            by_record.setdefault(record, []).append(rank)
        lines = [f"\n  {ranks_text(of)}: {each}" for each, of in by_record.items()]
        raise ConfigurationError(
            f"All ranks must read the same data; those at {data.source} differ in number or content:{''.join(lines)}\n"
            "Copy the same files to every host."
        )
    return records[0]
