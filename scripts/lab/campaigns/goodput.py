"""Where the time of a run over machines went, from the record of its devices (campaigns/device.py)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.programs.common.showing import BLACK, BLUE, GREY, ORANGE, VERMILION, our_pyplot

LOST = (
    "waiting in a step",
    "noticing",
    "rendezvous",
    "start",
    "reading",
    "first step",
    "repeated steps",
    "fewer machines",
)


@dataclass
class Group:
    """Workers of one rendezvous that have completed a step.

    Attributes:
        name: host and process id of rank zero.
        world: number of workers.
        times: when its slowest worker had come to a point of its start.
        steps: when each step was completed.
        ends: when workers noticed the end.
    """

    name: str
    world: int = 0
    times: dict[str, float] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    ends: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return min(self.steps.values())

    @property
    def last(self) -> float:
        return max(self.steps.values())

    def reached(self, point: str, moment: float) -> None:
        self.times[point] = max(self.times.get(point, 0.0), moment)


@dataclass
class Goodput:
    """The account of a storm. All times are in seconds since the storm began.

    Attributes:
        rate: steps a second before the storm.
        seconds: length of the storm.
        steps: (time, number of completed steps) of each useful step.
        lost: seconds that did not become useful steps at `rate`, by cause.
        groups: (time of the first step, number of machines) of each group of workers.
        strikes: (time, kind) of each strike.
    """

    rate: float
    seconds: float
    steps: list[tuple[float, int]]
    lost: dict[str, float]
    groups: list[tuple[float, int]]
    strikes: list[tuple[float, str]]

    @property
    def share(self) -> float:
        """Useful steps a second, as a share of `rate`."""
        return len(self.steps) / self.seconds / self.rate

    def lines(self) -> Iterator[str]:
        """Yield a table in Markdown."""
        number = max(1, len(self.strikes))
        yield f"| {number} strikes in {self.seconds:.0f} s | s a strike | share of the time |"
        yield "|---|---|---|"
        for name, seconds in {"useful steps": self.share * self.seconds, **self.lost}.items():
            yield f"| {name} | {seconds / number:.2f} | {100 * seconds / self.seconds:.0f}% |"


def groups_of(events: Sequence[dict[str, Any]]) -> list[Group]:
    """Return the groups that have completed a step, in the order of time."""
    groups: dict[str, Group] = {}
    of_worker: dict[int, Group] = {}
    for event in events:
        pid, what, moment = event["pid"], event["what"], event["time"]
        if what == "starts":
            of_worker[pid] = groups.setdefault(event["group"], Group(event["group"], event["world"]))
            for point in ("born", "checked", "read"):
                of_worker[pid].reached(point, event[point])
        elif what == "begins":
            of_worker[pid].reached("begins", moment)
        elif what == "step":
            of_worker[pid].steps.setdefault(event["step"], moment)
        elif pid in of_worker:  # otherwise the worker ended before it had started
            of_worker[pid].ends.append(moment)
    return sorted((group for group in groups.values() if group.steps), key=lambda group: group.first)


def goodput(
    events: Sequence[dict[str, Any]], began: float, ended: float, strikes: Sequence[tuple[float, str]]
) -> Goodput:
    """Return where the time between `began` and `ended` went.

    A moment is a useful step if the step was never completed before. A gap between the steps of two groups is divided
    at the points that the slowest worker of the later group passed. With fewer machines a useful step takes longer in
    proportion; what it takes beyond that is waiting, as for a link that is cut.

    Args:
        began: when the storm began; undisturbed steps came before.
        ended: when it ended.
        strikes: (seconds since `began`, kind) of each strike.
    """
    groups = groups_of(events)
    calm = {step: moment for group in groups for step, moment in group.steps.items() if moment <= began}
    most, most_machines = max(calm), max(group.world for group in groups)
    rate = (most - min(calm)) / (calm[most] - calm[min(calm)])
    lost, steps, now = dict.fromkeys(LOST, 0.0), [], began

    def spend(cause: str, until: float) -> float:
        nonlocal now
        seconds = min(max(until, now), ended) - now
        lost[cause] += seconds
        now += seconds
        return seconds

    before: Group | None = None
    for group in groups:
        if before and group.first > began:
            born, begins = group.times["born"], group.times.get("begins", group.first)
            spend("noticing", max((moment for moment in before.ends if moment < born), default=before.last))
            for cause, point in (("rendezvous", "born"), ("start", "checked"), ("reading", "read")):
                spend(cause, group.times[point])
            spend("first step", begins)
        for step, moment in sorted(group.steps.items()):
            if moment <= began or moment > ended:
                continue
            if step <= most:
                spend("repeated steps", moment)
                continue
            expected = most_machines / group.world / rate
            lost["fewer machines"] += expected - 1 / rate
            lost["waiting in a step"] -= expected
            spend("waiting in a step", moment)
            most = step
            steps.append((moment - began, step))
        before = group
    spend("rendezvous" if before and before.ends and before.ends[0] < ended else "waiting in a step", ended)
    started = [(group.first - began, group.world) for group in groups]
    return Goodput(rate, ended - began, steps, lost, started, list(strikes))


def draw(storms: Mapping[str, Goodput], path: Path) -> None:
    """Draw the steps of storms over time, and how many machines took part."""
    pyplot = our_pyplot()
    size = (5.5 * len(storms), 4.6)
    figure, panels = pyplot.subplots(2, len(storms), figsize=size, sharex="col", height_ratios=(3, 1), squeeze=False)
    for (name, storm), (upper, lower) in zip(storms.items(), panels.T, strict=True):
        first = storm.steps[0][1] - 1 if storm.steps else 0
        moments = [0.0, *(moment for moment, _ in storm.steps), storm.seconds]
        steps = [0, *(step - first for _, step in storm.steps)]
        steps.append(steps[-1])
        upper.plot((0, storm.seconds), (0, storm.rate * storm.seconds), color=GREY, linestyle="--", label="undisturbed")
        upper.plot(moments, steps, color=BLUE, drawstyle="steps-post", label="in the storm")
        for number, kind in enumerate(sorted({kind for _, kind in storm.strikes})):
            for moment in [moment for moment, other in storm.strikes if other == kind]:
                style = {"color": (ORANGE, VERMILION, BLACK)[number], "linestyle": (":", "-.", "--")[number]}
                label = kind if moment == min(at for at, other in storm.strikes if other == kind) else None
                upper.axvline(moment, linewidth=0.9, label=label, **style)
        upper.set(title=f"{name}: goodput {storm.share:.2f}", ylabel="useful steps")
        upper.legend()
        begun = [group for group in storm.groups if group[0] < storm.seconds]
        lower.step(*zip(*[(max(0.0, at), world) for at, world in begun], (storm.seconds, begun[-1][1]), strict=True),
                   where="post", color=BLUE)  # fmt: skip
        lower.set(xlabel="seconds", ylabel="machines", ylim=(0, None), xlim=(0, storm.seconds))
    figure.savefig(path)
