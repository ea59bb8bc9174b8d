"""Write the JSON Schemas with which editors complete and check the keys of conf/:

    lockstep schema

conf/schema/ has one schema for the front page (train.yaml), experiment/ and debug/, and one for each other group. Types
are those of src/lockstep/config/schema.py, descriptions are the comments of the yaml files. The program also writes
into each yaml file the line that names its schema. Run the program again after a change of keys or comments.
"""

import copy
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
    comments = _comments({"train.yaml": pages.BASE.read_text()})["properties"]
    schemas_by_key = _for_editors(TypeAdapter(Keys).json_schema())["properties"]
    schemas_by_key["devices"]["anyOf"].append({"const": -1})  # Lightning's word for auto
    group_schemas = {}
    for group, files in _groups().items():
        if group in LIKE_THE_FRONT_PAGE:
            continue
        texts = {f"{group}={file.stem}": file.read_text() for file in files}
        if group == "data/transforms":
            schema = _for_editors(TypeAdapter(Transforms).json_schema())
        else:
            schema = schemas_by_key[group]
        content = _group_schema(schema, comments.get(group, {}), texts)
        group_schemas[_file_name(group)] = _schema_file(f"Keys of conf/{group}/*.yaml", content)
    properties: dict[str, Any] = {}
    for key, schema in schemas_by_key.items():
        if _file_name(key) in group_schemas:
            properties[key] = {"anyOf": [{"$ref": _file_name(key)}, {"type": "null"}]}
        else:
            properties[key] = _with_descriptions(schema, comments.get(key, {}))
    defaults = {"description": "the file of each group; in experiments `override /<group>: <name>`", "type": "array"}
    properties |= {"defaults": defaults, "hydra": {"type": "object"}}
    content = {"type": "object", "additionalProperties": False, "properties": properties}
    title = "Keys of conf/train.yaml, conf/experiment/ and conf/debug/"
    return {"train.json": _schema_file(title, content), **group_schemas}


def _groups() -> dict[str, list[Path]]:
    """Return the pages of each group: the project's, and those that it inherits."""
    files: dict[str, dict[str, Path]] = {}
    for folder in reversed(pages.folders()):
        for file in folder.rglob("*/*.yaml"):
            group = file.parent.relative_to(folder).as_posix()
            if group.partition("/")[0] not in WITHOUT:
                files.setdefault(group, {})[file.name] = file
    return {group: [files[group][name] for name in sorted(files[group])] for group in sorted(files)}


def _schema_file(title: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a schema's file. Every key may be left out of a yaml file, so no schema has `required`."""
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": title, **content}


def _file_name(group: str) -> str:
    return f"{group.replace('/', '_')}.json"


def _group_schema(
    schema: dict[str, Any], front_page_comments: Mapping[str, Any], texts: Mapping[str, str]
) -> dict[str, Any]:
    """Return the schema of a group's yaml files: `schema` with their comments as descriptions.

    Args:
        schema: the JSON schema of the group's key.
        front_page_comments: the comments of the group's key in train.yaml.
        texts: the texts of the group's yaml files, by name.
    """
    comments = _comments(texts)
    comments["properties"] = front_page_comments.get("properties", {}) | comments["properties"]
    without_description = {word: rule for word, rule in _object_schema(schema).items() if word != "description"}
    described = _with_descriptions(without_description, comments)
    common_keys: dict[str, Any] = {"_target_": {}, "_partial_": {}, "defaults": {}, "name": {}}
    return described | {"type": "object", "properties": common_keys | described.get("properties", {})}


def _object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the alternative of a schema that describes a mapping; the schema itself if it has none."""
    return next((option for option in schema.get("anyOf", ()) if option.get("type") == "object"), schema)


def _comments(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the comments of the keys of yaml files, as a nested `{description, properties}`.

    If a key's comments differ between files, each is preceded by the names of the files that have it.
    """
    files_by_comment: dict[str, dict[str, list[str]]] = {}  # key -> comment -> names of files
    for name, text in texts.items():
        for key, _, comment in rows(text):
            files = files_by_comment.setdefault(key, {})
            if comment:
                files.setdefault(comment, []).append(name)
    root: dict[str, Any] = {"properties": {}}
    for key, files in files_by_comment.items():
        node = root
        for part in key.split("."):
            node = node.setdefault("properties", {}).setdefault(part, {})
        if len(files) == 1:
            (node["description"],) = files
        elif files:
            node["description"] = "; ".join(f"{', '.join(names)}: {comment}" for comment, names in files.items())
    return root


def _with_descriptions(schema: dict[str, Any], comments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a key with the comments of this key, and of the keys in it, as descriptions."""
    schema = copy.deepcopy(schema)
    if "description" in comments:
        schema = {"description": comments["description"]} | schema
    if key_comments := comments.get("properties"):
        mapping = _object_schema(schema)
        properties = mapping.get("properties", {})
        described = {key: _with_descriptions(properties.get(key, {}), key_comments[key]) for key in key_comments}
        mapping["properties"] = properties | described
    return schema


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
