"""How a run ends, as what is raised and as what is told to other machines."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.arithmetic.layout import Refusal
from lockstep.launch.signals import Interrupted


class WorkerFailed(Exception):
    """A worker died. The message names the rank and the reason in one line; `steps` as in `Interrupted`.

    Attributes:
        victim: it failed because it lost another one, which has the reason.
    """

    steps = 0
    victim = False


class PeerLost(Exception):
    """A worker's connection to another one ended: the other one has the reason."""


@dataclass(frozen=True)
class Outcome:
    """How a machine's workers ended, or the whole run.

    Attributes:
        kind: `completed`, `failed`, `refused`, `interrupted`; or `victim`, which failed because others did.
        text: the reason in one line.
        signum: of the signal that interrupted it.
        steps: optimizer steps that had been made.
    """

    kind: str
    text: str = ""
    signum: int = 0
    steps: int = 0

    def raised(self) -> BaseException:
        """What a run that ends like this raises."""
        if self.kind == "refused":
            return Refusal(self.text)
        error = Interrupted(self.signum) if self.kind == "interrupted" else WorkerFailed(self.text)
        error.steps = self.steps
        return error


def outcome_of(error: BaseException | None) -> Outcome:
    """How what was raised, if anything, ended a machine's workers."""
    if error is None:
        return Outcome("completed")
    if isinstance(error, Refusal):
        return Outcome("refused", str(error))
    steps = getattr(error, "steps", 0)
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return Outcome("interrupted", str(error), getattr(error, "code", 130) - 128, steps)
    return Outcome("victim" if getattr(error, "victim", False) else "failed", str(error), steps=steps)
