"""Who talks to whom: every way gives the same sum, over links that its formula names; and what a step takes by that."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from communication import judged
from conftest import ROOT, Program, free_port
from forks import Fork
from network.link import Link
from network.machines import Machines, NoMachines
from scaling import Computed, buckets
from torch import Tensor, nn

ELEMENTS = 5003  # no number of workers divides it
TINY = ("data=synthetic", "data.samples=60", "data.image_size=12", "data.num_classes=3", "accelerator=cpu", "threads=1")


@pytest.fixture
def machines() -> Iterator[Machines]:
    try:
        with Machines(3) as made:
            yield made
    except NoMachines as error:
        pytest.skip(f"no network namespaces: {error}")


def link_bytes(way: str, workers: int, size: int) -> float:
    """Return the formulas of the docs, of the busiest link."""
    if way == "parameter server":
        return 2 * (workers - 1) * size
    paired = 1 << (workers.bit_length() - 1)
    if way == "halving and doubling" and workers > paired:
        return 2 * (paired - 1) / paired * size + 2 * size
    return 2 * (workers - 1) / workers * size


def test_all_ways_give_the_same_bits(tmp_path: Path) -> None:
    rng, endpoint = np.random.default_rng(0), f"127.0.0.1:{free_port()}"
    for rank in range(4):
        np.save(tmp_path / f"gradient_{rank}.npy", rng.standard_normal(ELEMENTS).astype(np.float32))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [str(ROOT / "scripts" / "lab" / "network" / "summing.py"), "check", str(tmp_path)]
    workers = [Fork([*command, str(rank), "4", endpoint, "2"], ROOT, environment) for rank in range(4)]
    for worker in workers:
        assert worker.communicate(timeout=180) is not None
        assert worker.returncode == 0
    for count, each in enumerate(json.loads((tmp_path / "check.json").read_text()), start=2):
        assert (each["exact"], each["wrong"]) == (1, 2)
        assert each["float"] > 1 or count == 2


COUNTED = """
import sys
sys.path[:0] = [{scripts!r}, {src!r}]
from pathlib import Path
import torch, torch.distributed as dist
from network.collectives import SUMS, Channel

def carried():
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if "eth0:" in line]
    numbers = line.partition(":")[2].split()
    return int(numbers[0]), int(numbers[8])

