"""Open data sets. Each opener returns a `lockstep.Source`, and conf/data/ names it."""

from project.data.digits import digits

__all__ = ["digits"]
