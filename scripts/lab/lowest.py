"""Print the lowest versions that the dependencies in a pyproject.toml allow, as constraints for pip:

    python scripts/lab/lowest.py pyproject.toml

CI tests with these in one job. A dependency without a lower bound is left out.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path


def constraints(dependencies: Iterable[str]) -> Iterator[str]:
    """Yield a constraint for each dependency with a lower bound, with its marker."""
    for dependency in dependencies:
        requirement, _, marker = dependency.partition(";")
        if match := re.match(r"([\w-]+)>=([\w.]+)", requirement):
            yield f"{match[1]}=={match[2]}" + (f"; {marker.strip()}" if marker else "")


if __name__ == "__main__":
    print("\n".join(constraints(tomllib.loads(Path(sys.argv[1]).read_text())["project"]["dependencies"])))
