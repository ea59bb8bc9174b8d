"""What a user's project, scripts and checkpoints rely on: names, keys, dotted targets, and the format of checkpoints.

surfaces.yaml has those of the last release. Today's must have them all; what is new need not be in it. A release
records its own:  python tests/report/test_surfaces.py. Formats: tests/checkpoint/test_formats.py, with a run of each.
"""

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import lockstep
from lockstep.config import pages
from lockstep.config.instantiate import locate, targets_in

FILE = Path(__file__).with_name("surfaces.yaml")
MODULES = ("testing", *(f"vision.{name}" for name in ("callbacks", "data", "models", "optimizers", "schedules")))
OF_PROJECT = "project."  # the template's classes: what a user owns

Surfaces = dict[str, list[str]]


def today() -> Surfaces:
    """Return what can be relied on now, in words that can be compared."""
    names = [f"lockstep.{name}" for name in lockstep.__all__]
    for module in MODULES:
        names += [f"lockstep.{module}.{name}" for name in _public(importlib.import_module(f"lockstep.{module}"))]
    keys, targets = set(), set()
    for folder in pages.folders():
        for file in folder.rglob("*.yaml"):
            page = file.relative_to(folder).with_suffix("").as_posix()
            content = yaml.safe_load(file.read_text()) or {}
            home = "" if page in ("train", "base") else f"{page}: "
            if not page.startswith(("schema/", "hydra/", "program/")):
                recipe = page.startswith(
                    ("experiment/", "debug/")
                )  # its name is relied on, and it may choose otherwise
                keys |= {page} if recipe else {page, *(f"{home}{key}" for key in _keys(content))}
                targets |= {f"{page.partition('/')[0]}: {target}" for _, target in targets_in("", content)}
    known = {target for target in targets if OF_PROJECT not in target}
    return {"names": sorted(names), "keys": sorted(keys), "targets": sorted(known)}


def _public(module: Any) -> Iterable[str]:
    here = [name for name, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__]
    return getattr(module, "__all__", [name for name in here if not name.startswith("_")])


def _keys(content: Mapping[str, Any], above: str = "") -> Iterable[str]:
    """Yield the dotted keys of a page. Below a key whose value names a class, they are that class's options."""
    for key, value in content.items():
        if key in ("defaults", "hydra", "_target_", "_partial_"):
            continue
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from _keys(value, f"{above}{key}.")


def gone(recorded: Surfaces, present: Surfaces) -> list[str]:
    return [f"{kind}: {each}" for kind, values in recorded.items() for each in sorted({*values} - {*present[kind]})]


RECORDED: Surfaces = yaml.safe_load(FILE.read_text()) if FILE.exists() else {}


def test_nothing_that_was_released_is_gone() -> None:
    assert RECORDED.keys() == {"names", "keys", "targets"}
    assert gone(RECORDED, today()) == [], "renamed or removed? Then record what is there now"


@pytest.mark.parametrize("kind", ["names", "keys", "targets"])
def test_what_is_gone_is_named(kind: str) -> None:
    """The control."""
    present = {**RECORDED, kind: [*RECORDED[kind][1:], "a new one"]}
    assert gone(RECORDED, present) == [f"{kind}: {RECORDED[kind][0]}"]


def test_each_target_can_be_built() -> None:
    assert len(RECORDED["targets"]) > 40
    for line in RECORDED["targets"]:
        if "loggers." not in line:  # some need packages that are not installed everywhere
            assert callable(locate("x._target_", line.partition(": ")[2])), line


if __name__ == "__main__":
    FILE.write_text(yaml.safe_dump(today(), sort_keys=False, width=120))
