"""A thread for user code that may compute in parallel, in a parent process that forks later.

The worker threads of an OpenMP runtime belong to the thread that started them, and end with it. A forked process has
only the thread that forked. If that thread has computed in parallel, the fork waits for worker threads that it does not
have. So the parent calls user code in a separate thread, and forks from its main thread, which has computed nothing.
This works for torch, numpy and scikit-learn, and for any number of threads that user code sets.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def in_new_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls `function` in a new thread and waits for its end.

    It raises what `function` raises. A signal interrupts the wait.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        outcome: Future[T] = Future()

        def work() -> None:
            try:
                outcome.set_result(function(*args, **kwargs))
            except BaseException as error:  # also SystemExit, which would end the thread without a message
                outcome.set_exception(error)

        thread = threading.Thread(target=work, name=function.__name__, daemon=True)
        thread.start()
        thread.join()
        return outcome.result()

    return call
