"""Write the parts of docs/ that follow from code: keys, refusals, the Python API, whole files.

    python docs/reference.py

`make reference` runs it, and a test compares its result with the pages. A part stands between two comments:
`<!-- written by make reference: keys of train -->` and `<!-- end -->`.
"""

import inspect
import re
import textwrap
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from lockstep import HOMES
from lockstep.config.pages import INHERITED
from lockstep.programs.common.keys import KEY, rows

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
CONF = [ROOT / "conf", *INHERITED]
REFUSALS = ROOT / "tests" / "refusals.yaml"
PROGRAMS = ("evaluate", "predict", "export", "parity", "verify")
NO_PROSE = ("# @package", "# yaml-language-server:")  # comments for Hydra and for editors
SECTION = re.compile(r"^# --- (.*) ---$")
PART = re.compile(r"(<!-- written by make reference: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
SECTIONS_OF_DOCSTRINGS = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):\n((?:(?: .*)?\n?)+)", re.MULTILINE)


def written(text: str) -> str:
    """Return the text of a page with its parts as they follow from the code now."""

    def part(match: re.Match[str]) -> str:
        maker, _, rest = match[2].partition(" of ")
        content = MAKERS[maker](rest)
        return f"{match[1]}\n{content.strip()}\n\n{match[3]}"

    return PART.sub(part, text)


def main() -> None:
    """Write all pages that have such a part, and print the names of those that change."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        if (new := written(text)) != text:
            page.write_text(new)
            print(page.relative_to(ROOT))


# --- keys and refusals ---


def _keys(of: str) -> str:
    """Return the keys of train.yaml, of the groups or of the other programs."""
    if of == "train":
        return _front_page("train", 2)
    if of == "the groups":
        return _groups()
    return "\n\n".join(f"### {name}\n\n{_front_page(name, 4)}" for name in PROGRAMS if _page(name))


def _page(name: str) -> Path | None:
    """Return the file of a program's page."""
    files = (conf / folder / f"{name}.yaml" for conf in CONF for folder in ("", "program", "primary"))
    return next((file for file in files if file.is_file()), None)


def _front_page(name: str, level: int) -> str:
    """Return the groups and keys of a program's front page as Markdown."""
    page = _page(name)
    assert page is not None
    head, _, body = page.read_text().partition("defaults:\n")
    choices, _, keys = body.partition("\n\n")
    if name == "train":  # its page has a part of the keys, and inherits all
        inherited, _, keys = (CONF[1] / "base.yaml").read_text().partition("defaults:\n")[2].partition("\n\n")
        choices += "\n" + inherited
    parts = [] if name == "train" else [_comment(head)]  # the page of train has its own
    groups = [
        (match["key"].removeprefix("override "), match["value"] or "", match["comment"] or "")
        for match in map(KEY.match, choices.splitlines())
        if match and match["key"] not in ("hydra", "_self_", "base")
    ]
    if groups:
        parts.append(f"{'#' * level} Groups\n\n{_table(groups, ('group', 'default', 'what it chooses'))}")
    title, section = "Keys", ""
    for line in [*keys.splitlines(), "# ---  ---"]:
        if match := SECTION.match(line):
            if table := list(rows(section)):
                parts.append(f"{'#' * level} {title[0].upper()}{title[1:]}\n\n{_table(table)}")
            title, section = match[1].replace("`", "") or "Keys", ""
        else:
            section += line + "\n"
    return "\n\n".join(parts)


def _groups() -> str:
    """Return a section for each group of conf/, with a table for each of its files."""
    parts = []
    pages = {path.relative_to(conf): path for conf in reversed(CONF) for path in conf.rglob("*/*.yaml")}
    for group in sorted({name.parent.as_posix() for name in pages}):
        if group.startswith(("hydra", "primary", "program")):
            continue
        parts.append(f"## {group}")
        for file in (path for name, path in sorted(pages.items()) if name.parent.as_posix() == group):
            text = file.read_text()
            comments = re.match(r"(?:#.*\n)*", text)
            parts.append(f"### {group}={file.stem}\n\n{_comment(comments[0] if comments else '')}")
            if table := list(rows(text)):
                parts.append(_table(table))
    return "\n\n".join(parts)


def _refusals() -> str:
    """Return a section for each of tests/refusals.yaml, with a table of commands and of the lines that refuse them."""
    parts = []
    for section in yaml.safe_load(REFUSALS.read_text()):
        program = f"src/{section.get('program', 'train')}.py"
        parts.append(f"## {section['title']}\n\nWhat follows `python {program}`, and the line that is printed.")
        for name, text in section.get("files", {}).items():
            parts.append(f"The file `<folder>/{name}` is\n\n" + re.sub("^", "    ", text.rstrip(), flags=re.MULTILINE))
        lines = ["| command | message |", "|---|---|"]
        for row in section["rows"]:
            command, message = (_code(row[key].replace("{folder}", "<folder>")) for key in ("command", "message"))
            lines.append(f"| {command} | {message} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _file(path: str) -> str:
    """Return a file as a block of code."""
    kind = {".py": "python", ".yaml": "yaml"}[Path(path).suffix]
    return f"```{kind}\n{(ROOT / path).read_text().strip()}\n```"


def _code(text: str) -> str:
    """Return text as inline code in a cell of a Markdown table."""
    fence = "``" if "`" in text else "`"
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text.replace('|', chr(92) + '|')}{space}{fence}" if text else ""


