"""Print a page of the documentation, as many messages name one:

    lockstep docs own-data

Without a name the command lists the pages. They are text, in Markdown; `lockstep docs own-data | less` turns them.
"""

import difflib
from pathlib import Path

from lockstep.errors import UserError
from lockstep.programs.common.parser import parser_of
from lockstep.programs.common.template import manual, manual_pages


def pages() -> dict[str, Path]:
    """Return the files of all pages, by names such as use/own-data."""
    folder = manual()
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in manual_pages(folder)}


def main(words: list[str]) -> int:
    """Print a page, or list all. Return the exit code.

    Raises:
        UserError: there is no such page.
    """
    parser = parser_of("docs", __doc__)
    parser.add_argument("page", nargs="?", help="its name, such as use/own-data or own-data")
    wanted = parser.parse_args(words).page
    known = pages()
    if wanted is None:
        print("\n".join(known))
        return 0
    name = wanted.removeprefix("docs/").removesuffix(".md")
    short = {each.rpartition("/")[2]: each for each in known}
    page = known.get(name) or known.get(short.get(name, ""))
    if page is None:
        near = difflib.get_close_matches(name, [*known, *short], 1)
        nearest = f"did you mean {near[0]}?" if near else "`lockstep docs` lists them"
        raise UserError(f"lockstep docs {wanted}: no such page: {nearest}")
    print(page.read_text(encoding="utf-8"), end="")
    return 0
