"""Write the JSON Schemas with which editors complete and check the keys of conf/, and name them in its files:

    python scripts/schema.py

conf/schema/ has one for the front page, experiments and debug, and one for each other group. Types are those of
src/lockstep/config/schema.py, descriptions are the comments of the yaml files. Run it again after a change of keys.
"""

import argparse
import copy
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from common.comments import rows
from pydantic import TypeAdapter

from lockstep.config.arguments import CONF, MODELINE
from lockstep.config.schema import Keys, Transforms

LIKE_THE_FRONT_PAGE = ("experiment", "debug")  # groups whose files have all its keys
INTERPOLATION = {"type": "string", "pattern": r"^\$\{"}  # a value such as ${model.name}, which Hydra replaces


def schemas() -> dict[str, Any]:
    """Return the schemas by the name of their file."""
    page = (CONF / "train.yaml").read_text()
    kinds = _inlined(TypeAdapter(Keys).json_schema())["properties"]
    kinds["devices"]["anyOf"].append({"const": -1})  # Lightning's word for auto
    written = {}
    for folder in sorted({path.parent for path in CONF.rglob("*/*.yaml")}):
        group = folder.relative_to(CONF).as_posix()
        if group in LIKE_THE_FRONT_PAGE or group.startswith("hydra"):
            continue
        texts = {f"{group}={file.stem}": file.read_text() for file in sorted(folder.glob("*.yaml"))}
        kind = _inlined(TypeAdapter(Transforms).json_schema()) if group == "data/transforms" else kinds[group]
        texts |= {"train.yaml": page} if group in kinds else {}
        written[_file_name(group)] = _schema(f"Keys of conf/{group}/*.yaml", _group(kind, group, texts))
    properties: dict[str, Any] = {}
    for name, kind in kinds.items():
        if _file_name(name) in written:
            properties[name] = {"anyOf": [{"$ref": _file_name(name)}, {"type": "null"}]}
        else:
            properties[name] = _described(kind, _tree({"train.yaml": page})["properties"].get(name, {}))
    defaults = {"description": "the file of each group; in experiments `override /<group>: <name>`", "type": "array"}
    properties |= {"defaults": defaults, "hydra": {"type": "object"}}
    front_page = {"type": "object", "additionalProperties": False, "properties": properties}
    return {"train.json": _schema("Keys of conf/train.yaml, conf/experiment/ and conf/debug/", front_page), **written}


def _schema(title: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole schema. Every key may be left out."""
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, **content}


def _file_name(group: str) -> str:
    return f"{group.replace('/', '_')}.json"


def _group(kind: dict[str, Any], group: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the schema of a group: the type of its keys where there is one, and their comments in any of its files."""
    page = _tree({name: text for name, text in texts.items() if name == "train.yaml"})
    comments = _tree({name: text for name, text in texts.items() if name != "train.yaml"})
    comments["properties"] = page.get("properties", {}).get(group, {}).get("properties", {}) | comments["properties"]
    kind = next((option for option in kind.get("anyOf", ()) if option.get("type") == "object"), kind)
    described = _described({name: each for name, each in kind.items() if name != "description"}, comments)
    known: dict[str, Any] = {"_target_": {}, "_partial_": {}, "defaults": {}, "name": {}}
    return described | {"type": "object", "properties": known | described.get("properties", {})}


def _tree(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return nested `{description, properties}` of the keys of yaml files. Comments that differ have their files."""
    files: dict[str, dict[str, list[str]]] = {}
    for name, text in texts.items():
        for key, _, comment in rows(text):
            by_comment = files.setdefault(key, {})
            if comment:
                by_comment.setdefault(comment, []).append(name)
    tree: dict[str, Any] = {"properties": {}}
    for key, by_comment in files.items():
        node = tree
        for part in key.split("."):
            node = node.setdefault("properties", {}).setdefault(part, {})
        if len(by_comment) == 1:
            (node["description"],) = by_comment
        elif by_comment:
            node["description"] = "; ".join(f"{', '.join(names)}: {comment}" for comment, names in by_comment.items())
    return tree


def _described(kind: dict[str, Any], comments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a type with the comments of its key, and of the keys in it."""
    kind = copy.deepcopy(kind)
    if "description" in comments:
        kind = {"description": comments["description"]} | kind
    if inner := comments.get("properties"):
        keys = next((option for option in kind.get("anyOf", ()) if option.get("type") == "object"), kind)
        kinds = keys.get("properties", {})
        keys["properties"] = kinds | {name: _described(kinds.get(name, {}), inner[name]) for name in inner}
    return kind


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return pydantic's schema without references, titles and defaults, with interpolations, and null for groups."""

    def resolved(part: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in part:
            part = schema["$defs"][part["$ref"].rpartition("/")[2]]
        part = {name: each for name, each in part.items() if name not in ("title", "default", "required", "$defs")}
        if part.get("type") == "object":
            part.pop("description", None)
        for name in ("anyOf", "oneOf"):
            if name in part:
                part[name] = [resolved(option) for option in part[name]]
        if "properties" in part:
            part["properties"] = {name: open_to_hydra(resolved(each)) for name, each in part["properties"].items()}
        return part

    def open_to_hydra(part: dict[str, Any]) -> dict[str, Any]:
        if part == {"type": "string"}:
            return part
        other = {"type": "null"} if part.get("type") == "object" else INTERPOLATION
        return {"anyOf": [*part.get("anyOf", [part]), other]}

    return resolved(schema)


def with_modeline(text: str, path: Path) -> str:
    """Return a yaml file's text with the line that names its schema, below the lines that Hydra reads (`@package`)."""
    group = path.parent.relative_to(CONF).as_posix()
    name = "train.json" if group in (".", *LIKE_THE_FRONT_PAGE) else _file_name(group)
    schema = os.path.relpath(CONF / "schema" / name, path.parent)
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(MODELINE)]
    header = next((number for number, line in enumerate(lines) if not line.startswith("# @")), 0)
    return "".join([*lines[:header], f"{MODELINE}={schema}\n", *lines[header:]])


def described_files() -> list[Path]:
    """Return the yaml files that have a schema."""
    groups = [path for path in sorted(CONF.rglob("*/*.yaml")) if path.relative_to(CONF).parts[0] != "hydra"]
    return [CONF / "train.yaml", *groups]


def main() -> None:
    """Write the schemas, and the lines that name them."""
    description, _, epilog = (__doc__ or "").partition("\n\n")
    argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    folder = CONF / "schema"
    folder.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (folder / name).write_text(json.dumps(schema, indent=1) + "\n")
    for path in described_files():
        text = path.read_text()
        if (changed := with_modeline(text, path)) != text:
            path.write_text(changed)


if __name__ == "__main__":
    main()
