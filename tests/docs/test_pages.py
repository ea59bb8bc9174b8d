"""Every page of the site is followed: its commands are run on small data, and the output that it shows is compared.

Where a command needs a cluster, a GPU or hours, its config is composed or its arguments are parsed instead: NOT_RUN
says why. Pages that have tests of their own are in FOLLOWED_BY.
"""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import site_pages
from conftest import ROOT, TINY, Program, forked, summary_of, template
from hydra.core.override_parser.overrides_parser import OverridesParser
from PIL import Image
from site_pages import Command, Page
from small_data import config

import lockstep
from lockstep.config.pages import find
from lockstep.data.build import open_data
from lockstep.programs.main import commands

FOLLOWED_BY = {
    "use/own-model.md": "test_user_code_page.py",
    "use/own-data.md": "test_user_code_page.py",
    "use/metrics-callbacks-loggers.md": "test_user_code_page.py",
    "use/test-your-own-code.md": "test_user_tests_page.py",
    "use/shards.md": "test_shards_page.py",
    "use/tasks.md": "test_tasks_page.py",
    "use/same.md": "test_same_page.py",
    "use/fine-tuning.md": "job/test_fine_tuning.py",
    "coming-from-lightning-hydra-template.md": "test_coming_from_page.py",
    "troubleshooting.md": "test_troubleshooting.py",
}
# A pattern of commands, and why they are not run here.
NOT_RUN = (
    (
        r"make (setup|train|docs|docs-serve|dashboard|schema|lock)|tensorboard ",
        "builds the environment, or serves until it ends",
    ),
    (r"make (project|test)$|make project ", "tests/programs/test_new.py makes one, and runs its tests"),
    (r"make lint|python -m build", "CI runs these, the night, or a release"),
    (r"pip install", "changes the environment"),
    (r"apt |mkdir|sed |export |unshare|ls |eval |photos=", "changes the machine, or needs a folder of photographs"),
    (r"sbatch|mpirun|(lockstep )?torchrun|RANK=", "needs an engine: tests/engines/ run it"),
    (r".*hydra/launcher=submitit", "needs a cluster: tests/engines/test_submitit.py runs it"),
    (r".*experiment=|.*data=(mnist|cifar10)\b", "downloads a data set and trains for minutes"),
    (r"python scripts/lab/", "measures for minutes or hours: tests/lab/ run it"),
    (r"lockstep (parity|search|fit-memory|proof)", "makes many runs: tests/programs/ run it"),
    (r"(lockstep (export|verify)|python tests/|python -m pytest|qemu-)", "has tests of its own, or is one"),
    (r".*seed=0,1,2,3,4|lockstep compare outputs/(late|local_sgd|summed)/", "60 runs"),
    (r"lockstep same outputs/", "tests/programs/test_same_folders.py runs it"),
    (r".*accelerator=gpu", "needs a GPU: scripts/lab/gpu_day.py runs it"),
    (r"lockstep (index|shards)|.*data_dir=s3:", "needs a server: tests/streams/test_stores.py has one"),
    (r"lockstep (new|conf|schema)|python -m lockstep$", "tests/programs/ run it"),
    (r"python src/train.py( -m seed=0,1,2)?$", "trains to its end: the console block of first-run.md does"),
    (r".*(<their checkpoint>|debug=profile)", "has tests of its own"),
)
SHORT = ("threads=1", "accelerator=cpu", "num_workers=0")
PARSED = """
import argparse, runpy, sys
parser = argparse.ArgumentParser
real, known = parser.parse_args, parser.parse_known_args
def parse_args(self, *arguments, **named):
    parser.parse_known_args = known  # parse_args calls it
    real(self, *arguments, **named)
    sys.exit(0)
def parse_known_args(self, *arguments, **named):
    known(self, *arguments, **named)
    sys.exit(0)
parser.parse_args, parser.parse_known_args = parse_args, parse_known_args
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def not_run(command: Command) -> str:
    """Return why a command is not run; nothing where it is."""
    return next((why for pattern, why in NOT_RUN if re.match(pattern, command.text)), "")


def needs_a_deleted_extra(command: Command) -> bool:
    """Return whether a command names an extra whose files were deleted."""
    names = re.findall(r"extras=\[([\w,]+)\]|strategy=(pipeline)", command.text)
    chosen = [each for group in names for each in ",".join(filter(None, group)).split(",")]
    return any(not any(find(f"{group}/{name}") for group in ("extras", "strategy")) for name in chosen)


def words_of(command: Command) -> list[str]:
    """Return a command's words with the placeholders that stand for a user's own files replaced."""
    text = command.text
    for placeholder, value in {
        "<folder with MNIST/>": "data",
        "<folder>": "images",
        "<file>": "list.csv",
        "<their checkpoint>": "last",
        "<name>": "any",
        "<timestamp>": "any",
        "<the run's overrides>": "",
    }.items():
        text = text.replace(placeholder, value)
    return shlex.split(text, comments=True)


COMMANDS = [(name, command) for name in site_pages.pages() for command in site_pages.read(name).commands]


def test_pages_show_commands() -> None:
    """Most of them do; a parser that finds none would make every other test pass."""
    assert len(COMMANDS) > 150
    assert len({name for name, _ in COMMANDS}) > 30
    assert sum(command.output is not None for _, command in COMMANDS) >= 5
    for pattern, _ in NOT_RUN:
        assert any(re.match(pattern, command.text) for _, command in COMMANDS), f"{pattern} fits no command"


def test_the_comparison_of_output_can_fail() -> None:
    assert site_pages.matches(["a 0.25", "...", "z"], ["a 0.75", "b", "c", "z"])
    assert not site_pages.matches(["a 2 pieces"], ["a 3 pieces"])
    assert not site_pages.matches(["a", "z"], ["a", "b", "z"])


@pytest.mark.usefixtures("whole_run")
@pytest.mark.parametrize("name", sorted({name for name, command in COMMANDS if not_run(command)}))
def test_what_is_not_run_is_composed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs exist, their overrides have keys that exist, and what pip installs is in pyproject.toml."""
    monkeypatch.chdir(ROOT)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in site_pages.read(name).commands:
        if not not_run(command) or needs_a_deleted_extra(command):
            continue
        for group in re.findall(r"\.\[(\w+)\]", command.text):
            assert group in extras, command.text
        words = words_of(command)
        programs = [word for word in words if re.fullmatch(r"(src|scripts)/[\w/]+\.(py|sh)", word)]
        if words[0] == "lockstep":
            assert words[1] in [*commands(), "--help"], command.text
        if "\n" in command.text or not programs:
            continue
        assert all((ROOT / program).is_file() for program in programs), command.text
        overrides = words[words.index(programs[-1]) + 1 :]
        if programs[-1] in ("src/train.py", "scripts/slurm.sh"):
            compose(overrides)


