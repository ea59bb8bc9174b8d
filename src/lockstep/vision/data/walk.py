"""Find the files in a user's folder. What can't be read is refused, and what is passed over is counted."""

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import UserError
from lockstep.text import is_url, join_names, plural

# Folders of thumbnails and deleted files that network drives, file managers and archives leave, in lower case. Those
# that begin with a dot are passed over as well.
LEFT_BEHIND = {
    *("@eadir", "@tmp", "@recycle", "#recycle", "#snapshot", "@recently-snapshot", "@__thumb"),
    *("$recycle.bin", "recycler", "recycled", "system volume information", "found.000"),
    *("lost+found", "__macosx", "network trash folder", "temporary items", "__pycache__"),
}


@dataclass
class Walk:
    """The files in a folder, at any depth.

    Attributes:
        paths: relative to the folder, sorted.
        inodes: their numbers on the file system, in the order of `paths`.
        passed_over: what was not taken, by kind: an ending, `hidden`, or a folder's name with a slash at its end.
    """

    paths: list[str] = field(default_factory=list)
    inodes: list[int] = field(default_factory=list)
    passed_over: Counter[str] = field(default_factory=Counter)

    def pass_over(self, name: str, is_wanted: bool = False) -> None:
        """Count what is not taken: a folder, if its name has a slash at its end, or a file.

        Of hidden files only those whose names are wanted are counted, and not the index that data=shards makes.
        """
        if name.endswith("/") and name != ".index/":
            self.passed_over[name] += 1
        elif not name.startswith("."):
            self.passed_over[os.path.splitext(name)[1].lower() or "without an ending"] += 1
        elif is_wanted:
            self.passed_over["hidden"] += 1


def local_folder(opener: str, data_dir: str) -> Path:
    """Return the folder of an opener that reads no URL.

    Raises:
        UserError: It is a URL.
    """
    if is_url(data_dir):
        raise UserError(f"{opener}: data_dir={data_dir} is a URL: must be a folder (data=shards reads shards of a URL)")
    return Path(data_dir)


def is_left_behind(name: str) -> bool:
    """Check whether a folder is hidden, or one that a network drive, a file manager or an archive leaves."""
    return name.startswith(".") or name.lower() in LEFT_BEHIND


def walk(root: Path, wanted: Callable[[str], bool], below: str = "") -> Walk:
    """Find the files in the folder `below` of `root` whose names are `wanted`. Links are followed, a folder once.

    Raises:
        UserError: A folder can't be read, a link leads nowhere, or a wanted name is no file's.
    """
    files, seen = _Files(root, wanted), set[str]()
    folders = [below]
    while folders:
        folder = folders.pop()
        if (real := os.path.realpath(root / folder)) not in seen:
            seen.add(real)
            # The last one is taken next. So every machine follows the same one of two links to a folder.
            folders += sorted(files.add(folder), reverse=True)
    order = sorted(range(len(files.paths)), key=files.paths.__getitem__)
    return Walk([files.paths[each] for each in order], [files.inodes[each] for each in order], files.passed_over)


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a folder.

    Raises:
        UserError: It can't be read.
    """
    try:
        with os.scandir(folder) as iterator:
            return list(iterator)
    except OSError as error:
        raise UserError(f"{folder}: can't be read ({error.strerror}): its files would be missing") from error


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Check whether an entry is a folder, or a link to one.

    Raises:
        UserError: It is a link that leads nowhere, or can't be read.
    """
    try:
        if entry.is_symlink():
            entry.stat()
        return entry.is_dir()
    except OSError as error:
        kind = "a link that can't be followed" if os.path.islink(entry.path) else "can't be read"
        raise UserError(f"{entry.path}: {kind} ({error.strerror}): repair or remove it") from error


class _Files(Walk):
    """The files found so far."""

    def __init__(self, root: Path, wanted: Callable[[str], bool]) -> None:
        super().__init__()
        self.root, self.wanted = root, wanted

    def add(self, folder: str) -> list[str]:
        """Add the files of a folder, and return the paths of its folders."""
        folders = []
        for entry in entries(self.root / folder):
            path = os.path.join(folder, entry.name) if folder else entry.name
            if entry.name.startswith("."):  # a broken link too: editors and file managers use such
                self.pass_over(entry.name + "/" * entry.is_dir(follow_symlinks=False), self.wanted(entry.name))
            elif is_folder(entry):
                if is_left_behind(entry.name):
                    self.pass_over(f"{entry.name}/")
                else:
                    folders.append(path)
            elif not self.wanted(entry.name):
                self.pass_over(entry.name)
            elif entry.is_file():
                self.paths.append(path)
                self.inodes.append(entry.stat().st_ino if entry.is_symlink() else entry.inode())
            else:
                raise UserError(f"{entry.path}: no regular file, and its name is one of an image: rename or remove it")
        return folders


def passed_over_text(passed_over: Counter[str], known: Iterable[str]) -> str:
    """Return a text that counts what was passed over, by kind; empty if nothing was."""
    texts = []
    for thing, is_folder_kind in (("file", False), ("folder", True)):
        kinds = [(kind, count) for kind, count in passed_over.most_common() if kind.endswith("/") == is_folder_kind]
        if kinds:
            named = join_names((f"{count:,} {kind}" for kind, count in kinds), 6)
            texts.append(f"{plural(sum(count for _, count in kinds), thing)} ({named})")
    return f"passed over {' and '.join(texts)}: known are {', '.join(known)}" if texts else ""
