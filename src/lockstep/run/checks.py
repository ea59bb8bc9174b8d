"""Bad values: pydantic finds the first one, and one line says what was typed and what would be right."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from lockstep.arithmetic.layout import Refusal

ROOT = Path(__file__).resolve().parents[3]  # the project: conf/, src/, outputs/

Check = Callable[[str, Any], Any]
KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "string": "a text",
    "array": "a list",
    "object": "a mapping",
}
BOUNDS = {
    "minimum": "of at least",
    "exclusiveMinimum": "greater than",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def as_text(value: Any) -> Any:
    """A number as it was typed: `name=5`."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def absolute(path: str) -> str:
    """A folder, also from other folders."""
    return os.path.abspath(os.path.expanduser(path))


Whole: TypeAlias = Annotated[int, Field(strict=True, ge=1)]
FromZero: TypeAlias = Annotated[int, Field(strict=True, ge=0)]
Positive: TypeAlias = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Fraction: TypeAlias = Annotated[float, Field(strict=True, ge=0, lt=1)]
Flag: TypeAlias = Annotated[bool, Field(strict=True)]
Text: TypeAlias = Annotated[str, BeforeValidator(as_text)]
Folder: TypeAlias = Annotated[
    str, BeforeValidator(as_text), Field(min_length=1, description="a folder"), AfterValidator(absolute)
]
Name: TypeAlias = Annotated[
    str,
    BeforeValidator(as_text),
    Field(
        pattern=r"^\w[\w.+ -]*$",
        max_length=100,
        description="a name: a letter or digit, and then at most 99 of those, '.', '_', '+', '-' and spaces",
    ),
]


def checker(kind: Any) -> Check:
    """A function of a key and its value that returns the value as `kind`, which is anything that pydantic validates.

    Its Refusal names the key, below it the one that is wrong, and what would be right.
    """

    @cache  # built when it is first asked
    def adapter() -> TypeAdapter[Any]:
        return TypeAdapter(kind)

    def check(key: str, value: Any) -> Any:
        try:
            return adapter().validate_python(value)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False)[0]
            raise Refusal(_told(key, value, found["type"], found["loc"], adapter().json_schema())) from None

    return check


def whole(least: int, *, most: int | None = None) -> Check:
    """A whole number of at least `least`, and at most `most`."""
    return checker(Annotated[int, Field(strict=True, ge=least, le=most)])


def real(*, above: float | None = None, least: float | None = None) -> Check:
    """A finite number, greater than `above` or at least `least`."""
    return checker(Annotated[float, Field(strict=True, gt=above, ge=least, allow_inf_nan=False)])


def choice(*names: str) -> Check:
    """One of `names`."""
    return checker(Literal[names])


flag, folder, run_name = checker(Flag), checker(Folder), checker(Name)


def show(value: Any) -> str:
    """A value as it is typed on the command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def options(group: str) -> list[str]:
    """The files of a config group."""
    return sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml"))


def unknown(name: str, known: Iterable[str]) -> str:
    """`did you mean X? known: ...`; of a long list only what is near."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    nearest = f"did you mean {near[0]}?" if near else ""
    return f"{nearest} known: {', '.join(known)}".strip() if len(known) <= 12 else nearest or "--help lists them"


def _told(key: str, value: Any, error: str, place: Iterable[Any], schema: Mapping[str, Any]) -> str:
    """What is wrong at a place below `key`, in words; `schema` is the JSON schema of what it must be."""
    keys, node = [key] if key else [], _resolved(schema, schema)
    for part in place:
        fields = node.get("properties", {})
        if part not in fields:
            if fields and error in ("extra_forbidden", "unexpected_keyword_argument"):
                return f"{'.'.join([*keys, str(part)])}: there is no such key; {unknown(str(part), sorted(fields))}"
            break  # inside a value: one of a list, say
        keys.append(part)
        if error == "missing" and part not in value:
            return f"{'.'.join(keys)} must be given: {'.'.join(keys)}=..."
        node, value = _resolved(fields[part], schema), value[part]
    name = ".".join(keys)
    if "enum" in node:
        return f"{name}={show(value)}: {unknown(str(value), node['enum'])}"
    if node.get("type") == "object" and (names := options(name)):
        return f"{name}={show(value)}: must be the name of a file in conf/{name}/ ({', '.join(names)})"
    words = _words(node)
    return f"{name}={show(value)}: must be {', '.join(words[:-1])}{' or ' * (len(words) > 1)}{words[-1]}"


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """A node of a JSON schema without references; of a group that may be null, the group."""
    if "$ref" in node:
        node = {**schema["$defs"][node["$ref"].rpartition("/")[2]], **node}
    alternatives = [_resolved(each, schema) for each in node.get("anyOf", ())]
    group = [each for each in alternatives if "properties" in each]
    return {**group[0], **node} if group else {**node, **({"anyOf": alternatives} if alternatives else {})}


def _words(node: Mapping[str, Any]) -> list[str]:
    """What a node of a JSON schema takes; null goes without saying."""
    if "properties" in node:
        return [f"a mapping of {', '.join(node['properties'])}"]
    if "description" in node:
        return [node["description"]]
    if "anyOf" in node:
        return [word for each in node["anyOf"] for word in _words(each)]
    if "const" in node or "enum" in node:
        return [show(name) for name in node.get("enum", [node.get("const")])]
    if node.get("type") == "boolean":
        return ["true", "false"]
    if node.get("type") == "null":
        return []
    bounds = [f"{said} {node[bound]}" for bound, said in BOUNDS.items() if bound in node]
    return [f"{KINDS[node['type']]} {' and '.join(bounds)}".strip()]
