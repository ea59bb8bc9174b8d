"""Run the table of planted causes, and write docs/results/same.md:

    python scripts/lab/same_table.py
    python scripts/lab/same_table.py torch_loop lightning_fit

Each row is a pair of programs (scripts/lab/planted/rows.py), recorded and judged as `lockstep same` does it. Rows whose
framework is not installed are counted as not run. With names of programs, the table is printed and not written.

Exit codes: 0 each row got its name, 1 some did not.
"""

import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import lightning.pytorch  # noqa: F401  before the forks
from nightly import commit_of
from planted.recording import verdict_of
from planted.rows import ACCELERATE, NAMES, ROWS, TRANSFORMERS, Row

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "same.md"
NEEDS = {ACCELERATE: "accelerate", TRANSFORMERS: "transformers"}
BEGIN, END = "<!-- the table begins -->", "<!-- the table ends -->"


for each in ("accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2"):  # likewise
    with suppress(ImportError):
        import_module(each)


def run(row: Row) -> tuple[bool, str]:
    """Return whether the verdict on a row is right, and what it text."""
    verdict = verdict_of(row.program, row.first, row.second)
    kinds = [cause.kind for cause in verdict.causes] if verdict.code else ["same"]
    return row.kind in kinds, verdict.causes[0].text if verdict.causes else verdict.line.partition(":")[0]


def main(programs: list[str]) -> int:
    rows, right, planted, alarms, correct, left_out = [], 0, 0, 0, 0, 0
    for row in ROWS:
        if programs and row.program not in programs:
            continue
        if find_spec(NEEDS.get(row.program, "torch")) is None:
            left_out += 1
            continue
        good, text = run(row)
        print("right" if good else "WRONG", row, text, sep="  ", flush=True)
        sides = f"{NAMES[row.program]}: {row.first or 'as it is'} | {row.second or 'as it is'}"
        rows.append(f"{'' if good else 'WRONG: '}{row.kind}: {sides}\n    {text[:110]}")
        if row.kind == "same":
            correct, alarms = correct + 1, alarms + (not good)
        else:
            planted, right = planted + 1, right + good
    counts = (
        f"{right} of {planted} planted causes got their name; {alarms} of {correct} right pairs raised a false alarm"
    )
    print(counts + (f"; {left_out} rows not run: their framework is not installed" if left_out else ""))
    if not programs and not left_out:
        listed = "\n".join(["```text", *rows, "```"])
        table = f"{BEGIN}\n\n{counts}, commit {commit_of(ROOT)}.\n\n{listed}\n\n{END}"
        text = PAGE.read_text()
        PAGE.write_text(text[: text.index(BEGIN)] + table + text[text.index(END) + len(END) :])
    return int(right < planted or alarms > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
