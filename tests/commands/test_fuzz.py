"""Whatever is read ends in a result or in a refusal of one line, and in nothing else: bounded, seeded fuzzing."""

import copy
import gzip
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import composed

from lockstep.commands import cli
from lockstep.config.arguments import read_arguments
from lockstep.config.check import Config, check
from lockstep.data.build import open_data
from lockstep.errors import UserError
from lockstep.vision.data.files import read_idx

SMALL = ("data=synthetic", "data.samples=60", "data.image_size=12")


def accepted(read: Callable[[], Any]) -> bool:
    """Return whether `read` came to a result; a refusal is one line that says something. Other exceptions go
    through."""
    try:
        read()
    except UserError as refusal:
        text = cli.error_line(refusal)
        assert len(text) > 10, text
        assert text.isprintable(), text
        return False
    return True


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return a few random edits: bytes changed, a part cut out, doubled, moved, or the end missing."""
    actual = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, length = rng.randrange(len(actual) + 1), rng.choice((1, 2, 4, 64))
        match rng.randrange(6):
            case 0:
                actual[at : at + length] = rng.randbytes(length)
            case 1:
                del actual[at : at + length]
            case 2:
                actual[at:at] = actual[at : at + length]
            case 3:
                actual[at : at + length] = bytes([rng.choice((0, 0x7F, 0x80, 0xFF))]) * length
            case 4:
                del actual[at:]
            case _:
                other = rng.randrange(len(actual) + 1)
                actual[at : at + length] = actual[other : other + length]
    return bytes(actual)


# --- IDX files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("dimensions", [1, 3])
def test_idx_files(tmp_path: Path, packed: bool, dimensions: int) -> None:
    rng = random.Random(dimensions)
    sizes = (5, 4, 3)[:dimensions]
    header = bytes((0, 0, 8, dimensions)) + b"".join(size.to_bytes(4, "big") for size in sizes)
    whole = header + rng.randbytes(math.prod(sizes))
    path = tmp_path / ("set.gz" if packed else "set")
    path.write_bytes(gzip.compress(whole) if packed else whole)
    assert accepted(lambda: read_idx(path, dimensions))
    for number in range(200):
        # inside the gzip too, so that its checksum does not hide the rest
        inner = mutated(whole, rng) if not packed or number % 2 else whole
        path.write_bytes(
            (gzip.compress(inner, 1) if number % 2 else mutated(gzip.compress(inner, 1), rng)) if packed else inner
        )
        if accepted(lambda: read_idx(path, dimensions)):
            actual = read_idx(path, dimensions)
            assert actual.ndim == dimensions
            assert actual.dtype == np.uint8


# --- config values ----------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 10**30, -(10**30)),
    *(0.0, 0.5, -0.5, 1e-320, 1e308, math.inf, -math.inf, math.nan),
    *("", " ", "auto", "null", "1", "-1", "../up", "/", "a/b", "a\nb", "\0", "ü", "x" * 300),
    *("os.system", "builtins.open", "lockstep.launch.parent.launch", "project.models.MnistCNN", "lockstep.."),
    *([], [1], [[1]], ["a"], {}, {"a": 1}, {"_target_": "os.system"}, {"name": None}),
)


def places(node: Any, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of all keys of a config, groups and leaves."""
    if not isinstance(node, dict):
        return []
    return [place for key, part in node.items() for place in [(*above, key), *places(part, (*above, key))]]


def opened(raw: dict[str, Any]) -> Config:
    """Check a config and open its data, as far as the parent of a run does."""
    config = check(raw)
    large = any(isinstance(value, int | float) and value > 1000 for value in config.data.values())
    if config.data.get("_target_") == "lockstep.vision.data.synthetic" and not large:
        open_data(config.data, config.data_dir, config.seed)
    return config


@pytest.mark.usefixtures("whole_run")
def test_config_values() -> None:
    rng, base = random.Random(7), composed(*SMALL)
    assert accepted(lambda: opened(base))
    results = 0
    for place in places(base):
        for value in rng.sample(VALUES, 6):
            raw = copy.deepcopy(base)
            node = raw
            for key in place[:-1]:
                node = node[key]
            node[place[-1]] = value
            try:
                results += accepted(partial(opened, raw))
            except Exception as error:
                raise AssertionError(f"{'.'.join(place)}={value!r}: {type(error).__name__}: {error}") from error
    assert results > 20, "not everything is refused"


@pytest.mark.usefixtures("whole_run")
def test_command_lines() -> None:
    """Whatever Hydra's parser makes of an override, the answer is a config or a refusal of one line."""
    rng = random.Random(9)
    keys = [".".join(place) for place in places(composed(*SMALL))]
    keys += ["nothing", "hydra.run.dir", "hydra", "a.b.c", "+new", "~lr", "model@x"]
    values = ["", "1", "-1", "nan", "1e999", "[1,2", "{a:1}", "'", '"', "a=b", "a,b", "\\", "*", "@"]
    values += ["${oc.env:HOME}", "${lr}", "${nothing}", "${"]
    for _ in range(60):
        sign, equals = rng.choice(("", "", "", "+", "++", "~")), rng.choice(("=", "=", "=", "", "=="))
        override = sign + rng.choice(keys) + equals + rng.choice(values)
        try:
            check(composed(*read_arguments([override], "train").line, *SMALL))
        except cli.BAD_INPUT as error:
            message = cli.error_line(error)
            assert message.strip(), override
            assert "\n" not in message, override
