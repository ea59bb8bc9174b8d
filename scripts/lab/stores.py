"""Compare the rate at which an epoch is read from a slow server with that of MosaicML's streaming, and of LitData:

    pip install mosaicml-streaming litdata
    python scripts/lab/stores.py

A server on this machine answers each request after 50 ms, and sends at most 20 MB a second in all. All read the same
images from it (Lockstep and streaming the same MDS shards, LitData chunks of the same size), with nothing in their
caches, by two loader processes, decode each image to the same pixels, and take turns, each time in a new process.
Timing begins when the data set is opened (Lockstep's index is on the machine, as after a first run) and ends with the
last sample. The goal is 0.95 of the images a second of the better one of the two.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch
from bench.folders import paint
from repository import ROOT
from torch.utils.data import DataLoader

from lockstep.arithmetic.layout import Assignment, resolve
from lockstep.config.pages import group_file
from lockstep.data.build import open_data
from lockstep.data.loaders import Loader, StepDataset, StepSampler
from lockstep.errors import UserError
from lockstep.programs.common.showing import markdown

IMAGES, SHARD, BATCH, WORKERS, SIZE = 6_000, 1 << 22, 96, 2, 128
LATENCY, RATE, GOAL = 0.05, 20e6, 0.95


class Slow(BaseHTTPRequestHandler):
    """A handler of GET and HEAD with ranges, as a web server and as S3, that waits before it answers."""

    protocol_version = "HTTP/1.1"
    folder, lock, free_at = Path(), threading.Lock(), 0.0

    def log_message(self, format: str, *arguments: object) -> None:
        """Write nothing."""

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, with_content: bool) -> None:
        """Send a file, or a part of it."""
        time.sleep(LATENCY)
        file = self.folder / self.path.lstrip("/")
        content = file.read_bytes() if file.is_file() else b""
        start, stop = 0, len(content)
        if header := self.headers.get("Range"):
            first, _, last = header.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(stop, int(last) + 1 if last else stop)
        self.send_response(404 if not file.is_file() else 206 if header else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.send_header("ETag", f'"{len(content)}"')
        self.send_header("Last-Modified", "Thu, 26 Nov 2026 00:00:00 GMT")
        if self.path.endswith(".json"):  # else streaming's two forked workers share the connection that its index used,
            self.send_header("Connection", "close")  # and mix up what they read
        self.end_headers()
        for at in range(start, stop if with_content else start, 1 << 16):
            part = content[at : min(stop, at + (1 << 16))]
            with Slow.lock:
                Slow.free_at = max(Slow.free_at, time.monotonic()) + len(part) / RATE
                pause = Slow.free_at - time.monotonic()
            time.sleep(max(0.0, pause))
            self.wfile.write(part)


def read_by_lockstep(url: str) -> int:
    """Read an epoch. Return the number of its images."""
    config = group_file("data", "shards") | {"image_size": SIZE, "window": 2, "val_fraction": 0, "test_fraction": 0}
    splits = open_data(config, url)
    layout = resolve(strategy="single", accelerator="cpu", devices=1, num_nodes=1, batch_size=BATCH, pieces=2)
    order = splits.order(layout, 0)
    steps = StepDataset(splits.train, order, 0, splits.augment, Assignment(layout))
    loader = Loader(
        steps,  # type: ignore[arg-type]
        batch_sampler=StepSampler(order, lambda: 0),
        num_workers=WORKERS,
        collate_fn=lambda batch: batch,
        multiprocessing_context="fork",
    )
    return sum(len(part.ids) for step in loader for part in step.micro_batches)


def read_by_streaming(local: Path) -> int:
    """Read an epoch. Return the number of its images."""
    from streaming.base.dataset import StreamingDataset

    class Images(StreamingDataset):
        """Decode an image to a tensor."""

        def __getitem__(self, index: int) -> object:
            sample = super().__getitem__(index)
            return torch.from_numpy(np.array(sample["image"])).permute(2, 0, 1), sample["label"]

    dataset = Images(remote="s3://train/", local=str(local), shuffle=True, batch_size=BATCH)
    loader: DataLoader[object] = DataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, multiprocessing_context="fork"
    )
    return sum(len(batch[1]) for batch in loader)


def read_by_litdata(local: Path) -> int:
    """Read an epoch. Return the number of its images."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    # no argument of theirs leads there, and the server has no certificate
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True
    options = {"endpoint_url": os.environ["S3_ENDPOINT_URL"]}
    dataset = StreamingDataset("s3://chunks/", cache_dir=str(local), shuffle=True, storage_options=options)
    loader = StreamingDataLoader(dataset, batch_size=BATCH, num_workers=WORKERS, multiprocessing_context="fork")
    return sum(len(batch["label"]) for batch in loader)


