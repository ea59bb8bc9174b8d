"""The repository in which this script lies. Its project is the one that the script trains: importing this sets it."""

from pathlib import Path

from lockstep.project import use_project_of

ROOT = Path(__file__).resolve().parents[2]

use_project_of(__file__)