def _comment(text: str) -> str:
    """Return the comments at the head of a yaml file as Markdown: sentences, then commands as code."""
    comments = [line for line in text.splitlines() if line.startswith("#") and not line.startswith(NO_PROSE)]
    lines = [line.removeprefix("#") for line in comments]
    prose = " ".join(line.strip() for line in lines)
    commands = re.findall(r"(?:python|tensorboard|mlflow) \S[^#]*?(?=  |$)", "\n".join(lines), flags=re.MULTILINE)
    for command in commands:
        prose = prose.replace(command.strip(), "")
    sentence = re.sub(r"\s+", " ", prose).strip().rstrip(":")
    code = "".join(f"\n\n    {command.strip()}" for command in commands)
    return _escaped(sentence[:1].upper() + sentence[1:]) + code


def _table(table: list[tuple[str, str, str]], head: tuple[str, str, str] = ("key", "default", "what it means")) -> str:
    """Return rows of key, default and meaning as a Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|---|---|---|"]
    for key, value, comment in table:
        shown = f"`{value.replace('|', chr(92) + '|')}`" if value else ""
        lines.append(f"| `{key}` | {shown} | {_escaped(comment)} |")
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """Return plain text so that Markdown shows it as it is."""
    return re.sub(r"([|*_\[\]])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))


# --- the Python API ---


def _api(of: str) -> str:
    """Return a section for each of some names, given with their modules and separated by commas.

    Behind the name of a class may stand those of its methods that a user calls: `lockstep.Job: make_module has_test`.
    """
    parts = []
    for each in of.split(", "):
        name, _, methods = each.partition(": ")
        module, _, attribute = name.rpartition(".")
        home = HOMES.get(attribute, module) if module == "lockstep" else module
        parts.append(_described(name, attribute, getattr(import_module(home), attribute), methods.split()))
    return "\n\n".join(parts)


def _described(name: str, short: str, value: Any, methods: list[str]) -> str:
    """Return a section about a function or class, with `methods`, or else the public ones that the class itself has."""
    parts = [f"### {name}", _signature(short, value), _docstring(value)]
    if inspect.isclass(value):
        for own, member in vars(value).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            wanted = own in methods if methods else not own.startswith("_")
            if not (wanted and inspect.isfunction(function) and inspect.getdoc(function)):
                continue
            shown = f"`{own}`" if isinstance(member, property) else _signature(own, function, without_self=True)
            parts.append(f"#### {short}.{own}\n\n{shown}\n\n{_docstring(function)}")
    return "\n\n".join(part for part in parts if part)


def _signature(name: str, value: Any, without_self: bool = False) -> str:
    """Return a call with its arguments as a block of code; nothing for a class without arguments."""
    try:
        signature = inspect.signature(value)
    except ValueError:
        return ""
    arguments = [str(each) for key, each in signature.parameters.items() if not (without_self and key == "self")]
    arguments = [re.sub(r"<[\w.]*?(\w+)(?: at 0x\w+)?>", r"\1", _short(each)) for each in arguments]
    result = signature.return_annotation
    end = "" if result in (inspect.Signature.empty, None) or inspect.isclass(value) else f" -> {_name(result)}"
    line = f"{name}({', '.join(arguments)}){end}"
    if len(line) > 100:
        line = "\n".join([f"{name}(", *(f"    {each}," for each in arguments), f"){end}"])
    return f"```python\n{line}\n```"


def _name(annotation: Any) -> str:
    return annotation.__name__ if inspect.isclass(annotation) else _short(str(annotation))


def _short(text: str) -> str:
    """Return an argument without the modules of its types, and without the quotation marks of types in quotes."""
    return re.sub(r"\b([a-z_]\w*\.)+(?=[A-Z])", "", re.sub(r": '([^']*)'", r": \1", text))


def _docstring(value: Any) -> str:
    """Return a docstring as Markdown; its sections become lists."""
    text = inspect.cleandoc(value.__doc__ or "")

    def section(match: re.Match[str]) -> str:
        body = textwrap.dedent(match[2]).strip("\n")
        if match[1] in ("Returns", "Yields"):
            return f"*{match[1]}*: {body}\n\n"
        items = re.split(r"\n(?=\S)", body)
        lines = [re.sub(r"^([\w*]+): ", r"- `\1`: ", item).replace("\n    ", "\n  ") for item in items]
        return f"*{match[1]}*:\n\n" + "\n".join(lines) + "\n\n"

    return SECTIONS_OF_DOCSTRINGS.sub(section, text).strip()


MAKERS: dict[str, Callable[[str], str]] = {
    "keys": _keys,
    "refusals": lambda _: _refusals(),
    "api": _api,
    "file": _file,
}

if __name__ == "__main__":
    main()
