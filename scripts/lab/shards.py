"""Compare shards with a folder of the same images, and open large indexes:

    python scripts/lab/shards.py speed     # images a second that one process reads and decodes, from JPEG files
    python scripts/lab/shards.py start     # seconds and memory to open an index, by number of images
    python scripts/lab/shards.py server    # the same of shards on a web server, by number of shards

speed: folder, tar files and parquet files take turns, block by block, over the same images in the same random order. A
ratio is of two blocks of one round; the median and the quartiles over rounds are printed. The goal is 0.95.
start: each index is opened in a new process. Memory is what the process holds itself (RssAnon), without mapped files.
server: the server is on this machine. The index is made up, of 1,000 images a shard, and opened with a window, and then
once more, as a run does that is resumed on the machine. The files take about 4 GB, most of them empty.
"""

import argparse
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch
from bench.folders import paint
from PIL import Image
from repository import ROOT

from lockstep.config.pages import group_file
from lockstep.data.build import open_data
from lockstep.data.datasets import fetch
from lockstep.programs.common.showing import markdown
from lockstep.vision.data import remote_index
from lockstep.vision.data.shard_cache import Known, Table
from lockstep.vision.data.shard_index import BORDERS, PLACE, digest

IMAGES, SHARDS, ROUNDS, BATCH, SIZE = 2_000, 4, 15, 128, 128  # SIZE: pixels of an image after decoding
GOAL = 0.95
SHARDS_ON_SERVER = (1_000, 100_000)
COUNTS = (10_000, 1_000_000, 10_000_000)
OPENED = """
import sys, time
from pathlib import Path
from shards import opened
def own(): return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1024
import project.data, numpy
opened("shards", Path(sys.argv[2]))
before, began = own(), time.perf_counter()
splits = opened("shards", Path(sys.argv[1]), val_fraction=float(sys.argv[3]))
seconds, memory = time.perf_counter() - began, own() - before
image, label = splits.train[len(splits.train) // 2]
print(f"{len(splits.train) + len(splits.val):,}, {seconds:.2f}, {max(memory, 0):.0f}")
"""


OPENED_REMOTELY = """
import sys, time
from pathlib import Path
from shards import enlarged_on_server, opened
def own(): return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) / 1024
import project.data, numpy, aiohttp, fsspec.implementations.http
url = enlarged_on_server(Path(sys.argv[1]), int(sys.argv[2]))
before, began, used = own(), time.perf_counter(), time.process_time()
splits = opened("shards", url, window=4)
seconds, used, memory = time.perf_counter() - began, time.process_time() - used, own() - before
print(f"{len(splits.train) + len(splits.val):,}, {seconds:.2f}, {used:.2f}, {max(memory, 0):.0f}")
"""


def opened(name: str, folder: Path | str, **changes: object):
    """Open a folder by the data set `name` of conf/data/."""
    config = group_file("data", name)
    return open_data({**config, "image_size": SIZE, **changes}, str(folder))


