"""Make the index of shards on a server before a run does:

    lockstep index s3://bucket/images
    lockstep index 'https://host/images/train-{00000..00999}.tar' --label class --index-dir /scratch/indexes

Each shard is fetched once, several at a time, and checked by its size and, where the server has one, its MD5. A program
that was interrupted goes on where it was, and after shards were added or replaced only those are fetched. Runs with the
same data.index_dir use the index, so one in a shared folder serves all machines.

Exit codes: 0 made, 2 bad input, or a server that fails.
"""

import argparse
import shutil

from lockstep.config.value_checks import place
from lockstep.errors import UserError
from lockstep.programs.common.parser import parser_of
from lockstep.text import is_url, plural
from lockstep_streams.remote import Remote
from lockstep_streams.shard_index import digest, index_root
from lockstep_streams.shards import checked_suffixes, parts_of


def parser() -> argparse.ArgumentParser:
    """Return the parser of the program's arguments."""
    made = parser_of("index", __doc__)
    made.add_argument("url", help="of the shards, or a pattern with braces")
    made.add_argument("--image", help="as the key data.image; several: jpg,webp")
    made.add_argument("--label", default="label", help="as the key data.label")
    made.add_argument("--index-dir", help="as the key data.index_dir")
    made.add_argument("--cache", help="as the key data.cache")
    made.add_argument("--cache-gb", type=float, help="as the key data.cache_gb")
    made.add_argument("--retry-seconds", type=float, default=240.0, help="as the key data.retry_seconds")
    return made


def main(words: list[str]) -> int:
    """Make the index. Return the exit code.

    Raises:
        UserError: the URL is none, or a shard can't be read or has no images.
    """
    chosen = parser().parse_args(words)
    url = place(chosen.url)
    if not is_url(url):
        raise UserError(
            f"lockstep index {chosen.url}: a run indexes a folder by itself: give a URL, s3://bucket/images"
        )
    image = chosen.image.split(",") if "," in (chosen.image or "") else chosen.image
    options = {"image": checked_suffixes(image), "label": None if chosen.label == "null" else chosen.label}
    remote = Remote(url, options, chosen.cache, chosen.cache_gb, chosen.retry_seconds, chosen.index_dir, anew=True)
    of_part = parts_of(url, remote.paths)
    folder = index_root(chosen.index_dir) / digest(url)[:16]
    for made_before in folder.glob("shards-*"):  # of shards that may have been replaced
        shutil.rmtree(made_before, ignore_errors=True)
    images = 0
    for _, shard in remote.records.all({name: remote.stats[name] for part in of_part.values() for name in part}):
        images += len(shard.samples)
    counts = f"{plural(sum(map(len, of_part.values())), 'shard')} with {plural(images, 'image')}"
    print(f"{counts}; what a run needs to know of them is in {remote.records.folder}")
    return 0
