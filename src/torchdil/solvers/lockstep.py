"""Many runs of code that asks for one point at a time, answered by a function that takes a whole batch.

Each run has a thread, which sleeps from a request to its answer. Once every run waits, the calling thread answers all of them
together. So foreign code runs in the threads and torch only in the caller, whose modes (grad, autocast, torch.func) no other
thread shares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

# From requests, by row, to answers. Some may be left for later, but not all.
Answer = Callable[[dict[int, Any]], dict[int, Any]]


class Stopped(BaseException):
    """Ends a run from inside its request; not an Exception, which foreign code may catch."""


class Run(Protocol):
    """Something to run. Foreign errors must not leave it, unless they are the caller's: bad options, say."""

    row: int

    def __call__(self, ask: Callable[[Any], Any]) -> None:
        """Run to the end; `ask(request)` blocks until the answer is there, and may raise `Stopped`."""
        ...


def run_in_turn(runs: Sequence[Run], answer: Answer) -> None:
    """One run after the other, in the calling thread."""
    for run in runs:
        failures: list[BaseException] = []

        def ask(request: Any, row: int = run.row, failures: list[BaseException] = failures) -> Any:
            if not failures:
                try:
                    return answer({row: request})[row]
                except BaseException as failure:
                    failures.append(failure)  # raised below, since foreign code may not let it through as it is
            raise Stopped

        with suppress(Stopped):
            run(ask)
        if failures:
            raise failures[0]


def run_together(runs: Sequence[Run], answer: Answer, threads: int) -> None:
    """All runs in lock-step, at most `threads` at a time. What `answer` or a run raises ends all of them."""
    inbox: SimpleQueue[tuple[_Worker, Any]] = SimpleQueue()
    waiting, live = deque(runs), 0
    workers: list[_Worker] = []
    requests: dict[int, tuple[_Worker, Any]] = {}
    try:
        while waiting or live:
            while waiting and live < threads:
                workers.append(_Worker(waiting.popleft(), inbox))
                workers[-1].start()
                live += 1
            while len(requests) < live:
                worker, request = inbox.get()
                if request is _ENDED:
                    live -= 1
                    if worker.failure is not None:
                        raise worker.failure
                else:
                    requests[worker.task.row] = (worker, request)
            if not requests or (waiting and live < threads):
                continue
            for row, reply in answer({row: request for row, (_, request) in requests.items()}).items():
                requests.pop(row)[0].replies.put(reply)
    finally:
        for worker in workers:
            worker.close()
        for worker in workers:
            worker.join()


_ENDED, _CLOSED = object(), object()


class _Worker(Thread):
    """The thread of one run."""

    def __init__(self, run: Run, inbox: SimpleQueue[tuple[_Worker, Any]]):
        super().__init__(daemon=True)
        self.task = run
        self.replies: SimpleQueue[Any] = SimpleQueue()
        self._inbox, self._closed = inbox, False
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.task(self._ask)
        except Stopped:
            pass
        except BaseException as failure:
            self.failure = failure
        finally:
            self._inbox.put((self, _ENDED))

    def close(self) -> None:
        """Let no further request through, and stop the one that waits."""
        self._closed = True
        self.replies.put(_CLOSED)

    def _ask(self, request: Any) -> Any:
        if not self._closed:
            self._inbox.put((self, request))
            reply = self.replies.get()
            if reply is not _CLOSED:
                return reply
        raise Stopped