def compose(overrides: list[str]) -> None:
    """Compose the config of `src/train.py`; of a sweep, that of its first job."""
    first = []
    for override in overrides:
        if override.startswith(("-", "resume=", "sweep.resume=", "init_from=", "hydra")):
            continue
        parsed = OverridesParser.create().parse_override(override)
        values = list(parsed.sweep_string_iterator()) if parsed.is_sweep_override() else []
        first.append(f"{parsed.get_key_element()}={values[0]}" if values else override)
    lockstep.compose(*first)


LAB = [command for _, command in COMMANDS if re.match("python scripts/lab/", command.text)]


@pytest.mark.usefixtures("processes")
@pytest.mark.nightly
def test_arguments_of_the_lab_are_parsed(tmp_path: Path) -> None:
    """By the programs' own parsers, which end them then."""
    parse = tmp_path / "parse.py"
    parse.write_text(PARSED)
    for text in dict.fromkeys(command.text for command in LAB):
        if "ArgumentParser(" not in (ROOT / words_of(Command(text))[1]).read_text():
            continue  # one without arguments
        done = forked(parse, *words_of(Command(text))[1:])
        assert done.returncode == 0, f"{text}\n{done.stderr}"
    assert forked(parse, "scripts/lab/benchmark.py", "--no-such-option").returncode == 2  # the control


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the template as a user has it, with a folder of images and a list of them."""
    folder = template(tmp_path_factory.mktemp("project"))
    rows = "path,label\n"
    for number in range(96):
        label = ("benign", "malignant")[number % 2]
        path = folder / "images" / label / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (70, 64), number).save(path)
        rows += f"images/{label}/{number}.png,{label}\n"
    (folder / "list.csv").write_text(rows)
    (folder / "scripts").symlink_to(ROOT / "scripts")
    return folder


RUN = sorted({name for name, command in COMMANDS if not not_run(command) and name not in FOLLOWED_BY})


FIRST = "start/first-run.md"  # this one in CI, the others by night or when pages change: `make pages`


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.nightly] * (name != FIRST)) for name in RUN])
def test_a_page_is_followed(name: str, project: Path, tmp_path: Path) -> None:
    page: Page = site_pages.read(name)
    for path, text in page.files.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text)
    for command in page.commands:
        if not not_run(command) and not needs_a_deleted_extra(command):
            follow(command, project, tmp_path / "outputs")


def follow(command: Command, project: Path, outputs: Path) -> None:
    """Run a command of a page: to its end where its output is shown, else for two steps."""
    python, script, *overrides = words_of(command)
    assert python in ("python", "lockstep"), f"{command.text}: NOT_RUN has no reason for it"
    file: str | Path = project / script
    if python == "lockstep":
        file = script = f"lockstep {script}"
    program = Program(outputs, script, project)
    if command.output is not None:
        done = forked(file, *overrides, cwd=outputs.parent)  # as on the page, with outputs/ beside it
        printed = (done.stderr + done.stdout).splitlines()
        assert site_pages.matches(command.output, printed), f"{command.text}\n" + "\n".join(printed)
        return
    if any(flag in overrides for flag in ("--help", "--cfg")) or script.startswith("scripts/lab/"):
        done = forked(file, *overrides, cwd=project)
        assert done.returncode == 0, f"{command.text}\n{done.stderr}"
        return
    if script == "lockstep compare":
        sweep = newest(outputs, sweep=True) or newest_sweep(project, outputs)
        done = forked(file, str(sweep), *overrides[1:], cwd=project)
        assert done.returncode == 0, f"{command.text}\n{done.stderr}"
        return
    if "=last" in command.text and not newest(outputs):
        Program(outputs)(*TINY, "max_steps=2", "logger=none", cwd=project)
    length = ["max_steps=4" if any(each.startswith("resume=") for each in overrides) else "max_steps=2"]
    options = {each.partition("=")[0] for each in overrides}
    if script != "src/train.py":
        more = ["accelerator=cpu"]
    elif "sweep.resume" in options:
        overrides = [f"sweep.resume={newest(outputs, sweep=True)}"]
        more, length = [], []
    else:
        more = [*length, *SHORT, *(["logger=none"] * ("logger" not in options))]
        more = [each for each in more if "debug=" not in command.text or not each.startswith(("max_", "num_"))]
        if "debug=overfit" in overrides:
            more.append("max_epochs=3")
    run = program(*overrides, *(each for each in more if each.partition("=")[0] not in options))
    for folder in run.folders:
        if (folder / "summary.json").exists():
            assert summary_of(folder)["status"] == "completed", f"{command.text}\n{run}"


def newest(outputs: Path, sweep: bool = False) -> Path | None:
    """Return the newest run folder below outputs, or the newest sweep's."""
    actual = sorted(outputs.glob("*/sweeps/*" if sweep else "*/*/.hydra"), key=lambda path: path.stat().st_mtime_ns)
    return (actual[-1] if sweep else actual[-1].parent) if actual else None


