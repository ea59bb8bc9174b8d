"""Open data sets of Hugging Face's library `datasets`, from its hub or from a folder of this machine."""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.data.splits import Source
from lockstep.errors import UserError
from lockstep.vision.data.classes import class_names
from lockstep.vision.data.labelled import LabelledFiles, check_headers, subsets
from lockstep.vision.data.options import ImageOptions, with_image_options
from lockstep.vision.data.walk import walk

PARTS = {"train": ("train",), "val": ("validation", "valid", "val", "dev"), "test": ("test",)}  # names of splits
FOLDER = "it must be written by save_to_disk, or have parquet files"


@dataclass(eq=False)
class RowImages(LabelledFiles):
    """The images of a data set of `datasets`, in its order. Their bytes are memory-mapped.

    The field `root` says where it is, and `names` has its place and the name of the split, for messages.
    """

    rows: Any  # a datasets.Dataset whose column of images is not decoded
    image: str  # the name of this column

    uses_random_numbers = False
    skip_hint = ""

    def name(self, index: int) -> str:
        return str(index)

    def location(self, index: int) -> str:
        return f"{self.names[0]}: image of row {index}"

    def encoded(self, index: int) -> Path | io.BytesIO:
        value = self.rows[int(index)][self.image] or {}
        if value.get("bytes") is None and not value.get("path"):
            raise UserError(f"{self.location(index)} is missing: each row must have one")
        return Path(value["path"]) if value.get("bytes") is None else io.BytesIO(value["bytes"])

    def fingerprint(self) -> str:
        """Return a hash over the labels and the sizes of all images."""
        import pyarrow.compute as pc

        column = self.rows.with_format("arrow")[:][self.image]
        sizes = pc.fill_null(pc.binary_length(pc.struct_field(column, "bytes")), 0)
        return hashlib.sha256(self.labels.tobytes() + np.asarray(sizes).astype(np.int64).tobytes()).hexdigest()


@with_image_options
def huggingface(
    path: str | None, options: ImageOptions, subset: str | None = None, image: str = "image", label: str = "label"
) -> Source:
    """Open a data set of images from the hub, or from a folder: one of `save_to_disk`, or one of parquet files.

    Its splits train, validation and test are used. If it has one split, the images are split.
    data/huggingface.yaml describes the options.

    Raises:
        UserError: `datasets` is not installed, the data set can't be opened, or has other columns or no train.
    """
    if not isinstance(path, str) or not path:
        raise UserError("data.path must be given: data.path=<a name on the hub, or a folder>")
    splits = load(path, subset)
    of_part = {part: next((n for n in names if n in splits), None) for part, names in PARTS.items()}
    alone = len(splits) == 1
    if alone:
        of_part = {"train": next(iter(splits)), "val": None, "test": None}
    elif of_part["train"] is None:
        raise UserError(f"huggingface: {path} has the splits {', '.join(splits)}: one must be train")
    classes: list[str] = []
    parts: dict[str, RowImages] = {}
    for part, name in of_part.items():
        if name is not None:
            rows = columns_of(f"huggingface: {path}, split {name}", splits[name], image, label)
            known = options.known_classes
            labels, classes = numbered(f"huggingface: {path}, split {name}", rows, label, classes, known)
            where, size = np.array([f"{path}, split {name}"]), options.image_size or 0
            of_rows = labels, size, options.channels, rows, image
            parts[part] = RowImages(Path(path), where, *of_rows, reading=options.reading)
    if len(classes) < 2:
        raise UserError(f"huggingface: {path} has only one class, {classes[0]}: it must have two at least")
    check_headers([*parts.values()])
    options, file_sizes = options.with_size([*parts.values()])
    train, val, test = (parts.get(part) for part in PARTS)
    about = f"huggingface: {path}, " + ", ".join(f"{name} as {part}" for part, name in of_part.items() if name)
    spec = options.spec(classes)
    if not alone:
        return Source(train, test, spec, val, about=about, file_sizes=file_sizes)
    of_ids = subsets(parts["train"], options.split_ids(parts["train"]))
    about = f"huggingface: {path}; {options.split_text}"
    return Source(of_ids[0], of_ids[2], spec, of_ids[1], about=about, split_by_opener=True, file_sizes=file_sizes)


