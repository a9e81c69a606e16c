"""Agreement of the processes of an MPI job: what a call of the engine is given, and whether it failed.

*In:* facts about a call, such as the number of samples, or arrays that are the same for all, such as initial
values of parameters. *Out:* nothing, or an error.
*Invariant:* either every process raises an error or none does, so that they stay in the same calls.

Processes that train with another seed, learning rate or number of samples would go on, each with numbers of
its own, or wait for each other forever. Comparing costs one small message a call, none a step; arrays are
compared by their checksums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from xxhash import xxh3_64, xxh3_64_hexdigest

from distgraph.engine.compile.fingerprint import fingerprint
from distgraph.engine.data import Batch, MapSource
from distgraph.engine.executable import Compiled, Feed
from distgraph.errors import DistGraphError, RuntimeFault
from distgraph.runtime.execute.process_group import World, enter, job_transport

if TYPE_CHECKING:
    from distgraph.engine.engine import Engine

Result = TypeVar("Result")
BlockKey = tuple[str, int, int, tuple[tuple[int, int], ...]]
"""Field, first sample and end of the samples in the batch, bounds of the other dims."""
_MOST_SHOWN = 4


def agree(call: str, engine: Engine, **facts: object) -> None:
    """Enter a call that every process makes, and compare what they give to it. Collective.

    Args:
        call: its name, such as "engine.fit()".
        engine: that is called; its seed and place in training are compared too.
        facts: name -> argument, whose text is compared.

    Raises:
        RuntimeFault: on every process, where they differ.
    """
    enter(call)
    if job_transport() is None:
        return
    state: dict[str, object] = {
        "seed": engine.seed,
        "step": engine.step,
        "epoch": engine.epoch,
        "sample": engine.position,
    }
    compare(call, {name.replace("_", " "): fact for name, fact in facts.items()} | state)


def agree_on_program(
    compiled: Compiled, seed: int, scalars: Mapping[str, Any], given: Mapping[str, np.ndarray]
) -> None:
    """Compare the program that the processes are about to run for the first time. Collective.

    Args:
        compiled: the program.
        seed: of the engine.
        scalars: of the step, such as the learning rate.
        given: name -> whole array from which a parameter or buffer starts.

    Raises:
        RuntimeFault: on every process, where any of these differ.
    """
    if job_transport() is None:
        return
    numbers = {name: number for name, number in scalars.items() if name != "key"}
    program = fingerprint(compiled.build.completed)[:16]
    ops = f"{len(compiled.build.completed.ops)} ops with fingerprint {program}"
    facts = {"batch size": compiled.request.size, "program": ops, "seed": seed, **numbers}
    call = f"the first run of the program to {compiled.mode}"
    compare(call, facts)
    agree_on_arrays(call, "initial values", given)


def different_batches(compiled: Compiled, batch: Batch, world: World) -> str:
    """Text of a part of a batch that several processes read with different values; "" if there is none.
    Collective. One process reads each sample once, whatever the number of its ranks, and compares nothing.

    Args:
        compiled: a program that is prepared.
        batch: its input.
        world: all ranks.
    """
    if len(world.local) == world.size:
        return ""

    def work(rank: int) -> dict[BlockKey, str]:
        return {
            key: _checksum(block)
            for feed, _ in compiled.feeds.get(rank, ())
            for key, block in zip(_keys(feed), feed.load(batch), strict=True)
        }

    readers: dict[BlockKey, dict[int, str]] = {}
    for rank, sums in sorted(world.gather(run_together(world, work)).items()):
        for key, checksum in sums.items():
            readers.setdefault(key, {})[rank] = checksum
    for (field, start, stop, _), sums in readers.items():
        first, *_ = sums
        others = [rank for rank in sums if sums[rank] != sums[first]]
        if others:
            return (
                f"ranks {_shown([*sums])} read samples {start} to {stop - 1} of the batch, but field {field} "
                f"has other values on rank{'s' if others[1:] else ''} {_shown(others)} than on rank {first}; "
                f"{_way_to_equal_samples(batch)}"
            )
    return ""


def _keys(feed: Feed) -> list[BlockKey]:
    """What identifies each block of an input, whichever rank reads it."""
    rest = tuple((part.start, part.stop) for part in feed.rest)
    return [(feed.field, start, stop, rest) for start, stop in feed.rows]


def _shown(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:_MOST_SHOWN])) + ", ..." * (len(numbers) > _MOST_SHOWN)


def _way_to_equal_samples(batch: Batch) -> str:
    if not isinstance(batch.source, MapSource):
        return "give every rank the same arrays"
    return (
        f"let __getitem__ of {type(batch.source.dataset).__name__} depend on the index and the epoch alone, "
        "such as by np.random.default_rng((seed, epoch, index)), and read the same files on every rank"
    )


def agree_on_call(call: str, what: str, arrays: Mapping[str, Any]) -> None:
    """Enter a call that every process makes, and compare the arrays that they give. See `agree_on_arrays`."""
    enter(call)
    agree_on_arrays(call, what, arrays)


def agree_on_arrays(call: str, what: str, arrays: Mapping[str, Any]) -> None:
    """Compare the numbers of arrays of all processes. Collective.

    Args:
        call: its name.
        what: text of what the arrays are, such as "initial values".
        arrays: name -> array, which is the same for all; what is no array of numbers is not compared.

    Raises:
        RuntimeFault: on every process: names the first array that differs, or that not all have.
    """
    if job_transport() is None:
        return
    sums = {f"checksum of the {what} of {name}": _checksum(array) for name, array in arrays.items()}
    if len(set(_shared(xxh3_64_hexdigest(repr(sorted(sums.items())).encode())))) > 1:
        compare(call, sums)


def _checksum(given: Any) -> str:
    """XXH3 of the type, shape and numbers of an array, whatever its layout in memory. A contiguous array is
    read where it is."""
    try:
        array = np.ascontiguousarray(given)
    except ValueError:  # rows of several lengths, which are refused later
        return "absent"
    if array.dtype == object:
        return "absent"
    digest = xxh3_64(f"{array.dtype}{array.shape}".encode())
    if array.nbytes:
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _shared(fact: Any) -> list[Any]:
    """The facts of all processes, in the order of their ranks. Collective."""
    transport = job_transport()
    assert transport is not None
    everyone: list[Any] = transport.broadcast_object(transport.gather_objects(fact, 0), 0)
    return everyone


def compare(call: str, facts: Mapping[str, object]) -> None:
    """Compare the texts of facts of all processes. Collective; alone, a process agrees with itself.

    Raises:
        RuntimeFault: on every process, where they differ.
    """
    if job_transport() is None:
        return
    everyone = _shared({name: str(fact) for name, fact in facts.items()})
    for name in dict.fromkeys(name for each in everyone for name in each):
        first = everyone[0].get(name, "absent")
        for rank, other in enumerate(everyone):
            if other.get(name, "absent") != first:
                raise RuntimeFault(
                    f"{call}: {name} is {first} on rank 0 but {other.get(name, 'absent')} on rank {rank}; "
                    "give every rank the same"
                )


def run_together(world: World, work: Callable[[int], Result]) -> dict[int, Result]:
    """`World.run` of work that may fail on some ranks only, such as compiling their programs. Collective.

    Raises:
        DistGraphError: on every process, where it failed on one; where it did not, a RuntimeFault.
    """
    failure: DistGraphError | None = None
    results: dict[int, Result] = {}
    try:
        results = world.run(work)
    except DistGraphError as error:
        failure = error
    if len(world.local) < world.size:
        texts = world.gather({rank: "" if failure is None else str(failure) for rank in world.local})
        failed = next((rank for rank, text in sorted(texts.items()) if text), None)
        if failure is None and failed is not None:
            raise RuntimeFault(f"rank {failed} failed: {texts[failed]}")
    if failure is not None:
        raise failure
    return results
