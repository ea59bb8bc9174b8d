"""The shards of tests/mds_shards, and the same as tar and parquet files."""

import json
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from conftest import ROOT
from small_data import config
from written_shards import write_tar

from lockstep.data.build import open_data
from lockstep_streams.mds import NUMBERS

SHARDS = ROOT / "tests" / "mds_shards"
EXPECTED = json.loads((SHARDS / "expected.json").read_text())  # by part, of each shard: label and SHA-256 of each image


def as_tar(root: Path) -> Path:
    """Write the same shards as tar files."""
    for name, samples in same_shards(root / "index"):
        members = {}
        for place, (label, content) in enumerate(samples):
            members[f"{place:03}.jpg"] = content
            members[f"{place:03}.cls"] = label.encode()
        write_tar(root / f"{name}.tar", members)
    return root


def as_parquet(root: Path) -> Path:
    """Write the same shards as parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root.mkdir()
    for name, samples in same_shards(root / "index"):
        columns = {"image": [{"bytes": content} for _, content in samples], "label": [label for label, _ in samples]}
        pq.write_table(pa.table(columns), root / f"{name}.parquet", row_group_size=5)
    return root


def same_shards(scratch: Path) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Yield the name of each shard, and the label and the image of each of its samples."""
    for part in EXPECTED:
        options = {"window": 1, "val_fraction": 0, "test_fraction": 0, "index_dir": str(scratch)}
        images = getattr(open_data(config("shards", **options), str(SHARDS / "raw")), part)
        first = 0
        for number, shard in enumerate(EXPECTED[part]):
            contents = (images.encoded(first + place).getvalue() for place in range(len(shard)))
            yield f"{part}-{number:05}", [(label, content) for (label, _), content in zip(shard, contents, strict=True)]
            first += len(shard)
    shutil.rmtree(scratch)


def description_of(columns: Mapping[str, str], size_limit: int) -> dict[str, Any]:
    """Return the description of a shard, as MosaicML's writer puts it into the shard.

    Args:
        columns: the encoding of each column, by name.
        size_limit: bytes.
    """
    names = sorted(columns)
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": size_limit,
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": [
            np.dtype(NUMBERS[kind]).itemsize if (kind := columns[name]) in NUMBERS else None for name in names
        ],
    }


def write_mds(
    file: IO[bytes], columns: Mapping[str, str], size_limit: int, count: int, samples: Iterable[Mapping[str, bytes]]
) -> None:
    """Write a shard into an empty file, with the bytes of MosaicML's writer.

    Args:
        file: a file in which one can go back.
        columns, size_limit: see `description_of`.
        count: of the samples.
        samples: the encoded value of each column, by name.
    """
    description = json.dumps(description_of(columns, size_limit), sort_keys=True).encode()
    starts = [4 + 4 * (count + 1) + len(description)]
    file.seek(starts[0])
    for sample in samples:
        values = {name: sample[name] for name in sorted(columns)}
        sizes = [len(value) for name, value in values.items() if columns[name] not in NUMBERS]
        starts.append(starts[-1] + file.write(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values.values())))
    file.seek(0)
    file.write(struct.pack("<I", count) + np.array(starts, "<u4").tobytes() + description)
