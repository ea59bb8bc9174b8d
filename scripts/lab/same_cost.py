"""Measure what the recorder of `lockstep same` costs and changes, and write docs/results/same.md:

    python scripts/lab/same_cost.py

Each network takes STEPS optimizer steps with and without the recorder, in turns, ROUNDS times each, in a process of its
own with one thread. The processor time of the steps is compared, and the hash of the weights after them.

Exit codes: 0 the same hashes and at most twice the time, 1 not.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from nightly import commit_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results" / "same.md"
BEGIN, END = "<!-- the cost begins -->", "<!-- the cost ends -->"
NETS = {  # -> shape of a batch
    "resnet18": (8, 3, 64, 64),
    "encoder": (16, 64, 128),
    "mlp": (256, 512),
}
STEPS, ROUNDS = 8, 3


def train(name: str) -> None:
    """Train a network, and print the seconds of its steps and the hash of its weights."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    net: nn.Module
    if name == "mlp":
        net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    elif name == "encoder":
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.1, batch_first=True)
        net = nn.Sequential(nn.TransformerEncoder(layer, 4), nn.Flatten(), nn.Linear(64 * 128, 10))
    else:
        from torchvision.models import get_model

        net = get_model(name, num_classes=10)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    seconds = 0.0
    for step in range(STEPS + 1):
        begin = time.process_time()
        x, y = torch.randn(NETS[name]), torch.randint(10, NETS[name][:1])
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds += (time.process_time() - begin) * (step > 0)  # the first one warms up
    state = b"".join(value.numpy().tobytes() for value in net.state_dict().values())
    print(seconds / STEPS, hashlib.sha256(state + torch.get_rng_state().numpy().tobytes()).hexdigest()[:12])


def run(name: str, traced: bool) -> tuple[float, str, float]:
    """Return the seconds of a step, the hash, and the bytes that were written for each tensor and step."""
    with tempfile.TemporaryDirectory() as folder:
        entered = {"PYTHONPATH": str(ROOT / "src" / "lockstep" / "enter"), "LOCKSTEP_TRACE": folder}
        variables = {**os.environ, **(entered if traced else {})}
        done = subprocess.run(
            [sys.executable, __file__, name], env=variables, check=True, capture_output=True, text=True
        )
        seconds, digest = done.stdout.split()
        lines = [line for path in Path(folder).glob("*.jsonl") for line in path.read_text().splitlines()]
        steps = [line for line in map(json.loads, lines) if "step" in line]
        if traced and len(steps) != STEPS + 1:
            raise SystemExit(f"{name}: {len(steps)} steps were recorded")
        tensors = sum(len(step[stage]) for step in steps for stage in ("gradients", "weights", "buffers"))
        return float(seconds), digest, sum(map(len, lines)) / max(1, tensors)


def main() -> int:
    rows = ["| network | a step | with the recorder | ratio | bytes per tensor and step | hash, without and with |"]
    rows += ["|---|---|---|---|---|---|"]
    good = True
    for name in NETS:
        pairs = [(run(name, False), run(name, True)) for _ in range(ROUNDS)]
        plain, traced = (median(pair[side][0] for pair in pairs) for side in (0, 1))
        hashes = [{pair[side][1] for pair in pairs} for side in (0, 1)]
        good &= hashes[0] == hashes[1] and len(hashes[0]) == 1 and traced <= 2 * plain
        shown = " ".join(sorted(hashes[0])) + (", the same" if hashes[0] == hashes[1] else " " + " ".join(hashes[1]))
        size = pairs[0][1][2]
        times = f"{plain * 1e3:.1f} ms | {traced * 1e3:.1f} ms | {traced / plain:.2f}"
        rows.append(f"| {name} | {times} | {size:.0f} | {shown} |")
        print(rows[-1], flush=True)
    content = PAGE.read_text()
    table = "\n".join([BEGIN, "", f"Commit {commit_of(ROOT)}.", "", *rows, "", END])
    PAGE.write_text(content[: content.index(BEGIN)] + table + content[content.index(END) + len(END) :])
    return int(not good)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        sys.exit(main())
