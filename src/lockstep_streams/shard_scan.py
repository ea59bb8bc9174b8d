"""Find the images of a shard, whatever its format."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from lockstep_streams.mds import scan_mds
from lockstep_streams.shard_files import Shard, Suffixes, scan_parquet, scan_tar

EXTENSIONS = (".tar", ".parquet", ".mds", ".mds.zstd")
PACKED = (".parquet", ".zstd")
LONGEST_NAME = 1024  # bytes of the name of an image


def is_packed(path: Path | str) -> bool:
    """Check whether the images of a shard can't be read where they lie, because the shard is compressed."""
    return str(path).lower().endswith(PACKED)


def scan(path: Path | str, image: Suffixes, label: str | None, source: Path, packed: IO[bytes]) -> Shard:
    """Return the images of a shard, and copy them to `packed` if it is compressed.

    Args:
        path: the shard's name, for messages; its ending tells the format.
        image, label: see `scan_tar`, `scan_parquet` and `scan_mds`.
        source: the shard.
        packed: the file to copy to.

    Raises:
        UserError: The shard is damaged, or has no such images or labels.
    """
    ending = str(path).lower()
    if ending.endswith(".tar"):
        return scan_tar(path, image, label, source)
    scan_packed = scan_parquet if ending.endswith(".parquet") else scan_mds
    return scan_packed(path, image, label, source, packed)


def stored_name(name: str) -> bytes:
    """Return the name of an image in a column, in which all take as much room as the longest: long ones are cut."""
    encoded = name.encode("utf-8", "surrogateescape")
    if len(encoded) <= LONGEST_NAME:
        return encoded
    return encoded[: LONGEST_NAME - 65] + b"~" + hashlib.sha256(encoded).hexdigest().encode()


@dataclass(frozen=True)
class Scanned:
    """The images of a shard as columns.

    Attributes:
        names: of the images.
        label_of: of each image, the number of its label in `labels`.
        labels: in the order of appearance.
        starts, sizes: where each image lies.
        label_source, class_names, passed_over: see `Shard`.
    """

    names: NDArray[np.bytes_]
    label_of: NDArray[np.int32]
    labels: list[str]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    label_source: str = ""
    class_names: tuple[str, ...] = ()
    passed_over: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, shard: Shard) -> "Scanned":
        """Return the columns of the images of a shard."""
        numbers: dict[str, int] = {}
        label_of = [numbers.setdefault(each.label, len(numbers)) for each in shard.samples]
        return cls(
            np.array([stored_name(each.name) for each in shard.samples], dtype=np.bytes_),
            np.array(label_of, dtype=np.int32),
            [*numbers],
            np.array([each.start for each in shard.samples], dtype=np.int64),
            np.array([each.size for each in shard.samples], dtype=np.int64),
            shard.label_source,
            shard.class_names,
            shard.passed_over,
        )

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the columns by name."""
        return {"names": self.names, "label_of": self.label_of, "starts": self.starts, "sizes": self.sizes}

    def facts(self) -> dict[str, Any]:
        """Return the rest, for JSON."""
        texts = {"labels": self.labels, "label_source": self.label_source, "class_names": self.class_names}
        return {**texts, "passed_over": dict(self.passed_over)}

    @classmethod
    def from_columns(cls, arrays: dict[str, NDArray[Any]], facts: dict[str, Any]) -> "Scanned":
        """Return what `arrays` and `facts` returned; raise ValueError or KeyError if it is something else."""
        labels = [str(each) for each in facts["labels"]]
        count = len(arrays["names"])
        if any(len(array) != count or array.ndim != 1 for array in arrays.values()):
            raise ValueError("its columns differ in length")
        label_of, starts, sizes = (arrays[name] for name in ("label_of", "starts", "sizes"))
        if count and not (
            label_of.min() >= 0 and label_of.max() < len(labels) and starts.min() >= 0 and sizes.min() > 0
        ):
            raise ValueError("its columns are out of range")
        names = tuple(map(str, facts["class_names"]))
        passed_over = Counter({str(kind): int(number) for kind, number in facts["passed_over"].items()})
        return cls(arrays["names"], label_of, labels, starts, sizes, str(facts["label_source"]), names, passed_over)