def newest_sweep(project: Path, outputs: Path) -> Path:
    """Make a sweep of two small runs; return its folder."""
    Program(outputs)("-m", *TINY, "max_steps=2", "seed=0,1", cwd=project)
    actual = newest(outputs, sweep=True)
    assert actual is not None
    return actual


def test_the_line_about_a_folder_of_images_is_the_one_on_the_page(project: Path) -> None:
    (line,) = re.findall(r"^    (image_folder: .*)$", site_pages.path_of("use/images.md").read_text(), re.MULTILINE)
    folder = str(project / "images")
    assert line.replace("<folder>", folder) == open_data(config("image_folder"), folder).about


@pytest.mark.usefixtures("processes")
def test_the_summary_on_the_page_is_what_a_run_writes(tmp_path: Path) -> None:
    ((_, code),) = [block for block in site_pages.read("reference/run-folder.md").blocks if block[0] == "json"]
    shown, written = json.loads(code), Program(tmp_path)("max_steps=2", "threads=1", "logger=none").summary
    assert set(written) - set(shown) == {"versions", "git"}
    assert set(shown) <= set(written)
    for key in ("layout", "metrics", "throughput"):
        assert set(shown[key]) == set(written[key]), key


def test_lines_are_at_most_120_characters() -> None:
    """But for output that a program prints, and rows of tables, which can't be broken."""
    for name in site_pages.pages():
        text = re.sub(r"^```(text|console)\n.*?^```$", "", site_pages.path_of(name).read_text(), flags=re.M | re.S)
        text = site_pages.without_written(text)
        assert [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")] == [], name
