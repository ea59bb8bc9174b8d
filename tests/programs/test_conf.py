"""`lockstep conf` copies a page into the project, which then comes before the inherited one."""

import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, composed

from lockstep.config.arguments import _purpose, help_page, read_arguments
from lockstep.config.pages import BASE, INHERITED, SEARCHED, find, folders, options, with_one_search_path
from lockstep.errors import UserError
from lockstep.programs.conf import main, names
from lockstep.project import use_project_of


@pytest.fixture
def dogs(tmp_path: Path) -> Path:
    """Return the conf/ of a project that has only its front page."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text((ROOT / "conf" / "train.yaml").read_text())
    use_project_of(tmp_path)
    return tmp_path / "conf"


def test_a_copy_is_used_and_the_rest_is_inherited(dogs: Path) -> None:
    assert find("optimizer/adamw") == BASE.parent / "optimizer" / "adamw.yaml"
    assert main(["optimizer/adamw.yaml", "data/transforms/none"]) == 0
    page = dogs / "optimizer" / "adamw.yaml"
    assert page.read_text() == (BASE.parent / "optimizer" / "adamw.yaml").read_text()
    assert find("optimizer/adamw") == page
    assert find("optimizer/sgd") == BASE.parent / "optimizer" / "sgd.yaml"
    assert {"adamw", "sgd"} <= {*options("optimizer")}


def test_nothing_is_overwritten_and_unknown_pages_are_refused(dogs: Path) -> None:
    main(["optimizer/adamw"])
    with pytest.raises(UserError, match=r"^conf/optimizer/adamw.yaml exists already: edit it, or delete it first$"):
        main(["optimizer/sgd", "optimizer/adamw"])
    with pytest.raises(UserError, match=r"no such page: did you mean optimizer/adam\?$"):
        main(["optimizer/sgd", "optimizer/adm"])
    with pytest.raises(UserError, match="no such page"):
        main(["../conf/optimizer/sgd"])
    assert not (dogs / "optimizer" / "sgd.yaml").exists(), "nothing is written when a name is wrong"


def test_a_link_that_leads_nowhere_is_not_followed(dogs: Path, tmp_path: Path) -> None:
    (dogs / "optimizer").mkdir()
    (dogs / "optimizer" / "adamw.yaml").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="exists already"):
        main(["optimizer/adamw"])
    assert not (tmp_path / "elsewhere").exists()


def test_all_are_listed(capsys: pytest.CaptureFixture[str], dogs: Path) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.splitlines() == names()
    assert {"model/timm", "logger/wandb"} <= {*names()}
    assert "base" not in names()
    assert main(["optimizer"]) == 0
    assert capsys.readouterr().out.splitlines() == [name for name in names() if name.startswith("optimizer/")]


def test_a_front_page_needs_no_key_of_a_newer_lockstep() -> None:
    """What the project's page leaves out has the default of the package's."""
    page, base = (yaml.safe_load(path.read_text()) for path in (ROOT / "conf" / "train.yaml", BASE))
    left_out = base.keys() - page.keys() - {"defaults"}
    assert {"elastic", "hang_timeout", "speed", "lr", "pieces"} <= left_out
    cfg = composed()
    assert all(cfg[key] == base[key] for key in ("elastic", "hang_timeout", "speed"))
    assert page.keys() == {"hydra", "defaults", "batch_size"}


def test_a_folder_of_the_command_line_comes_between_the_projects_pages_and_the_inherited(
    dogs: Path, tmp_path: Path
) -> None:
    page = tmp_path / "more" / "optimizer" / "adamw.yaml"
    page.parent.mkdir(parents=True)
    page.write_text("name: theirs\n")
    more = ["optimizer=adamw", "--config-dir", str(tmp_path / "more")]
    assert "name: theirs" in help_page(read_arguments(more, "train"))
    main(["optimizer/adamw"])
    assert "name: theirs" not in help_page(read_arguments(more, "train"))


def test_a_search_path_of_the_command_line_has_the_inherited_pages_too() -> None:
    ours = ",".join(SEARCHED)
    assert SEARCHED[0] == "pkg://lockstep.conf"
    assert with_one_search_path(["hydra.searchpath=[]", "lr=1"]) == ["lr=1"], "that of conf/train.yaml"
    for other in ("'file:///a[,b'", "'pkg://lockstep.conf_of_others'", "'file:///pkg://lockstep.conf'"):
        (added,) = with_one_search_path([f"+hydra.searchpath=[{other}]"])
        assert added == f"hydra.searchpath=[{other},{ours}]"
        assert with_one_search_path([added]) == [added]
    theirs, others = (f"hydra.searchpath=['file:///{name}',pkg://lockstep.conf]" for name in ("a, b", "conf"))
    assert with_one_search_path([theirs, others]) == [f"hydra.searchpath=['file:///a, b','file:///conf',{ours}]"]


def test_the_first_comment_of_each_page_is_whole_in_the_list_of_pages() -> None:
    for folder in folders():
        for page in folder.glob("*/*.yaml"):
            if not page.name.startswith("_") and page.parent.name not in ("hydra", "schema"):
                purpose = _purpose(page)
                assert not re.search(r"([:,;(]|\b(and|or|of|the|a|in|with|to|for))$", purpose), (page, purpose)


def test_pages_name_nothing_that_only_the_checkout_of_lockstep_has() -> None:
    for page in (page for folder in INHERITED for page in folder.rglob("*.yaml")):
        assert not re.search(r"\bdocs/|pip install -e", page.read_text()), page


def test_the_help_of_a_page_that_adds_keys_lists_the_groups_of_train_yaml() -> None:
    text = help_page(read_arguments([], "parity"))
    assert text.startswith("Prove that layouts agree on your model:")
    assert "\noptimizer=\n  adam " in text
    assert "@package" not in text
