"""Calls user code that may compute in parallel, in a parent process that is going to fork.

The threads that an OpenMP runtime computes with belong to the thread that has started them, and end with it. A fork has
only the thread that forked: where this one has computed in parallel, the fork waits for threads that it does not have.
So the parent calls user code in a thread of its own, and forks from its main thread, which has computed nothing. This
holds for torch, numpy and scikit-learn, and for any number of threads that user code asks for.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_new_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function`, called in a thread that has ended when the call returns. What it raises is raised here, too;
    a signal interrupts the wait."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        outcome: Future[T] = Future()

        def work() -> None:
            try:
                outcome.set_result(function(*args, **kwargs))
            except BaseException as error:  # SystemExit, too: a thread would end by it in silence
                outcome.set_exception(error)

        thread = threading.Thread(target=work, name=function.__name__, daemon=True)
        thread.start()
        thread.join()
        return outcome.result()

    return call
