"""Run one training on five layouts, and draw the terminal session: the picture of the README.

    python scripts/lab/first_screen.py                             # some minutes on two cores
    python scripts/lab/first_screen.py --folder /tmp max_epochs=6  # another task, pictures elsewhere

Shells run the commands of the picture as they stand there, in a folder of their own: on one device, ddp on 4, dp on 3,
torchrun on two machines (network namespaces: Linux and root only), and a run that is killed and resumed on another
layout. Of what the programs print, the picture has the lines about the step, the resuming and `weights_sha256`. All
runs must end with the same hash, else nothing is drawn. The hash depends on the processor and on the version of torch;
all else in the picture is the same each time. Devices are CPU workers.

Exit codes: 0 drawn, 1 hashes differ or a command failed, 2 bad input.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import TracebackType

from network.machines import HOSTS, Machines, NoMachines

ROOT = Path(__file__).resolve().parents[2]
FILES = {theme: f"first-screen-{theme}.svg" for theme in ("light", "dark")}

SHA = "sha() { grep -h weights_sha256 outputs/$1/*/summary.json; }"
SHOWN = ("step ", "resumes after step ")  # beginnings of lines that are drawn, beside that of a hash
HASH = '  "weights_sha256": "'
ENDED = "--- ended with"  # what a shell prints after each command

# --- the session ---


@dataclass(frozen=True)
class Command:
    """A command of the session.

    Attributes:
        prompt: names the machine.
        until: the beginning of the line that the next command waits for. None: this one's end. Empty: nothing.
    """

    text: str
    prompt: str = "$"
    until: str | None = None


Block = list[tuple[Command, list[str]]]  # commands, each with the lines that are drawn of its output


def blocks(job: str) -> list[list[Command]]:
    """Return the session for the overrides `job`; blocks are drawn with an empty line between them."""
    train = f"python src/train.py {job}"
    torchrun = (
        "lockstep torchrun --nnodes=2 --nproc-per-node=2 --rdzv-endpoint=node0:29500 \\\n"
        f"    src/train.py {job} name=two"
    )
    return [
        [Command(SHA)],
        [Command(f"{train} name=one && sha one")],
        [Command(f"{train} name=ddp strategy=ddp devices=4 && sha ddp")],
        [Command(f"{train} name=dp strategy=dp devices=3 && sha dp")],
        [Command(torchrun, "node1$", until=""), Command(f"{torchrun} && sha two", "node0$")],
        [
            Command(f"{train} name=killed strategy=ddp devices=4 &", until="epoch 3/"),
            Command("kill -9 $!"),
            Command("python src/train.py resume=last strategy=dp devices=3 && sha killed"),
        ],
    ]


class CommandFailed(Exception):
    """A command of the session ended with another exit code than 0. The message is its output."""


class Shell:
    """A bash that reads commands from a pipe, while it is entered. Its standard error is its standard output."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        # Devices are CPU workers on every machine, so that the picture needs no GPUs.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""}
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._input, self._output = self._process.stdin, self._process.stdout
        self._write(SHA)

    def __enter__(self) -> "Shell":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._input.close()  # bash ends after the command that it runs
        rest = self._output.read()
        if self._process.wait() and error is None:
            raise CommandFailed(rest)

    def run(self, command: Command) -> list[str]:
        """Run a command until the next one may start. Return the lines of its output that are drawn."""
        self._write(command.text)
        if command.until == "":
            return []
        if command.until is None:
            self._write(f"echo '{ENDED}' $?")
        lines: list[str] = []
        for line in self._output:
            lines.append(line.rstrip("\n"))
            if line.startswith(command.until or ENDED):
                break
        if not lines or not lines[-1].startswith(command.until or f"{ENDED} 0"):
            raise CommandFailed("\n".join([command.text, *lines]))
        return [line for line in lines if line.startswith((*SHOWN, HASH))]

    def _write(self, text: str) -> None:
        self._input.write(f"{text}\n")
        self._input.flush()


