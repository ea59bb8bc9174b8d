"""One judge of modules: what `training_step` must respect so that a step can be cut into pieces.

`check(module, batch)` returns what it finds. The first step of a run calls it (`FirstStepCheck`), and so do
`lockstep parity` and `lockstep.testing`.
"""

from lockstep.guards.check import Finding, check

__all__ = ["Finding", "check"]
