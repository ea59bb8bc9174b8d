"""What `exact=portable` costs a step: against `exact=true`, and against kernels for AVX2 with MKL as it is."""

from dataclasses import replace
from pathlib import Path

from bench.players import Command, Row, row
from bench.steps import LARGE_CASE, SMALL_CASE, arguments, race

from lockstep.launch.portable import VARIABLES

PIECES = 4
GOAL = 1.25  # against kernels for AVX2 without MKL's setting
CASES = (replace(SMALL_CASE, steps=20, games=2, rounds=6), replace(LARGE_CASE, steps=3, skip=1, rounds=3))
WITH_VARIABLES = "import os, sys; os.execvp('env', ['env', *sys.argv[1:]])"  # which a player can't be given


def portable(folder: Path) -> list[Row]:
    """All sides on one device, with one thread. `settings alone`: MKL computes the products of matrices."""
    avx2 = {name: value for name, value in VARIABLES.items() if not name.startswith("MKL")}
    rows = []
    for case in CASES:
        command = [*arguments(case, folder, (case.rounds + 1) * case.steps), f"pieces={PIECES}"]

        def under(variables: dict[str, str], command: Command = (*command, "exact=true")) -> list[Command]:
            return [
                ["-c", WITH_VARIABLES, *(f"{name}={value}" for name, value in variables.items()), "python", *command]
            ]

        sides = {"exact": under({}), "avx2": under(avx2), "settings alone": under(VARIABLES)}
        blocks, _ = race(case, {**sides, "portable": [[*command, "exact=portable"]]}, folder)
        what = f"{case.model}, batch {case.batch}, {PIECES} pieces: exact=portable"
        rows += [
            row(f"{what} against exact=true", blocks["portable"], blocks["exact"], None),
            row(f"{what} against kernels for AVX2", blocks["portable"], blocks["avx2"], GOAL),
            row(f"{what} against the three settings alone", blocks["portable"], blocks["settings alone"], None),
        ]
    return rows
