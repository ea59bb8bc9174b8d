"""The shards of tests/mds_shards, and the same as tar files."""

import json
import shutil
from pathlib import Path

from conftest import ROOT
from small_data import config
from written_shards import write_tar

from lockstep.data.build import open_data

SHARDS = ROOT / "tests" / "mds_shards"
EXPECTED = json.loads((SHARDS / "expected.json").read_text())  # by part, of each shard: label and SHA-256 of each image


def as_tar(root: Path) -> Path:
    """Write the same shards as tar files."""
    for part in EXPECTED:
        options = {"window": 1, "val_fraction": 0, "test_fraction": 0, "index_dir": str(root / "index")}
        images = getattr(open_data(config("shards", **options), str(SHARDS / "raw")), part)
        first = 0
        for number, shard in enumerate(EXPECTED[part]):
            members = {}
            for place, (label, _) in enumerate(shard):
                members[f"{place:03}.jpg"] = images.encoded(first + place).getvalue()
                members[f"{place:03}.cls"] = label.encode()
            first += len(shard)
            write_tar(root / f"{part}-{number:05}.tar", members)
    shutil.rmtree(root / "index")
    return root
