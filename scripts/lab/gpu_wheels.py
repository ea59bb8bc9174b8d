"""Collect in a folder what gpu_day.py needs on a machine without network, and print a list with sizes:

    python scripts/lab/gpu_wheels.py    # into .whl/

The machine has Python 3.12 on x86-64 Linux, torch, torchvision and lightning, but neither Hydra nor pydantic.
gpu_day.py installs them from the folder.
Exit codes: 0 collected, 1 pip failed or the folder is too large.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".whl"
SITE = Path(tempfile.gettempdir(), "gpu_day_site")  # where a machine has the wheels unpacked
# Those of the rehearsal. Hydra 1.3 and OmegaConf 2.3 need ANTLR 4.9, which the index has no wheel of.
WHEELS = ["hydra-core==1.3.8", "omegaconf==2.3.1", "pydantic==2.13.4", "pydantic-core==2.46.4"]
WHEELS += ["annotated-types==0.7.0", "typing-inspection==0.4.2"]
BUILT = "antlr4-python3-runtime==4.9.3"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
MOST_MIB = 50  # the checkout itself takes up to 10, and 64 may be taken along


def collect(folder: Path) -> None:
    """Fill the folder; what it already has stays.

    Raises:
        CalledProcessError: pip failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    where = ["--python-version=3.12", "--implementation=cp", *(f"--platform={name}" for name in PLATFORMS)]
    if lacking := [each for each in WHEELS if not _wheel(folder, each)]:
        subprocess.run(
            [*pip, "download", "--no-deps", "--only-binary=:all:", *where, "-d", folder, *lacking], check=True
        )
    if not _wheel(folder, BUILT):
        subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, BUILT], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    (folder / "commit.txt").write_text(head.stdout)  # the machine may get the files without .git


def _wheel(folder: Path, requirement: str) -> bool:
    name, _, version = requirement.partition("==")
    return any(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))


def install(folder: Path = FOLDER, site: Path = SITE) -> bool:
    """Install the wheels of the folder into `site`, once per machine. Return False if there are none.

    Raises:
        CalledProcessError: pip failed.
    """
    wheels = sorted(folder.glob("*.whl"))
    if wheels and not (site / "hydra").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-cache-dir"]
        subprocess.run([*pip, "--disable-pip-version-check", "--upgrade", "--target", site, *wheels], check=True)
    return bool(wheels)


def commit(folder: Path = FOLDER) -> str | None:
    """Return the commit from which the folder was collected."""
    path = folder / "commit.txt"
    return path.read_text().strip() or None if path.exists() else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=FOLDER)
    options = parser.parse_args()
    try:
        collect(options.to)
    except subprocess.CalledProcessError as error:
        print(f"error: pip failed with exit code {error.returncode}", file=sys.stderr)
        return 1
    sizes = {path.name: path.stat().st_size / 2**20 for path in sorted(options.to.iterdir())}
    for name, mib in sizes.items():
        print(f"{mib:7.2f} MiB  {name}")
    print(f"{sum(sizes.values()):7.2f} MiB  in all, of {MOST_MIB} at most")
    return int(sum(sizes.values()) > MOST_MIB)


if __name__ == "__main__":
    sys.exit(main())