def speed(scratch: Path) -> None:
    """Print images a second of a folder and of shards, and the ratios."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    paint(scratch / "folder", IMAGES // 2)
    paths = np.random.default_rng(0).permutation(np.array(sorted((scratch / "folder").rglob("*.jpg"))))
    for number, part in enumerate(np.array_split(paths, SHARDS)):
        with tarfile.open(made(scratch / "tar") / f"{number:04}.tar", "w") as tar:
            for path in part:
                tar.add(path, str(path.relative_to(scratch / "folder")))
        rows = [{"bytes": path.read_bytes(), "path": path.name} for path in part]
        table = pa.table({"image": rows, "label": [int(path.parent.name == "light") for path in part]})
        pq.write_table(table, made(scratch / "parquet") / f"{number:04}.parquet")
    changes = {"val_fraction": 0, "test_fraction": 0}
    sets = {"folder": opened("image_folder", scratch / "folder", **changes).train}
    sets |= {name: opened("shards", scratch / name, **changes).train for name in ("tar", "parquet")}
    for name, images in sets.items():
        same = all(torch.equal(images[index][0], sets["folder"][index][0]) for index in range(0, IMAGES, 50))
        if len(images) != IMAGES or not same:
            raise RuntimeError(f"{name} has other images than the folder")
    torch.set_num_threads(1)
    order = np.random.default_rng(1).permutation(IMAGES)
    seconds: dict[str, list[float]] = {name: [] for name in sets}
    turns = np.random.default_rng(2)
    for number in range(ROUNDS + 1):
        for name in turns.permutation([*sets]):
            began = time.perf_counter()
            for start in range(0, IMAGES, BATCH):
                fetch(sets[name], order[start : start + BATCH])
            if number:  # the first round fills the caches
                seconds[name].append(time.perf_counter() - began)
    table_rows: list[list[str]] = []
    for name, taken in seconds.items():
        ratios = [of_folder / of_shards for of_folder, of_shards in zip(seconds["folder"], taken, strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        met = "" if name == "folder" else f"{GOAL}: {'met' if middle >= GOAL else 'missed'}"
        table_rows.append([name, f"{IMAGES / median(taken):.0f}", f"{middle:.3f}", f"{low:.3f} to {high:.3f}", met])
    print(markdown(("", "images/s", "ratio to the folder", "quartiles", "goal"), table_rows))


def start(scratch: Path) -> None:
    """Print seconds and memory to open indexes of several sizes, with a part val and with one that is held out."""
    rows = []
    few = enlarged(scratch / "few", 0, ("train", "val"))
    for parts, fraction, what in ((("train", "val"), 0.1, "val in shards"), (("train", "test"), 0.1, "val held out")):
        for count in COUNTS:
            folder = enlarged(scratch / f"{parts[1]}_{count}", count, parts)
            command = [sys.executable, "-c", OPENED, str(folder), str(few), str(fraction)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT / "scripts" / "lab")
            rows.append([what, *done.stdout.strip().split(", ")])
    print(markdown(("", "images", "seconds", "memory, MB"), rows))


def server(scratch: Path) -> None:
    """Print seconds and memory to open the shards of a server, and to open them again."""
    rows = []
    for shards in SHARDS_ON_SERVER:
        (folder := scratch / f"{shards}").mkdir()
        environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
        for name in ("opened", "opened again"):
            command = [sys.executable, "-c", OPENED_REMOTELY, str(folder), str(shards)]
            done = subprocess.run(
                command, capture_output=True, text=True, check=True, cwd=ROOT / "scripts" / "lab", env=environment
            )
            rows.append([name, f"{shards:,}", *done.stdout.strip().split(", ")])
    print(markdown(("", "shards", "images", "seconds", "of CPU", "memory, MB"), rows))


def enlarged_on_server(folder: Path, shards: int) -> str:
    """Write the records of shards that do not exist, serve them, and let an empty index stand for theirs.

    Return the URL.
    """
    part = [Known(f"train-{number:06}.tar", (1 << 26, ""), 1 << 26, f"{number:064x}") for number in range(shards)]
    known = [*part, Known("val-0.tar", (1 << 26, ""), 1 << 26, "f" * 64)]
    beside = made(folder / "web" / remote_index.BESIDE)
    key = digest([remote_index.RECORD_VERSION, {"image": None, "label": "label"}])[:16]
    kind = {"label_source": "folders", "class_names": [], "passed_over": {}, "highest": []}
    texts = np.frombuffer(json.dumps({"labels": ["a", "b"], "kinds": [kind]}).encode(), np.uint8)
    rows: Any = {"counts": np.full(len(known), 1000), "kind_of": np.zeros(len(known), np.int32), "texts": texts}
    description = beside / f"records-{key}.json"
    if not description.exists():
        file = beside / "new.npz"
        np.savez(file, **{**Table.of(known).columns(), **rows})
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        stated = {"sha256": sha256, "bytes": file.stat().st_size}
        file.rename(beside / f"records-{key}-shards-{sha256[:16]}.npz")
        description.write_text(json.dumps({"shards": stated, "images": stated}))

    def fill(index: Path) -> None:
        for name, count in (("train", shards), ("val", 1)):
            for column, dtype in (("names", "S20"), ("labels", "<i8"), ("places", PLACE)):
                np.lib.format.open_memmap(made(index / name) / f"{column}.npy", "w+", dtype, (1000 * count,)).flush()
            np.save(index / name / f"{BORDERS}.npy", np.arange(count + 1) * 1000)
        for column, values in Table.of(known).columns().items():
            np.save(index / f"{column}.npy", values)
        (index / "highest.json").write_text("[]")
        index_json = {"classes": ["a", "b"], "fingerprints": {"train": "1" * 64, "val": "2" * 64}, "passed_over": {}}
        (index / "index.json").write_text(json.dumps(index_json))

    real = remote_index.make_once
    remote_index.make_once = lambda index, _: real(index, fill)  # type: ignore[assignment]
    handler = partial(Quiet, directory=str(folder / "web"))
    web = ThreadingHTTPServer(
        ("127.0.0.1", int((folder / "port").read_text()) if (folder / "port").exists() else 0), handler
    )
    (folder / "port").write_text(str(web.server_address[1]))  # the URL names the index
    threading.Thread(target=web.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{web.server_address[1]}"


class Quiet(SimpleHTTPRequestHandler):
    """A handler that writes no log."""

    def log_message(self, format: str, *arguments: object) -> None:
        """Write nothing."""


def enlarged(folder: Path, count: int, parts: tuple[str, str]) -> Path:
    """Write two small shards of images, and repeat the rows of the first one's index until there are `count`."""
    for part in parts:
        with tarfile.open(made(folder) / f"{part}.tar", "w") as tar:
            for label in "ab":
                file = io.BytesIO()
                Image.new("RGB", (SIZE, SIZE), ord(label)).save(file, "PNG")
                info = tarfile.TarInfo(f"{label}/0000001.png")
                info.size = len(file.getvalue())
                tar.addfile(info, io.BytesIO(file.getvalue()))
    opened("shards", folder)
    for path in folder.glob(f".index/shards-*/{parts[0]}/*.npy"):
        column = np.load(path)
        np.save(path, np.repeat(column, max(1, count // len(column)), axis=0))
    return folder


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def main() -> int:
    """Measure the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("speed", "start", "server"))
    part = parser.parse_args().part
    with tempfile.TemporaryDirectory() as folder:
        {"speed": speed, "start": start, "server": server}[part](Path(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
