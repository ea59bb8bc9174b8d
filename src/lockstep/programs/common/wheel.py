"""How the wheel is built: pyproject.toml names WithTemplate, and setuptools imports this file alone."""

import shutil
import sys
from pathlib import Path

from setuptools.command.build_py import build_py  # type: ignore[import-untyped] # it has no types

sys.path.insert(0, str(Path(__file__).parents[3]))  # nothing of this repository is installed yet

from lockstep.programs.common.template import copy_manual, copy_template


class WithTemplate(build_py):
    """Builds the packages, and copies this repository's own project and pages into the wheel."""

    def run(self) -> None:
        """Build as setuptools does, and add the template."""
        super().run()
        if not self.editable_mode:  # an editable installation has the checkout
            folder = Path(self.build_lib, "lockstep", "template")
            shutil.rmtree(folder, ignore_errors=True)
            copy_template(Path.cwd(), folder)
            pages = folder.with_name("docs")
            shutil.rmtree(pages, ignore_errors=True)
            copy_manual(Path.cwd() / "docs", pages)
