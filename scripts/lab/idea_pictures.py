"""Draws the three pictures of docs/start/idea.md:  python scripts/lab/idea_pictures.py

They are SVG with a ground of their own, light or dark as the reader's system is.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "start"
WIDTH = 720
HUES = (212, 30, 150, 330)  # of devices
STYLE = """<style>
  text { font: 15px system-ui, sans-serif; fill: var(--ink) }
  .small { font-size: 13px; fill: var(--soft) }
  .code { font-family: ui-monospace, monospace; font-size: 14px }
  .middle { text-anchor: middle }
  svg { --ground: #fbfbfd; --ink: #1d2433; --soft: #5b6475; --line: #b9c0cc; --light: 82% }
  @media (prefers-color-scheme: dark) {
    svg { --ground: #1b1f2a; --ink: #e8ebf2; --soft: #a4adbd; --line: #4a5263; --light: 34% }
  }
  .line { stroke: var(--line); fill: none; stroke-width: 1.5 }
"""


class Picture:
    """An SVG that grows downwards."""

    def __init__(self, height: int, title: str) -> None:
        hues = "".join(f"  .d{n} {{ fill: hsl({hue} 65% var(--light)) }}\n" for n, hue in enumerate(HUES))
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{title}</title>\n{STYLE}{hues}</style>",
            f'<rect width="{WIDTH}" height="{height}" rx="10" style="fill: var(--ground)"/>',
        ]

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{text}</text>')

    def box(self, x: float, y: float, width: float, label: str = "", device: int = 0, height: float = 30) -> None:
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="d{device}"/>')
        if label:
            self.text(x + width / 2, y + height / 2 + 5, label, "middle")

    def line(self, *points: tuple[float, float]) -> None:
        self.parts.append(f'<polyline class="line" points="{" ".join(f"{x:g},{y:g}" for x, y in points)}"/>')

    def save(self, path: Path) -> None:
        path.write_text("\n".join([*self.parts, "</svg>\n"]))


def step() -> Picture:
    """One row of samples; the pieces below it."""
    picture = Picture(190, "A step of 32 samples is cut into 8 pieces of 4")
    picture.text(24, 34, "a step: 32 samples")
    for sample in range(32):
        picture.box(24 + sample * 21, 46, 17, height=17)
    picture.text(24, 106, "8 pieces, each one forward and one backward pass")
    for piece in range(8):
        left = 24 + piece * 84
        picture.line((left, 70), (left, 76), (left + 80, 76), (left + 80, 70))
        picture.box(left, 118, 80, f"piece {piece}")
    picture.text(24, 174, "gradient of the step = mean over its 32 samples", "small")
    return picture


def layouts() -> Picture:
    """The same eight pieces, by the device that computes them; time goes to the right."""
    picture = Picture(526, "The same 8 pieces on four layouts")
    rows = (
        ("one device", [[0, 1, 2, 3, 4, 5, 6, 7]], ""),
        ("strategy=ddp devices=4", [[0, 1], [2, 3], [4, 5], [6, 7]], ""),
        ("strategy=dp devices=3", [[0, 1, 2], [3, 4, 5], [6, 7]], ""),
        ("strategy=ddp, torchrun on two machines", [[0, 1, 2, 3], [4, 5, 6, 7]], "machine"),
    )
    y = 34
    for title, devices, place in rows:
        picture.text(24, y, title, "code")
        for device, pieces in enumerate(devices):
            y += 30
            picture.text(24, y + 5, f"{place or 'device'} {device}", "small")
            for at, piece in enumerate(pieces):
                picture.box(110 + at * 70, y - 13, 66, str(piece), device, height=25)
        y += 46
    picture.text(24, y - 8, "time goes to the right; more devices take less of it, the step stays the same", "small")
    return picture


def exact() -> Picture:
    """Numbers off a grid, on it, and their sum in two orders."""
    picture = Picture(250, "Gradients are rounded to a grid and added as integers")
    picture.text(24, 34, "one number of the gradient, in each of three pieces")
    gradients = (0.317, -0.142, 0.0861)
    for at, value in enumerate(gradients):
        picture.box(24 + at * 150, 48, 130, f"{value:g}", at)
        picture.line((89 + at * 150, 82), (89 + at * 150, 104))
        picture.box(24 + at * 150, 108, 130, f"{round(value * 1024)} / 1024", at)
    picture.text(490, 69, "floating-point numbers", "small")
    picture.text(490, 129, "whole numbers on a grid", "small")
    one, two, three = (round(value * 1024) for value in gradients)
    picture.text(24, 178, f"one device:   ({one} + {two}) + {three} = {one + two + three}", "code")
    picture.text(24, 204, f"two devices:  {one} + ({two} + {three}) = {one + (two + three)}", "code")
    picture.text(24, 232, "the grid here is coarse; a real one keeps 45 bits below the largest element", "small")
    return picture


PICTURES = {"idea-step.svg": step, "idea-layouts.svg": layouts, "idea-exact.svg": exact}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw().save(FOLDER / name)
