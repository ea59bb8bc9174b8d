"""The lowest versions, with which a job of CI runs the tests."""

import tomllib

from conftest import ROOT
from lowest import constraints


def test_each_lower_bound_becomes_a_version() -> None:
    requirements = ["a-b>=1.2,<2; python_version < '3.14'", "c>=3", "d", "e<4"]
    assert list(constraints(requirements)) == ["a-b==1.2; python_version < '3.14'", "c==3"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {line.partition("==")[0] for line in constraints(project["dependencies"])}
    assert {"torch", "torchvision", "lightning", "torchmetrics", "hydra-core", "pydantic", "tensorboard"} <= names