rank, address = int(sys.argv[1]), sys.argv[2]
store = dist.TCPStore(address, 29500, 3, is_master=rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
for way in SUMS.values():
    dist.barrier()
    before = carried()
    way(torch.ones(1_000_000), Channel())
    dist.barrier()
    print(*(after - earlier for after, earlier in zip(carried(), before)), flush=True)
dist.barrier()
"""


def test_the_kernel_counts_what_the_formulas_give(machines: Machines) -> None:
    code = COUNTED.format(scripts=str(ROOT / "scripts" / "lab"), src=str(ROOT / "src"))
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-c", code]
    running = [
        machines.start(rank, [*command, str(rank), machines.address(0)], env=environment, stdout=-1)
        for rank in range(3)
    ]
    output = [process.communicate(timeout=100)[0].split("\n")[:4] for process in running]
    counted = np.array([[[int(number) for number in line.split()] for line in lines] for lines in output])
    server, ring, _, backend = counted.transpose(1, 0, 2)  # [workers, in and out], with headers, of some percent
    size = 4_000_000
    assert server[0] == pytest.approx([2 * size, 2 * size], rel=0.12)
    assert server[1:] == pytest.approx(np.full((2, 2), size), rel=0.12)
    for each in (ring, backend):
        assert each == pytest.approx(np.full((3, 2), link_bytes("ring", 3, size)), rel=0.12)


def test_a_limited_link_is_measured_and_the_table_reports_it(machines: Machines, tmp_path: Path) -> None:
    run = Program(tmp_path, "scripts/lab/communication.py")(
        *TINY, "devices=2", "batch_size=8", "rounds=2", "rate=800mbit", timeout=300
    )
    actual = json.loads((run.folder / "communication.json").read_text())
    mbit = 8 / actual["link"]["beta"] / 1e6
    assert mbit < 900  # of memory it would be thousands
    assert [row["way"] for row in actual["rows"]] == [
        "parameter server", "ring", "halving and doubling", "gloo's all-reduce",
    ]  # fmt: skip
    assert run.stdout.count("\n| 2 | ") == 4
    assert "With exact integers all ways gave the same bits" in run.stdout
    assert (run.folder / "communication.png").exists()
    assert Link.measured(run.folder).beta == actual["link"]["beta"]


def test_without_namespaces_a_rate_is_refused_in_a_line(tmp_path: Path) -> None:
    program, nowhere = Program(tmp_path, "scripts/lab/communication.py"), {"PATH": str(tmp_path)}
    run = program(*TINY, "devices=2", "rate=100mbit", env=nowhere, ok=False)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "error: rate=100mbit: this system can't limit links: ip is not installed (packages iproute2 and util-linux)\n"
    )
    run = program(*TINY, "devices=2", "rate=fast", ok=False)
    assert (run.returncode, run.stderr) == (2, "error: rate=fast: must be a rate in tc's notation: 200mbit, 1gbit\n")


def test_a_sum_that_differs_and_a_control_that_does_not_are_seen() -> None:
    good = [{"exact": 1, "wrong": 2, "float": 1}, {"exact": 1, "wrong": 2, "float": 3}]
    assert "3 workers got 3 different sums" in judged(good)
    for change in ({"exact": 2}, {"wrong": 1}, {"float": 1}):
        with pytest.raises(RuntimeError, match=r"^3 workers: "):
            judged([good[0], good[1] | change])


def test_the_fit_finds_a_links_latency_and_rate() -> None:
    pings = [(size, 1e-4 + size * 4e-8) for size in (64, 1024, 1 << 21, 1 << 22)] * 3
    link = Link.fitted([(size, seconds * (1 + 0.5 * (at % 3 == 2))) for at, (size, seconds) in enumerate(pings)], 0.0)
    assert (link.alpha, link.beta) == pytest.approx((1e-4, 4e-8), rel=1e-6)
    assert link.mbit == pytest.approx(200)
    assert 190 < Link.of_rate("200mbit").mbit < 192  # headers take the rest
    for way in ("parameter server", "ring", "halving and doubling"):
        for workers in range(2, 10):
            cost = Link(0.0, 1.0).cost(way, workers, 1000)
            assert cost.seconds == pytest.approx(link_bytes(way, workers, 1000))
            assert (cost.incast > 0) == (way == "parameter server" and workers > 2)


def test_buckets_are_ddps() -> None:
    model = nn.Sequential(*(nn.Linear(size, 1000) for size in (10, 3000, 4000, 900, 2500, 5)))
    parameters = list[Tensor](model.parameters())[::-1]
    indices, _ = dist._compute_bucket_assignment_by_size(parameters, [1 << 20, 25 << 20])
    sizes = [sum(parameters[index].nbytes for index in bucket) for bucket in indices]
    one = Computed(1.0, [0.0] * len(parameters), [parameter.nbytes for parameter in reversed(parameters)])
    assert [size for _, size in buckets(one)] == sizes


def test_advise_measures_one_device_and_predicts_several_machines(tmp_path: Path) -> None:
    run = Program(tmp_path, "scripts/lab/advise.py")(
        *TINY, "seconds=0.1", "batch_size=4", "link=[100mbit,10gbit]", cwd=ROOT
    )
    report = json.loads((run.folder / "advise.json").read_text())
    assert report["answer"] in run.stdout
    slow, fast = ([row for row in report["machines"] if row["link"] == link] for link in ("100mbit", "10gbit"))
    assert [(row["machines"], row["samples"]) for row in slow] == [(1, 4), (2, 2)]
    for alone, two in (slow, fast):
        assert alone["step"] == alone["computing"] > 0 == alone["reducing"]
        assert two["computing"] < two["step"] <= two["computing"] + two["reducing"]
    assert slow[1]["computing"] == fast[1]["computing"]
    latency = 2 * Link.of_rate("100mbit").alpha  # of one bucket
    assert slow[1]["reducing"] - latency == pytest.approx(100 * (fast[1]["reducing"] - latency))
