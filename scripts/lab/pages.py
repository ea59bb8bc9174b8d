"""Let Hydra compose the front pages of the lab's programs, in scripts/lab/conf/, with the files of conf/."""

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin

PAGES = Path(__file__).resolve().parent / "conf"


class LabPages(SearchPathPlugin):
    """Add the lab's pages to every search path of this process."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("lab", f"file://{PAGES}")


def add_pages() -> Path:
    """Let Hydra find the lab's front pages. Return the folder that holds them."""
    Plugins.instance().register(LabPages)
    return PAGES
