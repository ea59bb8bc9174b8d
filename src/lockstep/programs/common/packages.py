"""Packages that an argument of a command needs beside those of Lockstep. No import of torch, which takes seconds."""

import importlib.util

from lockstep.errors import UserError

NEEDED = {"format=onnx": ("onnx", "onnxscript")}


def check_packages(*arguments: str) -> None:
    """Check that the packages are installed which the arguments of a command need.

    Raises:
        UserError: one is missing.
    """
    for argument in arguments:
        missing = [name for name in NEEDED.get(argument, ()) if importlib.util.find_spec(name) is None]
        if missing:
            install = f"pip install {' '.join(missing)}"
            raise UserError(f"{argument} needs {' and '.join(missing)}: {install}; format=torch does not")
