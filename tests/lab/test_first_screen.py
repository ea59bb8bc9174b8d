"""The picture of the README: it has the session's commands, and one hash."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import first_screen
import pytest
from conftest import ROOT, TIMEOUT
from first_screen import FILES, HASH, Block, Command, CommandFailed, Shell, blocks, draw, hashes, main

JOB = "exact=true pieces=8"
TINY = ("data=synthetic", "data.samples=160", "data.image_size=12", "data.num_classes=3", "batch_size=24", "threads=1")
TEXT = "{http://www.w3.org/2000/svg}text"


def recorded(sha: str = "0123456789abcdef" * 4) -> list[Block]:
    """Return a session as `record` returns it, without runs."""
    line = f'{HASH}{sha}",'
    return [[(command, [line] * command.text.endswith(("one", "dp"))) for command in block] for block in blocks(JOB)]


def lines_of(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(TEXT)]


def commands_of(lines: list[str]) -> list[str]:
    prompts = ("$ ", "> ", "node0$ ", "node1$ ")
    return [line for line in lines if line.startswith(prompts)]


@pytest.mark.parametrize("theme", FILES)
def test_the_drawing_has_the_lines_as_text(theme: str) -> None:
    lines = lines_of(draw(recorded(), theme))
    assert lines[:3] == [
        "$ sha() { grep -h weights_sha256 outputs/$1/*/summary.json; }",
        "$ python src/train.py exact=true pieces=8 name=one && sha one",
        f'{HASH}{"0123456789abcdef" * 4}",',
    ]
    continued = "> " + " " * 4 + "src/train.py exact=true pieces=8 name=two && sha two"
    assert lines[lines.index(continued) - 1].endswith("--rdzv-endpoint=node0:29500 \\")


def test_the_committed_pictures_have_the_present_commands_and_one_hash() -> None:
    lines = [lines_of((ROOT / "docs" / name).read_text()) for name in FILES.values()]
    assert lines[0] == lines[1]
    assert commands_of(lines[0]) == commands_of(lines_of(draw(recorded(), "light")))
    actual = [line for line in lines[0] if line.startswith(HASH)]
    assert (len(actual), len(set(actual))) == (5, 1)
    assert len(lines[0]) <= 40
    assert max(map(len, lines[0])) <= 100
    readme = (ROOT / "README.md").read_text()
    assert [name for name in FILES.values() if f"docs/{name}" not in readme] == []


def test_other_hashes_are_not_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, other = recorded(), recorded("f" * 64)
    monkeypatch.setattr(sys, "argv", ["first_screen.py", "--folder", str(tmp_path)])
    monkeypatch.setattr(first_screen, "record", lambda job: [*one, *other])
    assert (len(hashes(one)), len(hashes([*one, *other]))) == (1, 2)
    assert main() == 1
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(first_screen, "record", lambda job: one)  # the control
    assert main() == 0
    assert {file.name for file in tmp_path.iterdir()} == set(FILES.values())


def test_a_command_that_fails_ends_the_session(tmp_path: Path) -> None:
    with Shell(["bash"], tmp_path) as shell:
        assert shell.run(Command("echo step 1; echo other")) == ["step 1"]
        assert shell.run(Command("(echo step 2; echo epoch 3/; sleep 60) &", until="epoch")) == ["step 2"]
        assert shell.run(Command("kill -9 $!")) == []
        with pytest.raises(CommandFailed, match="no such thing"):
            shell.run(Command("echo no such thing; false"))
        shell.run(Command("true"))


def test_a_tiny_task_is_recorded(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/lab/first_screen.py", "--folder", str(tmp_path), *TINY, "max_epochs=5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    if "machines can't be made" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = lines_of((tmp_path / FILES["dark"]).read_text())
    assert sum(line.startswith(HASH) for line in lines) == 5
    assert "resumes after step 18" in lines
    assert any(line.startswith("step 24 samples = 8 pieces x 3 on 3 devices, 3 + 3 + 2") for line in lines)
