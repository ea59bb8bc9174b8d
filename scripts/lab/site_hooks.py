"""Functions that mkdocs calls while it builds the site: tables of keys and of refusals, pages of extras and decisions.

mkdocs.yml names this file; `make docs` builds the site.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from lockstep.programs.common.keys import KEY, rows

ROOT = Path(__file__).resolve().parents[2]
CONF = [ROOT / "conf", ROOT / "src" / "lockstep" / "conf"]  # as in lockstep.config.pages, which this need not import
REFUSALS = ROOT / "tests" / "refusals.yaml"
PROGRAMS = ("evaluate", "predict", "export", "parity", "verify")
# Sections whose pages are found in a folder, in the order of their titles.
FOLDERS = {"Extras": "extras", "Decisions": "decisions"}
NO_PROSE = ("# @package", "# yaml-language-server:")  # comments for Hydra and for editors
SECTION = re.compile(r"^# --- (.*) ---$")


def on_config(config: Any) -> Any:
    """Leave out pages of the navigation whose extra was deleted; add pages of FOLDERS that it does not list."""
    docs = Path(config["docs_dir"])
    config["nav"] = [entry for entry in (_existing(entry, docs) for entry in config["nav"]) if entry is not None]
    listed = set(_pages(config["nav"]))
    for title, entries in _sections(config["nav"]):
        if title in FOLDERS:
            folder = docs / FOLDERS[title]
            names = {f"{FOLDERS[title]}/{path.name}" for path in folder.glob("*.md") if path.name != "index.md"}
            entries += sorted(names - listed)
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace comments by tables, and link what a page can't link itself, as its target may be deleted.

    `<!-- keys of NAME -->` becomes the keys of train.yaml, of groups or of programs, `<!-- table of refusals -->` the
    commands and messages of tests/refusals.yaml. The links are those to pages of extras, and the list of decisions.
    """
    makers = {
        "train": lambda: _front_page("train", 2),
        "the groups": _groups,
        "the programs": lambda: "\n\n".join(f"## {name}\n\n{_front_page(name, 3)}" for name in PROGRAMS if _page(name)),
    }
    if page.file.src_uri == "extras.md":  # its table can't link by itself: an extra's page goes with the extra
        names = "|".join(path.stem for path in Path(config["docs_dir"], "extras").glob("*.md"))
        markdown = re.sub(rf"^\| ({names}) \|", r"| [\1](extras/\1.md) |", markdown, flags=re.MULTILINE)
    if page.file.src_uri == "decisions/index.md":
        pages = sorted(path for path in Path(config["docs_dir"], "decisions").glob("*.md") if path.name != "index.md")
        titles = (path.read_text().partition("\n")[0].removeprefix("# ") for path in pages)
        markdown += "\n" + "\n".join(f"- [{title}]({path.name})" for title, path in zip(titles, pages, strict=True))
    markdown = re.sub("<!-- table of refusals -->", lambda _: _refusals(), markdown)
    return re.sub(r"<!-- keys of ([\w ]+) -->", lambda match: makers[match[1]](), markdown)


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


def _existing(entry: Any, docs: Path) -> Any:
    """Return an entry of the navigation without pages in extras/ that are not there; None where nothing is left."""
    if isinstance(entry, str):
        return None if entry.startswith("extras/") and not (docs / entry).exists() else entry
    ((title, inside),) = entry.items()
    if isinstance(inside, list):
        left = [each for each in (_existing(each, docs) for each in inside) if each is not None]
    else:
        left = _existing(inside, docs)
    return {title: left} if left else None


def _pages(nav: list[Any]) -> Iterator[str]:
    """Yield every page of a navigation."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            (inside,) = entry.values()
            yield from _pages(inside if isinstance(inside, list) else [inside])


def _sections(nav: list[Any]) -> Iterator[tuple[str, list[Any]]]:
    """Yield title and entries of every section of a navigation."""
    for entry in nav:
        if isinstance(entry, dict):
            ((title, inside),) = entry.items()
            if isinstance(inside, list):
                yield title, inside
                yield from _sections(inside)
