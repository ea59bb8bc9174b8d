"""Write the JSON Schemas with which editors complete and check the keys of conf/:

    lockstep schema

conf/schema/ has one schema for the front page (train.yaml), experiment/ and debug/, and one for each other group. Types
are those of src/lockstep/config/schema.py, descriptions are the comments of base.yaml. The program also writes into
each yaml file the line that names its schema. Run it again with a newer Lockstep.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lockstep.config import pages
from lockstep.config.arguments import MODELINE
from lockstep.config.schema import Keys, Transforms
from lockstep.programs.common.keys import rows
from lockstep.programs.common.parser import parser_of
from lockstep.project import project

LIKE_THE_FRONT_PAGE = ("experiment", "debug")  # groups whose files may have all keys of train.yaml
WITHOUT = ("hydra", "primary", "program")  # folders whose files have no schema
INTERPOLATION = {"type": "string", "pattern": r"^\$\{"}  # a value such as ${model.name}, which Hydra replaces


def schemas() -> dict[str, Any]:
    """Return all schemas by the names of their files."""
    of_keys = _for_editors(TypeAdapter(Keys).json_schema())["properties"]
    of_keys["devices"]["anyOf"].append({"const": -1})  # Lightning's word for auto
    of_groups = of_keys | {"data/transforms": _for_editors(TypeAdapter(Transforms).json_schema())}
    found = {path.parent.relative_to(conf).as_posix() for conf in pages.folders() for path in described_files(conf)}
    groups = sorted(found.intersection(of_groups).difference(LIKE_THE_FRONT_PAGE))
    files = {
        _file_name(group): _schema_file(f"Keys of conf/{group}/*.yaml", _of_page(of_groups[group])) for group in groups
    }
    comments = {key: comment for key, _, comment in rows(pages.BASE.read_text()) if comment}
    properties: dict[str, Any] = {"defaults": {"type": "array"}, "hydra": {"type": "object"}}
    for key, schema in of_keys.items():
        of_file = {"anyOf": [{"$ref": _file_name(key)}, {"type": "null"}]}
        properties[key] = _described(of_file if key in groups else schema, key, comments)
    content = {"type": "object", "additionalProperties": False, "properties": properties}
    return {"train.json": _schema_file("Keys of conf/train.yaml, conf/experiment/ and conf/debug/", content), **files}


def _schema_file(title: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a schema's file. Every key may be left out of a yaml file, so no schema has `required`."""
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, **content}


def _file_name(group: str) -> str:
    return f"{group.replace('/', '_')}.json"


def _of_page(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a group's pages, which may have keys for Hydra, from that of the group's key."""
    mapping = _mapping(schema)
    hydras: dict[str, Any] = {"_target_": {}, "_partial_": {}, "defaults": {}, "name": {}}
    return mapping | {"type": "object", "properties": hydras | mapping.get("properties", {})}


def _mapping(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the alternative of a schema that describes a mapping; the schema itself if it has none."""
    return next((option for option in schema.get("anyOf", ()) if option.get("type") == "object"), schema)


def _described(schema: dict[str, Any], key: str, comments: Mapping[str, str]) -> dict[str, Any]:
    """Return the schema of a key with its comment, and those of the keys in it, as descriptions."""
    inner = _mapping(schema).get("properties", {})
    inner.update({name: _described(inner[name], f"{key}.{name}", comments) for name in inner})
    return {"description": comments[key], **schema} if key in comments else schema


def _for_editors(root: dict[str, Any]) -> dict[str, Any]:
    """Return pydantic's schema as editors need it.

    References are replaced by the schemas that they name. Titles, defaults, `required` and the docstrings of classes
    are left out. Each value may also be an interpolation, and each group null.
    """

    def resolved(schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in schema:
            schema = root["$defs"][schema["$ref"].rpartition("/")[2]]
        left_out = ("title", "default", "required", "$defs")
        schema = {word: rule for word, rule in schema.items() if word not in left_out}
        if schema.get("type") == "object":
            schema.pop("description", None)  # the docstring of a class
        for word in ("anyOf", "oneOf"):
            if word in schema:
                schema[word] = [resolved(option) for option in schema[word]]
        if "properties" in schema:
            schema["properties"] = {key: open_to_hydra(resolved(each)) for key, each in schema["properties"].items()}
        return schema

    def open_to_hydra(schema: dict[str, Any]) -> dict[str, Any]:
        """Allow null for a group and an interpolation for any other value. A string may be an interpolation already."""
        if schema == {"type": "string"}:
            return schema
        other = {"type": "null"} if schema.get("type") == "object" else INTERPOLATION
        return {"anyOf": [*schema.get("anyOf", [schema]), other]}

    return resolved(root)


def with_modeline(text: str, path: Path, conf: Path) -> str:
    """Return the text of a page of `conf` with the line that names its schema, below those for Hydra (`# @package`)."""
    group = path.parent.relative_to(conf).as_posix()
    name = "train.json" if group in (".", *LIKE_THE_FRONT_PAGE) else _file_name(group)
    schema_path = os.path.relpath(conf / "schema" / name, path.parent)
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(MODELINE)]
    header_length = next((number for number, line in enumerate(lines) if not line.startswith("# @")), 0)
    return "".join([*lines[:header_length], f"{MODELINE}={schema_path}\n", *lines[header_length:]])


def described_files(conf: Path) -> list[Path]:
    """Return the pages of a folder that have a schema."""
    files = sorted(path for path in conf.rglob("*/*.yaml") if path.relative_to(conf).parts[0] not in WITHOUT)
    return [*conf.glob("train.yaml"), *files]


def main(words: list[str]) -> int:
    """Write the schemas, and the lines that name them."""
    parser = parser_of("schema", __doc__)
    parser.parse_args(words)
    conf = project().conf
    folder = conf / "schema"
    folder.mkdir(exist_ok=True)
    for name, schema in schemas().items():
        (folder / name).write_text(json.dumps(schema, indent=1) + "\n")
    for path in described_files(conf):
        text = path.read_text()
        if (new_text := with_modeline(text, path, conf)) != text:
            path.write_text(new_text)
    return 0
