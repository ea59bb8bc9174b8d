"""Seed the global generators of the host from which users' code draws."""

import random

import numpy as np


def seed_python_and_numpy(key: int) -> None:
    """Seed the global generators of Python and numpy. A key is a number of up to 64 bits."""
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002  users' hooks, transforms and samplers draw from it