def load(path: str, subset: str | None) -> dict[str, Any]:
    """Return the splits of a data set, by name. Nothing in it is executed: `datasets` runs no scripts since version 4.

    Raises:
        UserError: `datasets` is not installed, or it can't open the data set.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError("data=huggingface needs the library datasets: pip install datasets") from error
    if int(datasets.__version__.partition(".")[0]) < 4:
        version = f"datasets {datasets.__version__} can run code from a data set"
        raise UserError(f"{version}: install version 4 or newer: pip install -U datasets")
    folder = Path(path).expanduser().absolute()
    try:
        if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
            loaded = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            if not walk(folder, lambda name: name.endswith(".parquet")).paths:
                raise UserError(f"huggingface: data.path={path} is a folder of another kind: {FOLDER}")
            loaded = datasets.load_dataset("parquet", data_dir=str(folder))
        elif path.startswith(("/", ".", "~")):
            raise UserError(f"huggingface: data.path={path}: there is no such folder: {FOLDER}")
        else:
            loaded = datasets.load_dataset(path, subset)
    except UserError:
        raise
    except Exception as error:  # the library, the hub and Arrow each have errors of their own
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(
            f"huggingface: data.path={path} can't be opened ({reason}): check name, files, network"
        ) from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def columns_of(where: str, rows: Any, image: str, label: str) -> Any:
    """Return the rows with the two columns alone, and images as bytes.

    Raises:
        UserError: A column is missing or holds no images.
    """
    import datasets

    if image == label:
        raise ValueError(f"label={label}: must be another column than that of the images")
    if missing := [each for each in (image, label) if each not in rows.column_names]:
        columns = f"its columns are {', '.join(rows.column_names)}"
        raise UserError(f"{where}: no column {missing[0]}, {columns}: choose by data.image= and data.label=")
    feature = rows.features[image]
    stored = feature.get("bytes") if isinstance(feature, dict) else feature  # a struct of `bytes` and `path`, or bytes
    if not isinstance(feature, datasets.Image) and getattr(stored, "dtype", "") not in ("binary", "large_binary"):
        raise UserError(f"{where}: the column {image} is {feature}: it must be Image, or the bytes of image files")
    return rows.select_columns([image, label]).cast_column(image, datasets.Image(decode=False)).with_format(None)


def numbered(
    where: str, rows: Any, label: str, classes: list[str], known_classes: Sequence[str] = ()
) -> tuple[NDArray[np.int64], list[str]]:
    """Return the labels of all rows as numbers of classes, and the classes.

    Args:
        where: the place of the rows, for messages.
        rows: a datasets.Dataset.
        label: the column, of the feature ClassLabel, or of whole numbers or texts.
        classes: those of the training's split; empty: `rows` is this split.
        known_classes: see `classes.ordered`.

    Raises:
        UserError: A label is missing, of another kind, or not one of the classes.
    """
    names = getattr(rows.features[label], "names", None)
    column = rows.select_columns([label]).with_format("arrow")[:][label]
    values = np.asarray(column.to_numpy())
    if column.null_count or (names is None and values.dtype.kind not in "iuOUT"):
        raise UserError(f"{where}: the column {label} has missing or other values: it must hold whole numbers or texts")
    if names is not None:
        _, listed = class_names(dict.fromkeys(map(str, names), 0), where, order=[*map(str, names)])
        if listed != (classes or listed) or not ((values >= 0) & (values < len(names))).all():
            raise UserError(f"{where}: a label is none of the classes: a split without labels can't be used")
        return values.astype(np.int64), listed
    present, numbers, counts = np.unique(values, return_inverse=True, return_counts=True)
    texts = [*map(str, present)]
    class_of, names_in_order = class_names(
        dict(zip(texts, counts.tolist(), strict=True)), where, known_classes=known_classes
    )
    classes = classes or names_in_order
    if odd := sorted(set(names_in_order) - set(classes)):
        raise UserError(f"{where} has the class {odd[0]}: train must have it, too")
    position = {name: number for number, name in enumerate(classes)}
    return np.array([position[class_of[text]] for text in texts])[numbers].astype(np.int64), classes
