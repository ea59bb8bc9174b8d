"""Which files belong to an extra, and whether the core names one:

    python tests/extras_of_the_core.py

prints each line of the core that names an extra, and exits with 1 if there is one. `make lint` runs it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def extras(root: Path = ROOT) -> list[str]:
    """Return the names of the extras of a checkout."""
    folders = {path.parent.name for path in root.glob("src/lockstep_extras/*/__init__.py")}
    return sorted(folders - {"conf", "programs"})


def files_of(name: str, root: Path = ROOT) -> list[Path]:
    """Return the files and folders that belong to an extra. Deleting them removes it."""
    folder = root / "src" / "lockstep_extras" / name
    listed = folder / "BELONGS.txt"
    others = listed.read_text().split() if listed.exists() else []
    actual = [
        folder,
        root / "tests" / "extras" / name,
        *(root / "src" / "lockstep_extras" / "conf" / group / f"{name}.yaml" for group in ("extras", "strategy")),
        *(root / "docs" / "extras").glob(f"{name}.*"),
        *(root / path for path in others),
    ]
    return [path for path in actual if path.exists()]


def named_in_the_core(root: Path = ROOT) -> list[str]:
    """Return `file:line: text` for each line of the core that names an extra."""
    names = "|".join(name.replace("_", "[_ ]?") for name in extras(root))
    if not names:
        return []
    actual = []
    for path in sorted((root / "src" / "lockstep").rglob("*.py")):
        if path.relative_to(root / "src" / "lockstep").parts[0] == "programs":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(rf"\b({names})\b", line, re.IGNORECASE):
                actual.append(f"{path.relative_to(root)}:{number}: {line.strip()}")
    return actual


if __name__ == "__main__":
    sys.exit("\n".join([*actual, "the core must name no extra"]) if (actual := named_in_the_core()) else 0)
