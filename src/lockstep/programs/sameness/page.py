"""The verdict as a page: one HTML file that needs no other."""

import html
from collections.abc import Iterable
from typing import Any

from lockstep.programs.sameness.verdict import Verdict

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.3rem}code{background:#eee;padding:.1em .3em}table{border-collapse:collapse;width:100%}
td,th{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ddd;font-variant-numeric:tabular-nums}
.same{border-left:.4rem solid #009e73}.different{border-left:.4rem solid #d55e00}h1{padding-left:.8rem}
.odd td{background:#fdeee6}@media(prefers-color-scheme:dark){body{color:#ddd;background:#1b1b1b}code{background:#333}
.odd td{background:#4a2a1a}td,th{border-color:#444}}
"""
COLUMNS = ("step", "samples", "losses", "gradients differ by", "rounding makes", "weights differ by", "rounding makes")


def page(verdict: Verdict, first: str, second: str) -> str:
    """Return the page."""
    kind = "different" if verdict.code else "same"
    body = [
        f'<h1 class="{kind}">{_text(verdict.line)}</h1>',
        f"<p><code>{_text(first)}</code><br><code>{_text(second)}</code>",
    ]
    for cause in verdict.causes:
        body.append(f"<p><b>Cause:</b> {_text(cause.text)}<br><b>Change:</b> {_text(cause.change)}")
    body += [f"<p>{_text(note)}" for note in verdict.notes]
    body.append("<table><tr>" + "".join(f"<th>{name}" for name in COLUMNS))
    for row in verdict.rows:
        odd = verdict.step is not None and row["step"] >= verdict.step
        body.append(f"<tr{' class=odd' * odd}>" + "".join(f"<td>{_text(cell)}" for cell in _cells(row)))
    body.append("</table><p>Distances are shares of the size of all gradients, or all weights, of the step.")
    title = f"<title>{_text(verdict.line)}</title><style>{STYLE}</style>"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8">{title}'
    return head + "\n".join(body) + "\n"


def _cells(row: dict[str, Any]) -> Iterable[str]:
    yield str(row["step"])
    yield _pair([str(count) for count in row["samples"]])
    yield _pair(["-" if loss is None else f"{loss:.6g}" for loss in row["losses"]])
    for stage in ("gradients", "weights"):
        yield f"{row[stage]:.1e}" if row[stage] else "0"
        yield f"{row[f'{stage}, rounding']:.1e}" if row[f"{stage}, rounding"] else "-"


def _pair(values: list[str]) -> str:
    return values[0] if values[0] == values[1] else " / ".join(values)


def _text(value: str) -> str:
    return html.escape(value)
