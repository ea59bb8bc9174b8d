"""A strategy of a user: one file and one page, and no other file knows it."""

import shutil
from pathlib import Path

from user_runs import DDP, jobs, same_bits, train

PAGE = """
_target_: backwards.Backwards
name: backwards
shares: null
"""
STRATEGY = '''
from lockstep.strategies import Action, Strategy


class Backwards(Strategy):
    """A process per device, which computes its pieces from the last one to the first."""

    name = "backwards"

    def conflicts(self, config):
        if config.compile:
            yield "compile=true", "strategy=backwards", "a short last piece comes first; use strategy=ddp"

    def notes(self, resumes):
        yield "pieces are computed backwards"

    def schedule(self, micro_batches):
        for index in reversed(range(len(micro_batches))):
            yield Action.FORWARD, index
            yield Action.BACKWARD, index
'''


def test_a_strategy_is_one_file_and_one_page(project: Path, tmp_path: Path) -> None:
    project = Path(shutil.copytree(project, tmp_path / "project"))
    (project / "src" / "backwards.py").write_text(STRATEGY)
    (project / "conf" / "strategy" / "backwards.yaml").write_text(PAGE)
    options = ("strategy=ddp,backwards", "devices=2", "exact=true,false")
    ddp, plain, backwards, other = jobs(project, tmp_path / "runs", "LitDigits", *options)
    one = train(project, tmp_path / "one", "LitDigits", "strategy=backwards", "devices=1", "exact=true")
    assert same_bits(ddp, backwards, one)
    assert not same_bits(plain, other), "the control: the order of the pieces is another one"
    assert "pieces are computed backwards" in (backwards.folder / "train.log").read_text()
    options = ("strategy=backwards", *DDP[1:], "compile=true")
    refused = train(project, tmp_path / "refused", "LitDigits", *options, ok=False)
    assert refused.returncode == 2
    assert "compile=true and strategy=backwards don't go together: a short last piece comes first" in refused.stderr
