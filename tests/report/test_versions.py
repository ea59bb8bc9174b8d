"""Versions are semantic in bits: a patch release changes no golden hash, and another one that does says so first.

The first line of each section of CHANGELOG.md is `Bits: as in <version before>`, `Bits: changed: <what>`, or, for the
oldest, `Bits: the first version`. bits.yaml has the golden hashes of each version.
"""

import re
from collections.abc import Mapping
from itertools import pairwise

import pytest
import yaml
from conftest import ROOT, page_file

Record = Mapping[str, Mapping[str, str]]  # version -> experiment -> hash of the weights
RECORD: Record = yaml.safe_load((ROOT / "tests" / "report" / "bits.yaml").read_text())
NEXT = "Unreleased"


def first_lines(changelog: str) -> dict[str, str]:
    """Return the first line of text of each version, newest first."""
    sections = re.split(r"^## \[([^\]]+)\].*$", changelog, flags=re.MULTILINE)[1:]
    return {version: text.strip().partition("\n")[0] for version, text in zip(*[iter(sections)] * 2, strict=True)}


def faults(changelog: str, record: Record) -> list[str]:
    """Return what is wrong with the first lines of a changelog."""
    lines = first_lines(changelog)
    if [*lines] != [*record]:
        return [f"the changelog has the versions {[*lines]}, and bits.yaml {[*record]}"]
    wrong = []
    for version, older in pairwise(lines):
        changed = any(record[version].get(name) != sha256 for name, sha256 in record[older].items())
        is_patch = version != NEXT and version.rpartition(".")[0] == older.rpartition(".")[0]
        announces_a_change = re.match(r"Bits: changed: \S", lines[version])
        if changed and is_patch:
            wrong.append(f"{version}: a patch release changes no golden hash")
        elif is_patch and announces_a_change:
            wrong.append(f"{version}: bits change in a minor release only")
        elif changed and not announces_a_change:
            wrong.append(f"{version}: a golden hash changed: its first line must be `Bits: changed: ...`")
        elif not announces_a_change and lines[version] != f"Bits: as in {older}":
            wrong.append(f"{version}: its first line must be `Bits: as in {older}` or `Bits: changed: ...`")
    oldest = [*lines][-1]
    if lines[oldest] != "Bits: the first version":
        wrong.append(f"{oldest}: its first line must be `Bits: the first version`")
    return wrong


def test_the_changelog_has_first_whether_bits_changed() -> None:
    assert faults((ROOT / "CHANGELOG.md").read_text(), RECORD) == []


def test_the_newest_record_is_of_today() -> None:
    newest = next(iter(RECORD.values()))
    for experiment, sha256 in newest.items():
        page = yaml.safe_load(page_file(f"experiment/{experiment}").read_text())
        assert page["callbacks"]["golden"]["sha256"] == sha256, f"{experiment}: record it, and say so in CHANGELOG.md"
    assert {*newest} >= {"golden", "golden_resnet18"}


@pytest.mark.parametrize(
    ("versions", "wrong"),
    [
        ([("0.2.0", "as in 0.1.1", "a"), ("0.1.1", "as in 0.1.0", "a"), ("0.1.0", "the first version", "a")], ""),
        ([("Unreleased", "changed: dropout", "b"), ("0.1.0", "the first version", "a")], ""),
        ([("0.2.0", "changed: nothing recorded", "a"), ("0.1.0", "the first version", "a")], ""),
        (
            [("0.1.1", "changed: dropout", "b"), ("0.1.0", "the first version", "a")],
            "a patch release changes no golden",
        ),
        ([("0.1.1", "changed: dropout", "a"), ("0.1.0", "the first version", "a")], "in a minor release only"),
        ([("0.2.0", "as in 0.1.0", "b"), ("0.1.0", "the first version", "a")], "0.2.0: a golden hash changed"),
        ([("0.2.0", "as in 0.1.1", "a"), ("0.1.0", "the first version", "a")], "must be `Bits: as in 0.1.0`"),
        ([("0.2.0", "", "a"), ("0.1.0", "the first version", "a")], "must be `Bits: as in 0.1.0`"),
        ([("0.1.0", "", "a")], "0.1.0: its first line must be `Bits: the first version`"),
    ],
)
def test_a_wrong_line_is_seen(versions: list[tuple[str, str, str]], wrong: str) -> None:
    changelog = "# Changelog\n\n" + "".join(
        f"## [{version}] - 2026-11-23\n\n{f'Bits: {line}' if line else '### Added'}\n\n- More.\n\n"
        for version, line, _ in versions
    )
    seen = faults(changelog, {version: {"golden": sha256} for version, _, sha256 in versions})
    assert wrong in "".join(seen)
    assert bool(seen) == bool(wrong)


def test_a_version_without_a_record_is_seen() -> None:
    assert faults("## [0.1.0]\n\nBits: the first version\n", {}) != []
