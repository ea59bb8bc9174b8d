"""Why a worker failed, in one line: its own error, a rank that it has lost, or the place where it hangs."""

import faulthandler
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.errors import LostRank, NonFinite, StepRefused, UserError, WorkerFailed
from lockstep.launch.environment import environment, external_workers
from lockstep.launch.logs import log_file
from lockstep.launch.rendezvous import group_store
from lockstep.text import join_names, short_path

VICTIM_SECONDS = 1  # a worker reports a lost connection after this delay, so that the failed worker reports first
STACK_SECONDS = 3.0  # for a worker that hangs, to write its stack
PROGRAMS = ("train.py", "evaluate.py", "predict.py")  # in src/
# Exceptions that Python, Lightning or a loader process take as the end of a loop, and not as an error.
ENDS = (StopIteration, StopAsyncIteration, GeneratorExit)
STORE_SECONDS = 3.0  # how long ranks that are still alive have to exchange keys through the store after a failure


def failure_of_worker(error: BaseException, hang_timeout: float) -> UserError | WorkerFailed:
    """Return the error that a worker sends to its parent. It is picklable, whatever `error` is."""
    rank, steps = environment().rank, getattr(error, "steps", 0)
    if isinstance(error, UserError):
        refused = UserError(re.sub("^(UserError|StepRefused): ", "", _first_line(str(error))))
        refused.steps = steps
        if error.__cause__:  # an error of a library or of the user's code, which HYDRA_FULL_ERROR=1 shows
            refused.add_note(traceback.format_exc())
        return refused
    if is_lost_rank(error):
        if _is_timeout(error):
            where = _waiting_place(rank)
            return LostRank(missing_ranks_message([], hang_timeout, where), rank, steps, True, bool(where))
        time.sleep(VICTIM_SECONDS)
        return LostRank(f"rank {rank} lost the connection to another worker", rank, steps)
    if isinstance(error, WorkerFailed):
        failed = WorkerFailed(str(error), error.local_rank, steps)
        if error.local_rank is None:
            failed = WorkerFailed(f"rank {rank} {error}", rank, steps)
        failed.may_restart = error.may_restart
        return failed
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        message = f"the worker called exit with code {error.code}"
    failed = WorkerFailed(f"rank {rank} failed: {_first_line(message)} ({place_of(error)})", rank, steps)
    failed.add_note(traceback.format_exc())
    return failed


def is_raised_by_all_ranks(error: BaseException) -> bool:
    """Check whether all ranks raise this error, at the same place of the run."""
    return isinstance(error, UserError | NonFinite) and not isinstance(error, StepRefused)


# --- ranks that are lost ---


def is_lost_rank(error: BaseException) -> bool:
    """Check whether an error means that another rank is lost or did not join a collective.

    These are torch's own errors, and those of gloo: RuntimeErrors that contain the path of gloo's source.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def _is_timeout(error: BaseException) -> bool:
    """Check whether an error is the timeout of a collective."""
    return re.search(r"[Tt]imed out|[Tt]imeout", str(error)) is not None


def lost_rank_failure(error: BaseException, hang_timeout: float) -> LostRank:
    """Return the failure of an engine's worker that has lost another rank. Here no parent sees all workers.

    After a timeout it names the ranks that did not join the collective: each rank that waited in it writes a key into
    the group's store; ranks without a key did not join.
    """
    if not _is_timeout(error):
        return LostRank("lost the connection to another rank: see the log of that rank, or its machine, for the reason")
    missing: list[set[int]] = []
    search = threading.Thread(target=lambda: missing.append(_find_missing_ranks()), daemon=True)
    search.start()
    search.join(2 * STORE_SECONDS)
    # If the search does not end, the store does not answer: rank zero, which serves it, is the missing rank.
    ranks, where = sorted(missing[0] if missing else {0}), _waiting_place(environment().rank)
    return LostRank(missing_ranks_message(ranks, hang_timeout, where), timed_out=True)


def _find_missing_ranks() -> set[int]:
    """Return the ranks that write no key into the group's store within STORE_SECONDS."""
    import torch.distributed as dist

    store = group_store()
    if store is None:
        return set()
    missing = set(range(dist.get_world_size())) - {dist.get_rank()}
    until = time.monotonic() + STORE_SECONDS
    try:
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        store.set(f"arrived/{dist.get_rank()}", "")
        while missing and time.monotonic() < until:
            missing -= {rank for rank in missing if store.check([f"arrived/{rank}"])}
            time.sleep(0.1)
    except dist.DistError:  # rank zero serves the store
        return {0}
    return missing


def _waiting_place(rank: int) -> str:
    """Return where this rank has waited for the others, if that is in the user's own code, else "".

    Call it while the timeout of a collective is handled.
    """
    place = user_code_location(traceback.format_exc())
    return place and f"rank {rank} waited at {place}all ranks must get there, and none may hang or be stopped"


def missing_ranks_message(ranks: Sequence[int], timeout: float, where: str = "") -> str:
    """Return a line that names the ranks that hang; `where` is what is known of the place."""
    who = f"rank{'s' * (len(ranks) > 1)} {join_names(ranks, 8)}" if ranks else "a rank"
    cause = where or "it hangs or is stopped, or its network connection is cut"
    return f"{who} did not join the other ranks within {timeout:g} s (hang_timeout): {cause}"


def is_printed_by_another_rank(line: str) -> bool:
    """Check whether rank zero prints the same error line, so that this rank need not. On rank zero return False.

    So an error of all ranks is printed once, and an error of one rank is printed by that rank.
    """
    store = group_store()
    if external_workers() <= 1 or store is None:
        return False
    from torch.distributed import DistError

    this_rank, line = environment().rank, line.partition("\n")[0]
    others = [f"line/{rank}" for rank in range(1, environment().world_size)]
    try:
        store.set_timeout(timedelta(seconds=STORE_SECONDS))
        if this_rank:
            same = store.get("line/0").decode() == line
            store.set(f"line/{this_rank}", "read")
            return same
        store.set("line/0", line)
        store.wait(others)  # rank zero serves the store, so it ends last
    except DistError:
        pass
    return False


def print_refusals_as_lines() -> None:
    """Let a user's own program that a refusal ends print its line alone, once, as the template's programs do.

    So does a rank that only lost another one. Other errors have a traceback, and all with HYDRA_FULL_ERROR=1.
    """
    if sys.excepthook is sys.__excepthook__ and os.environ.get("HYDRA_FULL_ERROR") != "1":
        sys.excepthook = _print_in_one_line


def _print_in_one_line(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if is_lost_rank(error) and not _is_timeout(error):
        error = LostRank(f"rank {environment().rank} lost the connection to another rank, whose error is the reason")
    if not isinstance(error, UserError | WorkerFailed):
        sys.__excepthook__(kind, error, trace)
    elif not (is_raised_by_all_ranks(error) and is_printed_by_another_rank(f"error: {error}")):
        print(f"error: {error}", file=sys.stderr)


# --- the stack of a worker that hangs ---


@contextmanager
def stack_on_demand(rank: int) -> Iterator[None]:
    """On SIGQUIT inside the `with` block, write the stacks of all threads to a file. `end_hanging_worker` reads it.

    In a worker of an engine nobody does.
    """
    scratch = environment().scratch
    with open(Path(scratch, f"stack_{rank}") if scratch else os.devnull, "w") as file:
        faulthandler.register(signal.SIGQUIT, file)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGQUIT)


def end_hanging_worker(process: Any, rank: int, scratch: str, hang_timeout: float, steps: int) -> WorkerFailed:
    """Kill a worker that hangs, after its stack is in its log. Return the failure, which names the place if known.

    `steps` is the number of steps that the workers which waited for it have completed.
    """
    for signum in (signal.SIGQUIT, signal.SIGCONT):  # on SIGQUIT it writes its stack; SIGCONT wakes a stopped worker
        with suppress(ProcessLookupError):
            os.kill(process.pid, signum)
    file, deadline = Path(scratch, f"stack_{rank}"), time.monotonic() + STACK_SECONDS
    stack = ""
    with suppress(OSError):
        while not (stack := file.read_text(errors="replace")) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.2)  # wait until the file is complete
        stack = file.read_text(errors="replace")
        with open(Path(scratch, f"log_{rank}"), "a", encoding="utf-8") as log:
            log.write(f"the worker hung and was killed; its stack:\n{stack}\n")
    children = _children_of(process.pid)
    process.kill()
    for pid in children:  # a loader process that hangs does not end with its worker
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    location = _last_frame(stack)
    if re.search(r'dataloader\.py", line \d+ in (_try_get_data|_shutdown_workers)\b', stack):
        location = "waiting for a loader process, which hangs in the data set, or in fork, as Python before 3.11.10 may"
    where = location and f"it was {location}; its stack is in {short_path(Path(scratch, f'log_{rank}').resolve())}"
    return WorkerFailed(missing_ranks_message([rank], hang_timeout, where), rank, steps)


def _children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children; none where the system has no /proc."""
    children = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            _, parent = file.read_text().rpartition(") ")[2].split()[:2]  # state and parent, behind the name
            children += [int(file.parent.name)] * (int(parent) == pid)
    return children


# --- lines from messages, tracebacks and stacks ---


def _first_line(message: str) -> str:
    """Return the first line of a message.

    If torch has re-raised an error of another process or thread, the message contains a whole traceback. Then return
    the line of the traceback that names the exception.
    """
    if "\nOriginal Traceback (most recent call last):" in message:
        after_last_frame = message.rpartition('\n  File "')[2].splitlines()[1:]
        raised_line = next((line for line in after_last_frame if line and not line.startswith(" ")), message)
        message = re.sub(r"^[\w.]+\.(?=\w+: )", "", raised_line)
    return (message.strip().splitlines() or ["no reason given"])[0]


def place_of(error: BaseException) -> str:
    """Return where an error was raised in the user's own code, if it was there, and where its traceback is."""
    log = log_file()
    traceback_is = f"traceback in {short_path(log)}" if log else "HYDRA_FULL_ERROR=1 shows the traceback"
    return user_code_location("".join(traceback.format_exception(error))) + traceback_is


def user_code_location(trace: str) -> str:
    """Return the last frame of a traceback in the user's own code as `<file>:<line> in <function>; `, or "".

    The last frame of a SyntaxError has no function.
    """
    frames = re.findall(r'^ *(?:\| +)?File "(.+)", line (\d+)(?:, in (.+))?$', trace, re.MULTILINE)
    user_frames = [frame for frame in frames if is_user_code(frame[0])]
    return f"{_format_frame(*user_frames[-1])}; " if user_frames else ""


@contextmanager
def no_silent_end(*more: type[BaseException]) -> Iterator[None]:
    """Inside the `with` block, where user code runs, turn what would end a loop without a word into an error.

    Args:
        more: exceptions beside `ENDS`.

    Raises:
        StepRefused: user code raised one of them.
    """
    kinds: tuple[type[BaseException], ...] = (*ENDS, *more)
    try:
        yield
    except kinds as end:
        raise refused_end(end) from end


def refused_end(end: BaseException) -> StepRefused:
    """Return the error for an exception of user code that is one of `ENDS`, or ends the program."""
    place = user_code_location("".join(traceback.format_exception(end))).removesuffix("; ")
    kind = type(end).__name__
    if isinstance(end, SystemExit):
        what, right = "the program, so samples would be missing", "raise an error instead"
    else:
        what, right = "a loop, so steps or samples would be missing", "catch it; an iterator that ends begins anew by "
        right += "itertools.cycle or another iter(...)"
    return StepRefused(f"{kind} was raised{f' at {place}' if place else ''}, which ends {what}: {right}")


def _last_frame(stack: str) -> str:
    """Return the innermost frame of a stack as `at <file>:<line> in <function>`. Return "" if there is no stack.

    Prefer the innermost frame of the user's own code. Of each thread, leave out launch/parent.py and what called it:
    that is the worker's start, where the user's program appears too.

    Args:
        stack: the text that faulthandler wrote. In it the innermost frame of a thread comes first, and the main thread
            comes last.
    """
    threads = re.split(r"^.*\(most recent call first\):$", stack, flags=re.MULTILINE)[1:]
    stacks = [re.split(r'^ *File ".+/launch/parent.py"', thread, flags=re.MULTILINE)[0] for thread in threads]
    frames = [re.findall(r'^ *File "(.+)", line (\d+) in (.+)$', thread, re.MULTILINE) for thread in stacks]
    user_frames = [frame for thread in frames for frame in thread if is_user_code(frame[0])]
    candidates = user_frames or (frames[-1] if frames else [])
    return f"at {_format_frame(*candidates[0])}" if candidates else ""


@cache
def is_user_code(file: str) -> bool:
    """Check whether a file is neither Lockstep's, nor Python's, nor an installed package's."""
    lockstep, path = Path(__file__).parents[1], Path(file)
    if path.name in PROGRAMS and path.parent.name == "src":  # every error passes through one of them
        return False
    other_code = (str(lockstep), sysconfig.get_path("stdlib"), "<")  # `<string>` is no file
    return not file.startswith(other_code) and not {"site-packages", "dist-packages"} & set(path.parts)


def _format_frame(file: str, line: str, function: str) -> str:
    """Return a frame as text."""
    return f"{short_path(file)}:{line}" + f" in {function}" * bool(function)
