"""The shards of tests/mds_shards, and the same as tar and parquet files."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT
from small_data import config
from written_shards import write_tar

from lockstep.data.build import open_data

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
