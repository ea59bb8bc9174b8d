"""Tests for your own modules and data sets: inherit a class, and pytest runs its tests.

docs/use/test-your-own-code.md has an example:

    class TestMine(ModuleTests):
        overrides = ["model=mine", "data=stripes"]
"""

from lockstep.guards import check
from lockstep.testing.data_tests import DataTests
from lockstep.testing.module_tests import ModuleTests

__all__ = ["DataTests", "ModuleTests", "check"]
