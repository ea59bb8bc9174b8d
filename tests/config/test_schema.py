"""The JSON Schemas for editors are those of this conf/, every file of it is valid by them, and a wrong one is not."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from lockstep.config.arguments import MODELINE, help_page
from lockstep.programs import schema

CONF = ROOT / "conf"
EXTRAS = ("extras.json", "strategy.json")  # an extra can be deleted, and the schemas have its keys then
KINDS: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


@cache
def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((CONF / "schema" / name).read_text())
    return content


def of_kind(value: Any, kind: str) -> bool:
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, KINDS[kind])


def errors(value: Any, kind: dict[str, Any], at: str = "") -> Iterator[str]:
    """Return what a JSON Schema has against a value: the part of its draft 7 that ours use, and nothing unknown."""
    for word, rule in kind.items():
        match word:
            case "$ref":
                yield from errors(value, read(rule), at)
            case "anyOf":
                if all(any(errors(value, option, at)) for option in rule):
                    yield f"{at}={value}: none of {rule}"
            case "type":
                if not of_kind(value, rule):
                    yield f"{at}={value}: not of type {rule}"
            case "enum" | "const":
                if value not in (rule if word == "enum" else [rule]):
                    yield f"{at}={value}: not {rule}"
            case "pattern":
                if isinstance(value, str) and not re.search(rule, value):
                    yield f"{at}={value}: does not match {rule}"
            case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum":
                small, strict = word.lower().endswith("minimum"), word.startswith("exclusive")
                if of_kind(value, "number") and (
                    (value == rule and strict) or (value < rule if small else value > rule)
                ):
                    yield f"{at}={value}: {word} {rule}"
            case "items":
                for each in value if isinstance(value, list) else ():
                    yield from errors(each, rule, at)
            case "properties":
                for name in rule.keys() & (value if isinstance(value, dict) else {}):
                    yield from errors(value[name], rule[name], f"{at}.{name}")
            case "propertyNames":
                for name in value if isinstance(value, dict) else ():
                    yield from errors(name, rule, f"{at}.{name}")
            case "additionalProperties":
                for name in value.keys() - kind.get("properties", {}).keys() if isinstance(value, dict) else ():
                    if rule is False:
                        yield f"{at}.{name}: there is no such key"
                    elif isinstance(rule, dict):
                        yield from errors(value[name], rule, f"{at}.{name}")
            case _:
                assert word in ("$schema", "title", "description"), word


def schema_of(path: Path) -> dict[str, Any]:
    """Return the schema that a file names."""
    (named,) = re.findall(rf"^{re.escape(MODELINE)}=(\S+)$", path.read_text(), flags=re.MULTILINE)
    target = (path.parent / named).resolve()
    assert target.parent == CONF / "schema"
    return read(target.name)


def keys_in(kind: Any, at: str = "") -> Iterator[str]:
    for name, inner in kind.get("properties", {}).items():
        yield f"{at}.{name}"
        for part in [inner, *inner.get("anyOf", ())]:
            yield from keys_in(part, f"{at}.{name}")


def test_the_schemas_are_those_of_this_conf() -> None:
    now, stale = schema.schemas(), "a key or its comment has changed: make schema"
    assert set(now) == {path.name for path in (CONF / "schema").iterdir()}, stale
    for name, content in now.items():
        if name in EXTRAS:
            assert set(keys_in(content)) <= set(keys_in(read(name))), stale
        else:
            assert content == read(name), stale
    train = now["train.json"]["properties"]
    assert train["lr"]["description"].startswith("peak learning rate")
    assert "net.layer1" in now["model.json"]["properties"]["freeze"]["description"]


@pytest.mark.parametrize("path", schema.described_files(), ids=lambda path: str(path.relative_to(CONF)))
def test_every_file_names_a_schema_that_it_keeps(path: Path) -> None:
    text = path.read_text()
    assert schema.with_modeline(text, path) == text, "make schema"
    assert list(errors(yaml.safe_load(text), schema_of(path))) == []
    assert yaml.safe_load(text) == yaml.safe_load(text.replace(MODELINE, "#"))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("train.yaml", {"batchsize": 3}, ".batchsize: there is no such key"),
        ("train.yaml", {"batch_size": 0}, ".batch_size=0"),
        ("train.yaml", {"exact": "yes"}, ".exact=yes"),
        ("train.yaml", {"speed": {"resident": 3}}, ".speed"),
        ("experiment/mnist_fast.yaml", {"data": {"mix": "mixdown"}}, ".data"),
        ("optimizer/sgd.yaml", {"lr": -1}, ".lr=-1"),
        ("scheduler/cosine.yaml", {"interval": "steps"}, ".interval=steps"),
        ("data/digits.yaml", {"augment": {"crop": 1.5}}, ".augment"),
        ("data/transforms/none.yaml", {"test": []}, ".test: there is no such key"),
    ],
)
def test_a_wrong_value_is_one(file: str, change: dict[str, Any], message: str) -> None:
    content = yaml.safe_load((CONF / file).read_text()) | change
    assert [error for error in errors(content, schema_of(CONF / file)) if error.startswith(message)]


def test_values_that_a_run_takes_are_right() -> None:
    for change in (
        {"devices": -1},
        {"lr": "${model.lr}"},
        {"debug": None},
        {"optimizer": {"lr_scale": {"net.*": 0.1}}},
    ):
        assert list(errors(yaml.safe_load((CONF / "train.yaml").read_text()) | change, read("train.json"))) == []


def test_help_is_without_the_line_for_editors() -> None:
    for arguments in ([], ["model=resnet18", "experiment=photos"]):
        page = help_page("train", arguments)
        assert "yaml-language-server" not in page
        assert len(page.splitlines()) > 10
    assert help_page("train", []).startswith("Every setting of a run")
