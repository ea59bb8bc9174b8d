"""`exact=portable`: the same bits on x86-64 processors of different kinds.

ATen, oneDNN and MKL each choose kernels by the processor, and different kernels round differently. The AVX2 kernels of
ATen and oneDNN round alike on processors of Intel and AMD. MKL's do so in its compatible mode, except for a few
functions. Each library reads its environment variable once, at its first computation. docs/trust/exact.md lists the
processors that were compared.
"""

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import UserError
from lockstep.launch.environment import export

if TYPE_CHECKING:
    from torch import Tensor

PORTABLE = "portable"
VARIABLES = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "COMPATIBLE"}
INSTRUCTIONS = ("avx2", "fma")  # Linux's names for what these kernels need
_kernels: list[Any] = []  # torch uses the replaced kernels as long as this object exists


def missing_instructions(cpuinfo: str = "/proc/cpuinfo") -> list[str]:
    """Return the instructions that `exact=portable` needs and that /proc/cpuinfo does not list."""
    flags: list[str] = []
    with suppress(OSError):
        if line := re.search(r"^flags\s*:(.*)$", Path(cpuinfo).read_text(), re.MULTILINE):
            flags = line[1].split()
    return [name for name in INSTRUCTIONS if name not in flags]


def choose_kernels(exact: bool | str) -> None:
    """Under `exact=portable` set the variables for this process and its children. Torch may be imported already.

    Raises:
        UserError: torch has already computed in this process, with other kernels.
    """
    if exact != PORTABLE:
        return
    export(**VARIABLES)
    if "torch" in sys.modules:
        import torch

        if torch.backends.cpu.get_cpu_capability() != "AVX2":
            raise UserError(
                "exact=portable: this process has already computed with other kernels: give exact=portable on the "
                "command line, or set " + " ".join(f"{name}={value}" for name, value in VARIABLES.items())
            )


def set_up_worker(exact: bool | str) -> None:
    """Call `choose_kernels`. Under `exact=portable` also replace the functions for which torch calls MKL in a step.

    Products of float32 matrices: MKL's compatible mode takes about twice as long as oneDNN. Square roots: MKL does not
    round them as IEEE 754 says, so they differ between processors.
    """
    choose_kernels(exact)
    if exact == PORTABLE and not _kernels:
        _kernels.append(_registered_kernels())


def _registered_kernels() -> Any:
    """Register oneDNN's products and numpy's square roots with torch. Return the object that owns the registration."""
    import numpy as np
    import torch

    def suits(*tensors: "Tensor") -> bool:
        return all(each.dtype == torch.float32 and each.layout == torch.strided and each.numel() for each in tensors)

    def product(one: "Tensor", other: "Tensor", bias: "Tensor | None") -> "Tensor":
        result: Tensor = torch.ops.mkldnn._linear_pointwise(one, other.t(), bias, "none", [], "")
        return result

    def mm(one: "Tensor", other: "Tensor") -> "Tensor":
        if suits(one, other):
            return product(one, other, None)
        return torch.mm(one, other, out=one.new_empty(len(one), other.shape[1]))

    def addmm(bias: "Tensor", one: "Tensor", other: "Tensor", *, beta: Any = 1, alpha: Any = 1) -> "Tensor":
        if suits(bias, one, other) and bias.shape == other.shape[1:] and beta == alpha == 1:
            return product(one, other, bias)
        out = one.new_empty(len(one), other.shape[1])
        return torch.addmm(bias, one, other, beta=beta, alpha=alpha, out=out)

    def sqrt(x: "Tensor") -> "Tensor":
        return root(x, torch.empty_like(x, dtype=None if x.is_floating_point() or x.is_complex() else torch.float32))

    def root(x: "Tensor", out: "Tensor") -> "Tensor":
        if x.dtype not in (torch.float32, torch.float64) or x.layout != torch.strided:
            return torch.sqrt(x, out=out)
        with np.errstate(invalid="ignore"):
            np.sqrt(x.detach().numpy(), out=out.detach().numpy())
        return out

    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", mm, "CPU")
    library.impl("addmm", addmm, "CPU")
    library.impl("sqrt", sqrt, "CPU")
    library.impl("sqrt_", lambda x: root(x, x), "CPU")
    return library