def record(job: str) -> list[Block]:
    """Run the session. Return its blocks with what is drawn of the output.

    Raises:
        NoMachines: this system or user can't make network namespaces.
    """
    with ExitStack() as opened:
        work = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="first_screen_")))
        folders = [work / name for name in ("here", "node0", "node1")]
        for folder in folders:
            folder.mkdir()
            for part in ("src", "scripts"):
                (folder / part).symlink_to(ROOT / part)
        machines = opened.enter_context(Machines(2))
        for name in machines.names:
            with (HOSTS / name / "hosts").open("a") as file:
                file.writelines(f"{machines.address(index)} node{index}\n" for index in range(2))
        here, *nodes = folders
        commands = [machines.command(0, ["bash"], [nodes[1]]), machines.command(1, ["bash"], [nodes[0]])]
        shells = {"$": opened.enter_context(Shell(["bash"], here))}
        for index, (command, folder) in enumerate(zip(commands, nodes, strict=True)):
            shells[f"node{index}$"] = opened.enter_context(Shell(command, folder))
        return [[(command, shells[command.prompt].run(command)) for command in block] for block in blocks(job)]


def hashes(session: Sequence[Block]) -> set[str]:
    """Return the different hashes of a session."""
    return {line for block in session for _, lines in block for line in lines if line.startswith(HASH)}


# --- the picture ---

FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', monospace"
SIZE, ADVANCE, LINE, MARGIN, CORNER = 14, 8.6, 20, 22, 10  # pixels; fonts of the stack have at most this advance
PALETTES = {
    "light": {"ground": "#f6f8fa", "border": "#d1d9e0", "command": "#1f2328", "output": "#59636e", "prompt": "#0969da",
              "hash": "#1a7f37"},
    "dark": {"ground": "#0d1117", "border": "#3d444d", "command": "#f0f6fc", "output": "#9198a1", "prompt": "#4493f8",
             "hash": "#3fb950"},
}  # fmt: skip
Span = tuple[str, str]  # a colour of the palette, and a text


def rows(session: Sequence[Block]) -> list[list[Span]]:
    """Return the lines of the terminal."""
    drawn: list[list[Span]] = []
    for block in session:
        drawn += [[]] * bool(drawn)
        for command, output in block:
            for number, line in enumerate(command.text.split("\n")):
                drawn.append([("prompt", f"{'>' if number else command.prompt} "), ("command", line)])
            drawn += [spans(line) for line in output]
    return drawn


def spans(line: str) -> list[Span]:
    """Return a line of output in its colours."""
    if not line.startswith(HASH):
        return [("output", line)]
    sha, end = line.removeprefix(HASH).split('"', 1)
    return [("output", HASH), ("hash", sha), ("output", f'"{end}')]


def draw(session: Sequence[Block], theme: str) -> str:
    """Return the session as an SVG, whose text is text."""
    colours, lines = PALETTES[theme], rows(session)
    columns = max(sum(len(text) for _, text in line) for line in lines)
    width, height = round(columns * ADVANCE) + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    styles = "".join(f".{name}{{fill:{colours[name]}}}" for name in ("command", "output", "prompt", "hash"))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        "<title>The same training on five layouts: each ends with the same weights_sha256</title>",
        f"<style>text{{font:{SIZE}px {FONT};white-space:pre}}.command,.hash{{font-weight:600}}{styles}</style>",
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="{CORNER}" '
        f'fill="{colours["ground"]}" stroke="{colours["border"]}"/>',
    ]
    for number, line in enumerate(lines):
        tspans = "".join(f'<tspan class="{name}">{escape(text, quote=False)}</tspan>' for name, text in line if text)
        at = MARGIN + number * LINE + SIZE
        parts += [f'<text x="{MARGIN}" y="{at}" xml:space="preserve">{tspans}</text>'] * bool(line)
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where the pictures go")
    parser.add_argument("overrides", nargs="*", help="for train.py, such as data=synthetic")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"--folder={options.folder}: there is no such folder")
    try:
        session = record(shlex.join(["exact=true", "pieces=8", *options.overrides]))
    except NoMachines as reason:
        print(f"error: two machines can't be made here: {reason}", file=sys.stderr)
        return 2
    except CommandFailed as failed:
        print(f"error: a command of the session failed:\n{failed}", file=sys.stderr)
        return 1
    print("\n".join("".join(text for _, text in line) for line in rows(session)))
    if len(hashes(session)) != 1:
        print("error: the hashes differ: all runs must end with the same", file=sys.stderr)
        return 1
    for theme, name in FILES.items():
        (options.folder / name).write_text(draw(session, theme))
    return 0


if __name__ == "__main__":
    sys.exit(main())
