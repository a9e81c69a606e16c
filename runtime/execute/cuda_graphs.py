"""CUDA graphs: a part of a task is captured once for each micro-batch, and then started by one call.

The first run of a part is an ordinary one, in which kernels are compiled. In the second it is captured: what
it does is recorded with its addresses and arguments, and then launched. From then on it is launched. Which
parts there are is decided when the tasks are generated (`captured_parts.py`).

Capture takes place on a stream of its own, which the default stream of CUDA does not wait for: while a stream
that it waits for is captured, a use of the default stream by any thread is an error. Graphs are launched on
the stream of the rank. Temporary arrays of a part come from a memory pool that only graphs use and that lives
as long as they do, because a graph writes to their addresses whenever it is launched. Graphs of one rank
share this memory: they are launched on one stream, so no two of them run at the same time.

Invariant: nothing runs while a part is captured. So a part that cannot be captured has had no effect, and its
ordinary run gives the right numbers.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from contextlib import suppress
from operator import is_
from typing import Any

from distgraph.runtime.program.captured_parts import Body
from distgraph.runtime.program.task_compiler import op_of
from distgraph.runtime.transport.transport import Array

_REFUSALS = (RuntimeError, MemoryError)
"""What CuPy raises in a capture; CUDARuntimeError, NotImplementedError and OutOfMemoryError are of these."""


class CudaGraphs:
    """The CUDA graphs of one rank; see `distgraph.runtime.program.captured_parts.Captures`.

    Args:
        cuda: the module `cupy.cuda`. The device of the rank is the current one.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._stream = self._cuda.Stream(non_blocking=True)
        self._pool = self._cuda.MemoryPool()
        self._warned: set[str] = set()

    def part(self, task: str, inputs: Callable[[int], list[Array]]) -> CapturedPart:
        """See `Captures`."""
        return CapturedPart(self, task, inputs)

    def capture(self, work: Callable[[], None]) -> Any:
        """The graph of some work of the current stream, which does not run.

        Raises:
            RuntimeError, MemoryError: the work cannot be captured.
        """
        with self._cuda.using_allocator(self._pool.malloc), self._stream as stream:
            stream.begin_capture()
            try:
                work()
            except BaseException:
                with suppress(*_REFUSALS):  # a call that is not permitted has made the capture invalid
                    stream.end_capture()
                raise
            return stream.end_capture()

    def refuse(self, task: str, error: Exception) -> None:
        """Warn that a part of a task is not captured, once for each op that is the cause."""
        what = f"task {task}"
        if op := op_of(error)[1]:
            what += f", {op}"
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(
                f"{what}: cannot be captured in a CUDA graph ({type(error).__name__}: {error}); this part of "
                "the task is launched op by op",
                RuntimeWarning,
                stacklevel=2,
            )


class CapturedPart:
    """One part of a task, with a graph for each micro-batch.

    Args:
        graphs: of the rank.
        task: name of the task.
        inputs: micro-batch -> the arrays of the step that the part reads. A graph has their addresses, so it
            is captured again should they be others.
    """

    def __init__(self, graphs: CudaGraphs, task: str, inputs: Callable[[int], list[Array]]) -> None:
        self._graphs, self._task, self._inputs = graphs, task, inputs
        self._ran: set[int] = set()  # micro-batches
        self._captured: dict[int, tuple[Any, list[Array]]] = {}  # micro-batch -> graph, arrays that it reads
        self._refused = False

    def __call__(self, body: Body, m: int) -> None:
        """Run the part for one micro-batch."""
        inputs = self._inputs(m)
        graph, addressed = self._captured.get(m, (None, []))
        if graph is not None and all(map(is_, addressed, inputs)):
            graph.launch()
        elif self._refused or m not in self._ran:
            self._ran.add(m)
            body(m)
        else:
            self._capture(body, m, inputs)

    def _capture(self, body: Body, m: int, inputs: list[Array]) -> None:
        try:
            graph = self._graphs.capture(functools.partial(body, m))
        except _REFUSALS as error:
            self._refused = True
            self._captured.clear()
            self._graphs.refuse(self._task, error)
            body(m)
            return
        self._captured[m] = graph, inputs
        graph.launch()