READ: dict[str, Callable[[Any], int]] = {
    "lockstep": read_by_lockstep,
    "streaming": read_by_streaming,
    "litdata": read_by_litdata,
}


def write(scratch: Path) -> None:
    """Write the shards and the chunks."""
    from litdata.streaming.writer import BinaryWriter
    from PIL import Image
    from streaming.base.format.mds.writer import MDSWriter

    paint(scratch / "images", IMAGES // 2)
    paths = np.random.default_rng(0).permutation(np.array(sorted((scratch / "images").rglob("*.jpg"))))
    columns = {"image": "jpeg", "label": "int"}
    with MDSWriter(out=str(scratch / "web" / "train"), columns=columns, size_limit=SHARD) as writer:
        for path in paths:
            with Image.open(path) as image:
                writer.write({"image": image, "label": label_of(path)})
    (scratch / "web" / "chunks").mkdir()
    chunks = BinaryWriter(str(scratch / "web" / "chunks"), chunk_bytes=SHARD)
    for number, path in enumerate(paths):
        with Image.open(path) as image:
            chunks[number] = {"image": image, "label": label_of(path)}
    chunks.done()
    chunks.merge()


def label_of(path: str | Path) -> int:
    return int(Path(path).parent.name == "light")


def main() -> int:
    """Measure, or read an epoch once for a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reads", choices=READ, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.reads:
        torch.set_num_threads(1)
        began = time.perf_counter()
        count = READ[chosen.reads](chosen.place if chosen.reads == "lockstep" else Path(chosen.place))
        print(f"{count / (time.perf_counter() - began):.1f} {count}", flush=True)
        os._exit(0)
    for module, package in (("streaming", "mosaicml-streaming"), ("litdata", "litdata")):
        if find_spec(module) is None:
            raise UserError(f"scripts/lab/stores.py compares with {module}, which is missing: pip install {package}")
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), chosen.rounds)
    return 0


def measure(scratch: Path, rounds: int) -> None:
    """Print the rates of all, and the ratio of Lockstep's to that of the better one of the two others."""
    write(scratch)
    Slow.folder = scratch / "web"
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    cache = scratch / "cache" / "lockstep" / "shards"
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "S3_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    rates: dict[str, list[float]] = {name: [] for name in READ}
    for number in range(rounds + 1):  # the first makes Lockstep's index
        for name in sorted(rates, reverse=number % 2 == 0):
            shutil.rmtree(cache, ignore_errors=True)
            shutil.rmtree(scratch / "local", ignore_errors=True)
            place = f"{url}/train" if name == "lockstep" else str(scratch / "local")
            command = [sys.executable, str(ROOT / "scripts/lab/stores.py"), "--reads", name, "--place", place]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise UserError(f"{name} has failed: {done.stderr.strip().splitlines()[-1]}")
            rate, count = done.stdout.split()
            if int(count) != IMAGES:
                raise UserError(f"{name} has read {count} images of {IMAGES}")
            if number:
                rates[name].append(float(rate))
    ratios = [ours / max(theirs) for ours, *theirs in zip(*rates.values(), strict=True)]
    met = f"{GOAL}: {'met' if median(ratios) >= GOAL else 'missed'}"
    rows = [[name, f"{median(each):.0f}", f"{min(each):.0f} to {max(each):.0f}"] for name, each in rates.items()]
    print(markdown(("", "images/s", "range"), rows))
    print(f"ratio {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), goal {met}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
