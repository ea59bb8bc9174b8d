"""Write the shards of this folder by MosaicML's own writer, which `pip install mosaicml-streaming` installs:

    python tests/mds_shards/write.py

`raw` and `zstd` have the same images and labels, in the same order. `expected.json` has, of each shard, each sample's
label and the SHA-256 of its image. The shards are committed, since the package's requirements are large.
"""

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image
from streaming.base.format.mds.encodings import mds_encode
from streaming.base.format.mds.writer import MDSWriter

HERE = Path(__file__).parent
RAW = {"image": "jpeg", "label": "int"}
COMPRESSED = {"image": "bytes", "label": "str", "notes": "json", "more": "pkl"}  # the last two are passed over
COUNTS = {"train": 60, "val": 9, "test": 12}


def main() -> None:
    rng = np.random.default_rng(4)
    expected: dict[str, list[list[list[str]]]] = {}
    for part, count in COUNTS.items():
        raw = MDSWriter(out=str(HERE / "raw" / part), columns=RAW, size_limit=12_000)
        options = {"compression": "zstd:7", "hashes": ["sha1"], "size_limit": 12_600}
        compressed = MDSWriter(out=str(HERE / "zstd" / part), columns=COMPRESSED, **options)
        samples = []
        for _ in range(count):
            label = int(rng.integers(0, 3))
            pixels = rng.integers(0, 90, (12, 12, 3)) + 70 * label
            content = mds_encode("jpeg", Image.fromarray(pixels.astype(np.uint8)))
            (HERE / "image.jpg").write_bytes(content)
            with Image.open(HERE / "image.jpg") as image:  # the writer takes the file of such an image
                raw.write({"image": image, "label": label})
            compressed.write({"image": content, "label": str(label), "notes": {"a": [1]}, "more": {"a": 1}})
            samples.append([str(label), hashlib.sha256(content).hexdigest()])
        raw.finish()
        compressed.finish()
        shards = json.loads((HERE / "raw" / part / "index.json").read_text())["shards"]
        borders = np.cumsum([0, *(shard["samples"] for shard in shards)]).tolist()
        expected[part] = [samples[start:stop] for start, stop in pairwise(borders)]
    (HERE / "image.jpg").unlink()
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
