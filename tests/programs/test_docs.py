"""`lockstep docs` prints the pages that messages name."""

import re

import pytest
from conftest import ROOT

from lockstep.errors import UserError
from lockstep.programs.docs import main, pages

NAMED = re.compile(r"lockstep docs ([a-z/-]+)")


@pytest.mark.parametrize("name", ["own-data", "use/own-data", "docs/use/own-data.md", "own-data.md"])
def test_a_page_is_printed_by_each_of_its_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "use" / "own-data.md").read_text()


def test_the_pages_for_users_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out.split()
    assert {"use/train", "devices/layouts", "trust/exact", "extras", "extras/pipeline", "troubleshooting"} <= {*listed}
    assert not [name for name in listed if name.startswith(("results", "decisions"))]
    last = [name.rpartition("/")[2] for name in listed]
    assert len({*last}) == len(last), "a short name means one page"


@pytest.mark.parametrize(("name", "right"), [("own-dta", "did you mean own-data?"), ("../README", "lists them")])
def test_another_name_is_refused(name: str, right: str) -> None:
    with pytest.raises(UserError, match=re.escape(right)):
        main([name])


def test_messages_name_pages_that_exist() -> None:
    texts = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    named = {name for text in texts for name in NAMED.findall(text)}
    short = {name.rpartition("/")[2] for name in pages()}
    assert {"module-rules", "own-data", "shards", "tasks", "own-model", "pipeline"} <= named <= short
    assert not [text for text in texts if re.search(r"\"[^\"\n]*\(docs/(use|devices|trust|extras)/", text)]
