"""The JSON Schemas for editors: every page is valid by its own, and a wrong one is not."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, page_file

from lockstep.config.arguments import MODELINE, help_page, read_arguments
from lockstep.config.pages import INHERITED
from lockstep.programs import schema
from lockstep.project import use_project_of

CONF = ROOT / "conf"
FOLDERS = (CONF, *INHERITED)
KINDS: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


@cache
def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(schemas()[name]))
    return content


@cache
def schemas() -> dict[str, Any]:
    return schema.schemas()


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
    assert target.parent in [folder / "schema" for folder in FOLDERS]
    return read(target.name)


def test_comments_are_descriptions() -> None:
    properties = read("train.json")["properties"]
    assert properties["lr"]["description"].startswith("peak learning rate")
    assert properties["speed"]["anyOf"][0]["properties"]["tf32"]["description"]
    assert "description" not in properties["extras"], "a class's docstring"


def test_they_are_written_into_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    for name in ("train.yaml", "model/mnist_cnn.yaml"):
        lines = (CONF / name).read_text().splitlines(keepends=True)
        (tmp_path / "conf" / name).write_text("".join(line for line in lines if MODELINE not in line))
    use_project_of(tmp_path)
    assert schema.main([]) == 0
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "conf" / "schema").iterdir()}
    assert {"train.json", "model.json", "optimizer.json"} <= written.keys()
    for name in ("train.yaml", "model/mnist_cnn.yaml"):
        assert (tmp_path / "conf" / name).read_text() == (CONF / name).read_text()


PAGES = [(path, folder) for folder in FOLDERS for path in schema.described_files(folder)]


@pytest.mark.parametrize(("path", "folder"), PAGES, ids=[str(path.relative_to(ROOT)) for path, _ in PAGES])
def test_every_page_is_valid(path: Path, folder: Path) -> None:
    text = path.read_text()
    assert schema.with_modeline(text, path, folder) == text, "the line for editors"
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
    content = yaml.safe_load(page_file(file.removesuffix(".yaml")).read_text()) | change
    assert [
        error
        for error in errors(content, schema_of(page_file(file.removesuffix(".yaml"))))
        if error.startswith(message)
    ]


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
        page = help_page(read_arguments(arguments, "train"))
        assert "yaml-language-server" not in page
        assert len(page.splitlines()) > 10
    assert help_page(read_arguments([], "train")).startswith("What this project trains by default")
