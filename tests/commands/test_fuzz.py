"""Whatever is read ends in a result or in a refusal of one line, and in nothing else: bounded, seeded fuzzing."""

import copy
import gzip
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import composed
from fuzzing import Edit, damaged, edits, often, result_or_line
from hypothesis import given
from hypothesis import strategies as st

from lockstep.commands import cli
from lockstep.config.arguments import read_arguments
from lockstep.config.check import Config, check
from lockstep.data.build import open_data
from lockstep.vision.data.files import read_idx

SMALL = ("data=synthetic", "data.samples=60", "data.image_size=12")


# --- IDX files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("dimensions", [1, 3])
@often(100)
@given(edits=edits(8, 64), inside=st.booleans())
def test_idx_files(tmp_path: Path, packed: bool, dimensions: int, edits: list[Edit], inside: bool) -> None:
    """Damage is inside of the gzip, too, so that its checksum does not hide the rest."""
    sizes = (5, 4, 3)[:dimensions]
    header = bytes((0, 0, 8, dimensions)) + b"".join(size.to_bytes(4, "big") for size in sizes)
    whole = header + bytes(range(math.prod(sizes)))
    path = tmp_path / ("set.gz" if packed else "set")
    path.write_bytes(gzip.compress(whole) if packed else whole)
    assert read_idx(path, dimensions).shape == sizes, "the control"
    inner = damaged(whole, edits) if inside or not packed else whole
    content = gzip.compress(inner, 1) if packed else inner
    path.write_bytes(content if inside or not packed else damaged(content, edits))
    actual, _ = result_or_line(lambda: read_idx(path, dimensions))
    if actual is not None:
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
    opened(base)  # the control
    results = 0
    for place in places(base):
        for value in rng.sample(VALUES, 6):
            raw = copy.deepcopy(base)
            node = raw
            for key in place[:-1]:
                node = node[key]
            node[place[-1]] = value
            try:
                results += result_or_line(partial(opened, raw))[0] is not None
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
