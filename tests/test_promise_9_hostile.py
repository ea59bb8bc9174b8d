"""Promise 9: what a stranger's file may claim. The table of docs/trust/strangers.md."""

import argparse
import functools
import gc
import marshal
import operator
import os
import pickle
import resource
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep import UserError, load_weights

CLAIM = 1 << 30  # bytes that it is said to have


# --- files of other programs, whose objects are replaced by stand-ins -------------------------------------------------


class Reduced:
    """Pickles as a call of a function with arguments."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.call = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.call


class EvilNamespace(argparse.Namespace):
    """A class that acts wherever a pickle can reach it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "EvilNamespace":
        reached("__new__")
        return super().__new__(cls)

    def __init__(self, **kwargs: Any) -> None:
        reached("__init__")
        super().__init__(**kwargs)

    def __setstate__(self, state: Any) -> None:
        reached("__setstate__")

    def __setattr__(self, name: str, value: Any) -> None:
        reached("__setattr__")

    def __setitem__(self, name: str, value: Any) -> None:
        reached("__setitem__")

    def __del__(self) -> None:
        reached("__del__")


REACHED: list[str] = []


def reached(what: str) -> None:
    REACHED.append(what)


def evil_namespace() -> EvilNamespace:
    namespace = EvilNamespace(lr=0.1)
    namespace.__dict__["lr"] = 0.1
    return namespace


def weights_beside(evil: Any) -> dict[str, Any]:
    return {"model": {"weight": torch.full((2, 2), 2.0)}, "args": evil}


# Each is inert (True) or refused (False). What none of them may do is to run.
ATTACKS: dict[str, tuple[Callable[[], Any], bool]] = {
    "a class of our own": (evil_namespace, True),
    "a function of our own": (lambda: Reduced(reached, "called"), True),
    "nested": (
        lambda: Reduced(Holder, Reduced(Holder, Reduced(reached, "called")), state={"a": Reduced(reached, "x")}),
        True,
    ),
    "os.system": (lambda: Reduced(os.system, "touch sentinel"), False),
    "eval": (lambda: Reduced(eval, "__import__('os').system('touch sentinel')"), False),
    "exec": (lambda: Reduced(exec, "open('sentinel', 'w')"), False),
    "__import__": (lambda: Reduced(__import__, "antigravity"), False),
    "open": (lambda: Reduced(open, "sentinel", "w"), False),
    "subprocess": (lambda: Reduced(subprocess.check_output, ["touch", "sentinel"]), False),
    "runpy": (lambda: Reduced(runpy.run_path, "sentinel.py"), False),
    "pickle.loads": (lambda: Reduced(pickle.loads, pickle.dumps(Reduced(reached, "called"))), False),
    "getattr": (lambda: Reduced(getattr, Reduced(__import__, "os"), "system"), False),
    "a method": (lambda: Reduced(operator.methodcaller, "unlink"), False),
    "code": (lambda: Reduced(marshal.loads, b""), False),
    "a part of a data module": (lambda: Reduced(functools.partial, Reduced(reached, "called")), True),
    "torch.load": (lambda: Reduced(torch.load, "sentinel.pth"), True),
    "torch.hub": (lambda: Reduced(torch.hub.load, "user/repository", "net"), True),
    "numpy": (lambda: Reduced(np.fromfile, "sentinel"), True),
    "torch's builder with a function of our own": (
        lambda: Reduced(torch._tensor._rebuild_from_type_v2, reached, Holder, ("called",), {}),
        False,
    ),
    "huge": (lambda: Reduced(bytearray, 1 << 60), False),
    "a huge array": (lambda: Reduced(np.zeros, 1 << 60), True),
}


class Holder:
    def __init__(self, *args: Any) -> None:
        reached("Holder")


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("attack", ATTACKS)
def test_objects_beside_weights_are_inert(
    tmp_path: Path, attack: str, older: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make, is_inert = ATTACKS[attack]
    path = tmp_path / "evil.pth"
    torch.save(weights_beside(make()), path, _use_new_zipfile_serialization=not older)
    gc.collect()
    REACHED.clear()
    before, peak = set(sys.modules), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    module = nn.Linear(2, 2, bias=False)
    if is_inert:
        assert "not read: " in load_weights("init_from", module, str(path)).message
        assert (module.weight == 2).all()
    else:
        with pytest.raises(UserError, match=r"^init_from=.*evil.pth: [^\n]*$"):
            load_weights("init_from", module, str(path))
    assert REACHED == []
    assert list(tmp_path.iterdir()) == [path]
    assert {name for name in set(sys.modules) - before if not name.startswith(("torch.", "numpy."))} == set()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) << 10 < CLAIM // 4


def test_no_class_stays_allowed(tmp_path: Path) -> None:
    allowed = set(torch.serialization.get_safe_globals())  # torch.distributed adds some of its own
    torch.save(weights_beside(evil_namespace()), tmp_path / "evil.pth")
    load_weights("init_from", nn.Linear(2, 2, bias=False), str(tmp_path / "evil.pth"))
    assert set(torch.serialization.get_safe_globals()) == allowed


def test_a_file_can_not_change_what_torch_calls(tmp_path: Path) -> None:
    """A pickle may set the attributes of an object. It must be none that exists outside of the file."""
    for owner in (torch.Tensor, torch._utils._rebuild_tensor_v2, torch.nn.Parameter, dict, Holder):
        lines = [b"\x80\x02}X\x05\x00\x00\x00model}X\x01\x00\x00\x00wK\x01sX\x01\x00\x00\x00a"]
        lines += [f"c{owner.__module__}\n{owner.__qualname__}\n".encode(), b"}X\x04\x00\x00\x00evilK\x01sbs."]
        with zipfile.ZipFile(tmp_path / "evil.pth", "w") as archive:
            archive.writestr("archive/data.pkl", b"".join(lines))
            archive.writestr("archive/version", "3")
            archive.writestr("archive/byteorder", "little")
        with pytest.raises(UserError):
            load_weights("init_from", nn.Linear(2, 2), str(tmp_path / "evil.pth"))
        assert not hasattr(owner, "evil")
