"""Copy a page that the project inherits into its own conf/, for editing:

    lockstep conf optimizer/adamw

The copy in conf/optimizer/adamw.yaml is used from then on, with later changes of yours; a newer Lockstep does not
change it. Without a name the command lists the pages; with a group, `lockstep conf optimizer`, its own.
"""

import difflib
import os
import shutil
import sys

from lockstep.config.pages import INHERITED
from lockstep.errors import UserError
from lockstep.programs.common.parser import parser_of
from lockstep.project import project

NOT_COPIED = ("base",)  # it stays inherited, so that a project gets the keys of a newer Lockstep


def names() -> list[str]:
    """Return the names of the pages that can be copied, with their groups."""
    files = [file.relative_to(folder) for folder in INHERITED for file in folder.rglob("*.yaml")]
    pages = {file.with_suffix("").as_posix() for file in files}
    return sorted(name for name in pages if name not in NOT_COPIED and not name.startswith(("primary/", "program/")))


def main(words: list[str]) -> int:
    """Copy the pages that are named, or list all. Return the exit code.

    Raises:
        UserError: there is no such page, or the project has its own.
    """
    parser = parser_of("conf", __doc__)
    parser.add_argument("pages", nargs="*", metavar="group/name", help="the pages to copy")
    wanted = list(dict.fromkeys(word.removesuffix(".yaml") for word in parser.parse_args(words).pages))
    known = names()
    if not wanted:
        print("\n".join(known))
        return 0
    conf = project().conf
    if len(wanted) == 1 and (group := [name for name in known if name.startswith(f"{wanted[0].rstrip('/')}/")]):
        print("\n".join(group))
        return 0
    for name in wanted:  # all are checked before the first is written
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            nearest = f"did you mean {near[0]}?" if near else "`lockstep conf` lists them"
            raise UserError(f"lockstep conf {name}: no such page: {nearest}")
        if os.path.lexists(conf / f"{name}.yaml"):  # a link that leads nowhere is not followed either
            raise UserError(f"conf/{name}.yaml exists already: edit it, or delete it first")
    for name in wanted:
        target = conf / f"{name}.yaml"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(next(file for folder in INHERITED if (file := folder / f"{name}.yaml").is_file()), target)
        print(f"conf/{name}.yaml is yours now", file=sys.stderr)
    return 0
