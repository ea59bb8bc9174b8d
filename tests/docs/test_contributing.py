"""CONTRIBUTING.md and the pre-commit hooks say what the repository has."""

import re
import tomllib

import yaml
from conftest import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_rooms_stand_in_the_order_that_is_checked() -> None:
    rows = re.findall(r"^\| (`.*?`) \| ", PAGE, re.MULTILINE)
    named = [set(re.findall(r"`(\w+)/?`", row)) for row in rows]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (contract["layers"] for contract in contracts if contract["name"] == "rooms")
    assert named == [set(layer.split(" | ")) for layer in reversed(layers)]


def test_hooks_are_local_and_run_what_is_there() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    hooks = repositories[0]["hooks"]
    assert {hook["language"] for hook in hooks} == {"system"}
    lint = re.findall(r"\$\(BIN\)/(.+)", (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0])
    entries = {hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude") for hook in hooks}
    assert {"ruff format" if command == "ruff format --check" else command for command in lint} < entries


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)", PAGE))
    assert {"setup", "quick", "lint", "test", "proof"} == named <= targets
