"""Run folders made by hand, and `lockstep compare` in this process."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lockstep.errors import UserError
from lockstep.programs import compare as program

LAYOUT = {"accelerator": "cpu", "num_nodes": 1, "batch_size": 32, "piece_size": 16, "exact": False}


def compare(*words: Path | str) -> SimpleNamespace:
    """Run the program in this process."""
    output, complained, code = io.StringIO(), "", 2
    with redirect_stdout(output):
        try:
            code = program.main([*map(str, words)])
        except UserError as error:
            complained = f"error: {error}\n"
    return SimpleNamespace(returncode=code, stdout=output.getvalue(), stderr=complained)


def written(folder: Path, config: dict[str, Any] | None = None, **summary: Any) -> Path:
    """Return a run folder made by hand."""
    (folder / ".hydra").mkdir(parents=True, exist_ok=True)
    config = config or {"lr": 0.1, "name": "${model.name}", "model": {"name": "mnist_cnn", "dropout": 0.5}}
    (folder / ".hydra" / "config.yaml").write_text(json.dumps(config))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder
