"""Ranks that are threads of this process, for what several ranks compute and exchange: the fixture `ranks`.

Forked ranks with gloo take a second for each test, threads take milliseconds. torch tests its own distributed code with
the process group in `multi_threaded_pg`. That module is private, and it is used in this file only;
tests/step/test_ranks_group.py fails when it changes. No public module of torch has such a group.

What a process has once, all ranks here share: the environment variables, the random numbers of `torch.manual_seed`,
and the value of `lockstep.launch.environment.environment()`, by which this process is no worker. So functions that need
a rank's place take it as an argument (`place_of`), and `one_at_a_time` guards what draws random numbers.
"""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar, cast

from lockstep.launch.environment import Environment, environment

T = TypeVar("T")
SECONDS = 30.0  # after which ranks count as ranks that hang; a test needs a twentieth of a second
BACKEND = "ranks_as_threads"
COLLECTIVES = ("allreduce", "allgather", "broadcast", "gather", "scatter", "reduce_scatter", "alltoall", "barrier")


class Turn:
    """A lock for what draws from the process's random numbers. A rank that waits in a collective gives it up.

    Then other ranks draw, and the rank goes on with the random state that it had.
    """

    def __init__(self) -> None:
        self._lock, self._mine = threading.Lock(), threading.local()

    def __enter__(self) -> None:
        depth = getattr(self._mine, "depth", 0)
        if not depth:
            self._lock.acquire()
        self._mine.depth = depth + 1

    def __exit__(self, *_: object) -> None:
        self._mine.depth -= 1
        if not self._mine.depth:
            self._lock.release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Return a context in which another rank may have it."""
        if not getattr(self._mine, "depth", 0):
            yield
            return
        import torch

        state = torch.get_rng_state()
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()
            torch.set_rng_state(state)


one_at_a_time = Turn()


class RanksHang(AssertionError):
    """Some ranks wait for others in vain."""


class Calls:
    """The collectives that the ranks of one world have started.

    Attributes:
        default: the name of the group of all ranks.
        numbers: how many each rank has started, by group and rank in it.
        kinds: the first rank that has started each of them and what it is, by group and number.
        ended: the ranks that have ended.
    """

    def __init__(self) -> None:
        self.default = ""
        self.lock = threading.Lock()
        self.numbers: dict[tuple[str, int], int] = {}
        self.kinds: dict[tuple[str, int], tuple[int, Any]] = {}
        self.ended: set[int] = set()

    def start(self, group: Any, kind: Any) -> None:
        """Count a collective of this thread's rank.

        Raises:
            RanksHang: another rank has started another one in its place, or has ended without one.
        """
        rank, name = group.rank(), group.pg_name
        with self.lock:
            number = self.numbers[name, rank] = self.numbers.get((name, rank), 0) + 1
            first, first_kind = self.kinds.setdefault((name, number), (rank, kind))
            if first_kind != kind:
                raise RanksHang(f"collective {number}: rank {first} calls {first_kind}, and rank {rank} {kind}")
        self.check()

    def check(self) -> None:
        """Check that no rank waits for one that has ended.

        Raises:
            RanksHang: one does.
        """
        with self.lock:
            ended = {rank: self.numbers.get((self.default, rank), 0) for rank in self.ended}
            for (name, rank), number in self.numbers.items():
                late = [each for each, count in ended.items() if count < number]
                if name == self.default and late and rank not in ended:
                    kind = self.kinds[name, number][1]
                    raise RanksHang(f"rank {late[0]} has ended, and rank {rank} waits for it in {kind}")


def _install() -> Any:
    """Register the backend of ranks in threads, once. Return torch's private module."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import multi_threaded_pg

    if hasattr(dist.Backend, BACKEND.upper()):
        return multi_threaded_pg

    class ThreadGroup(multi_threaded_pg.ProcessLocalGroup):
        """torch's group of threads, which also compares what the ranks call."""

        calls: Calls | None = None

        def _get_sequence_number_for_group(self) -> int:
            assert self.calls is not None
            return self.calls.numbers.get((self.pg_name, self.rank()), 0)

    def checked(name: str) -> Any:
        call = getattr(multi_threaded_pg.ProcessLocalGroup, name)

        @wraps(call)
        def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [*args, *kwargs.values()]
            # what must be the same on all ranks: the sizes and dtypes of the sent tensors, or of the scattered parts
            sent: Any = ()
            if name in ("allreduce", "broadcast", "reduce_scatter"):
                sent = tensors[0]
            elif name == "allgather":
                sent = tensors[1]
            self.calls.start(self, (name, *((tuple(each.shape), each.dtype) for each in sent)))
            with one_at_a_time.lent():
                return call(self, *args, **kwargs)

        return collective

    for name in COLLECTIVES:
        if name != "barrier":  # it is an allreduce
            setattr(ThreadGroup, name, checked(name))

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        group = ThreadGroup(rank, size)
        group.calls = Ranks.calls
        barrier: Any = multi_threaded_pg._store_based_barrier
        barrier(rank, store, "", size, timeout)
        return group

    dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    return multi_threaded_pg


class Ranks:
    """Runs functions on ranks that are threads: `ranks(4, function)` returns `[function(0), ..., function(3)]`."""

    calls: Calls | None = None  # of the world that runs now

    def __call__(
        self,
        world: int,
        function: Callable[[int], T],
        errors: type[Exception] | tuple[type[Exception], ...] = (),
        seconds: float = SECONDS,
    ) -> list[Any]:
        """Call a function on each rank of a new process group. Return the results in rank order.

        Args:
            world: number of ranks.
            function: takes the rank. In it, torch.distributed has a default group of all ranks.
            errors: types of errors that are results of the ranks that raise them.
            seconds: the ranks must end in this time.

        Raises:
            RanksHang: they have not, or a rank waits for one that has ended or that calls something else.
            Exception: the first error that a rank has raised, with a note that names the rank.
        """
        import torch.distributed as dist
        from torch.distributed import HashStore

        private, store, results = _install(), HashStore(), [None] * world
        failures: list[tuple[int, BaseException]] = []
        stopped: list[str] = []
        environment()  # now, because it would be that of a rank if a rank were the first to ask
        Ranks.calls = calls = Calls()

        def fail(rank: int, error: BaseException) -> None:
            if isinstance(error, SystemExit):  # that is how the other ranks end
                stopped.append(f"rank {rank} was stopped in {traceback.extract_tb(error.__traceback__)[-3:]}")
            else:
                failures.append((rank, error))
            if Ranks.calls is calls:  # a thread that outlives its world must not stop the ranks of the next one
                private.ProcessLocalGroup.exception_handle(error)

        def run(rank: int) -> None:
            try:
                dist.init_process_group(BACKEND, rank=rank, world_size=world, store=store)
                group: Any = dist.group.WORLD
                calls.default = group.pg_name
                try:
                    results[rank] = function(rank)  # type: ignore[call-overload]
                except errors as error:
                    results[rank] = error  # type: ignore[call-overload]
                calls.ended.add(rank)
                calls.check()
            except BaseException as error:
                fail(rank, error)
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

        threads = [
            threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)
        ]
        with _world_of_threads(private), _environment_that_stays():
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + seconds
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            places = [f"{each.name} in {_place(each)}" for each in threads if each.is_alive()]
            if places:
                fail(-1, RanksHang(f"after {seconds:g} s: {', '.join(places + stopped)}"))
                for thread in threads:
                    thread.join(5)
            Ranks.calls = None
            private.ProcessLocalGroup.reset()
        if failures:
            rank, error = failures[0]
            if rank >= 0:
                error.add_note(f"on rank {rank} of {world}")
            raise error
        return results


@contextmanager
def _environment_that_stays() -> Iterator[None]:
    """Return a context in which the C library's environment stays as it is; what is set follows at its end.

    A thread that sets a new variable moves the list of all in memory, and one that reads it there dies: torch reads
    variables in each start of a group. Lightning sets OMP_NUM_THREADS in the first fit on several ranks.
    """
    changes: list[Callable[[], None]] = []
    put, unset = os.putenv, os.unsetenv
    os.putenv = lambda *variable: changes.append(partial(put, *variable))
    os.unsetenv = lambda name: changes.append(partial(unset, name))
    try:
        yield
    finally:
        os.putenv, os.unsetenv = put, unset
        for change in changes:
            change()


@contextmanager
def _world_of_threads(private: Any) -> Iterator[None]:
    """Return a context in which each thread has a default group of its own, that of the thread which has started it."""
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    world, lightnings = private.ThreadLocalWorld._world, cast(Any, rank_zero_only)
    start, before = threading.Thread.start, getattr(lightnings, "rank", None)

    def start_with_world(thread: threading.Thread) -> None:
        run, mine = thread.run, getattr(world, "world", None)

        def run_with_world() -> None:
            if mine is not None:
                world.world = mine
            run()

        thread.run = run_with_world  # type: ignore[method-assign]
        start(thread)

    bindings: Any = torch._C._distributed_c10d
    isolate = bindings._set_thread_isolation_mode
    isolate(True)
    private._install_threaded_pg()
    threading.Thread.start = start_with_world  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        private._uninstall_threaded_pg()
        isolate(False)
        lightnings.rank = before


def _place(thread: threading.Thread) -> str:
    """Return the innermost lines that a thread runs: of all files, and of those that are no library's."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame) if frame else []
    ours = [each for each in stack if "/lib/python" not in each.filename and "thread_ranks" not in each.filename]
    return ", called by ".join(f"{each.name} ({each.filename}:{each.lineno})" for each in (*stack[-1:], *ours[-1:]))


def place_of(rank: int, world: int, machines: int = 1, **changes: Any) -> Environment:
    """Return the place of a rank in a run that an engine has started on some machines with equally many ranks."""
    local = world // machines
    place = replace(
        environment(),
        launcher="env",
        rank=rank,
        local_rank=rank % local,
        world_size=world,
        local_world_size=local,
    )
    return replace(place, **changes)
