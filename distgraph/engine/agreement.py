"""Agreement of the processes of an MPI job: what a call of the engine is given, and whether it failed.

*In:* facts about a call, such as the number of samples, on every process. *Out:* nothing, or an error.
*Invariant:* either every process raises an error or none does, so that they stay in the same calls.

Processes that train with another seed, learning rate or number of samples would go on, each with numbers of
its own, or wait for each other forever. Comparing costs one small message a call, none a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from distgraph.engine.compile.fingerprint import fingerprint
from distgraph.engine.executable import Compiled
from distgraph.errors import DistGraphError, RuntimeFault
from distgraph.runtime.execute.process_group import World, enter, job_transport

if TYPE_CHECKING:
    from distgraph.engine.engine import Engine

Result = TypeVar("Result")


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
    compare(call, {**facts, **state})


def agree_on_program(compiled: Compiled, seed: int, scalars: Mapping[str, Any]) -> None:
    """Compare the program that the processes are about to run for the first time. Collective.

    Raises:
        RuntimeFault: on every process, where it, the seed or the scalars of the step differ.
    """
    if job_transport() is None:
        return
    numbers = {name: number for name, number in scalars.items() if name != "key"}
    program = fingerprint(compiled.build.completed)[:16]
    ops = f"{len(compiled.build.completed.ops)} ops with fingerprint {program}"
    facts = {"batch size": compiled.request.size, "program": ops, "seed": seed, **numbers}
    compare(f"the first run of the program to {compiled.mode}", facts)


def compare(call: str, facts: Mapping[str, object]) -> None:
    """Compare the texts of facts of all processes. Collective; alone, a process agrees with itself.

    Raises:
        RuntimeFault: on every process, where they differ.
    """
    transport = job_transport()
    if transport is None:
        return
    own = {name: str(fact) for name, fact in facts.items()}
    everyone = transport.broadcast_object(transport.gather_objects(own, 0), 0)
    for name in own:
        for rank, other in enumerate(everyone):
            if other.get(name) != everyone[0].get(name):
                raise RuntimeFault(
                    f"{call}: {name.replace('_', ' ')} is {everyone[0].get(name)} on rank 0 but "
                    f"{other.get(name)} on rank {rank}; give every rank the same"
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
