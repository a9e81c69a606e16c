"""The runtime model: how a runtime executes a program, as far as time and memory depend on it.

The resource file describes hardware. A runtime model describes the software that runs on it: distgraph
itself, PyTorch, Megatron-LM, DeepSpeed or XLA. The forecast reads both. A number that a model does not state
is None and comes from the resource file, where a machine was measured with the runtime of distgraph.

A file of a runtime model is a `RuntimeModel` in YAML. Its `sources` say for every other field where the value
comes from; see docs/planning/runtimes.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from distgraph.errors import ResourceError
from distgraph.plan.capabilities import ANY, Capabilities
from distgraph.resources.cluster import Cluster, Device, Fraction
from distgraph.resources.host_times import HostTimes
from distgraph.resources.units import Seconds, Size, format_bytes
from distgraph.serialization.fields import AfterValidator, Limits, documented

Kinds = Literal["published", "implementation", "measured", "fitted", "guess"]
Share = Annotated[float, Limits(ge=0, le=10, strict=True)]
Count = Annotated[int, Limits(ge=0, le=1000, strict=True)]
Purpose = Literal["activations", "gradients", "parameters"]
"""What a collective is for: values of a micro-batch, the reduction of gradients, or whole parameters."""
Text = Annotated[str, Limits(min_length=1, max_length=400)]


@documented("held_out")
@dataclass(frozen=True, slots=True)
class Source:
    """Where a value comes from.

    Attributes:
        kind: published (a paper or a manual), implementation (the code of the runtime does so), measured,
            fitted (to measured runs), or guess.
        about: the publication, the measurement, the benchmark that fitted it, or the reason.
        held_out: of a fitted number, the runs that were kept out of the fit, and the error on them.
    """

    kind: Kinds
    about: Text
    held_out: Text | None = None


@documented(complete=False)
@dataclass(frozen=True, slots=True)
class Overlap:
    """Collectives that run while the device computes. The program waits for the others where they start.

    Attributes:
        activations, gradients, parameters: kinds of collectives by what they are for; "all" for every kind.
        startups: whether a collective starts while earlier ones of its group are under way, so that only
            their transfers follow one another; else it starts when these have ended.
    """

    activations: tuple[str, ...] | Literal["all"] = ()
    gradients: tuple[str, ...] | Literal["all"] = ()
    parameters: tuple[str, ...] | Literal["all"] = ()
    startups: bool = False

    def hides(self, purpose: Purpose, kind: str) -> bool:
        """Whether a collective of this kind for this purpose runs while the device computes."""
        kinds: tuple[str, ...] | str = getattr(self, purpose)
        return kinds == "all" or kind in kinds


@documented(complete=False)
@dataclass(frozen=True, slots=True)
class Messages:
    """Messages between stages.

    Attributes:
        start: seconds to start one; None for `launch` of the resource file.
        blocking: whether both ends wait, and compute nothing, while a message is transferred.
    """

    start: Seconds | None = None
    blocking: bool = False


@documented(complete=False)
@dataclass(frozen=True, slots=True)
class Gradients:
    """Reductions of gradients.

    Attributes:
        reduce: "backward" if the backward task of the last micro-batch of a stage reduces them, before the
            stages in front of it can go on; "end" if every rank does so after its last micro-batch.
        each_micro_batch: whether gradients that are scattered, so that every rank keeps a part (ZeRO), are
            reduced after every micro-batch; else after the last.
        scatter: "ring" for a reduce_scatter of the collective library; "chain" for one reduction to each rank
            after the other, which sends all bytes over every link of a chain of the n ranks: n / (n - 1) as
            many.
    """

    reduce: Literal["backward", "end"] = "backward"
    each_micro_batch: bool = False
    scatter: Literal["ring", "chain"] = "ring"


@documented(complete=False)
@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of which every rank stores a part (ZeRO-3).

    Attributes:
        gather: "step" if whole parameters are gathered once per step and kept; "use" if that is done before
            each forward and each backward task.
    """

    gather: Literal["step", "use"] = "step"


@documented(complete=False)
@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels that are not those of the program's ops.

    Attributes:
        update_bytes: bytes that one kernel moves per parameter to update all parameters of a rank; None if
            the update runs op by op.
        scaled_loss: whether the loss is divided by the number of micro-batches, and no gradient is.
        softmax_matrices: number of matrices that a softmax takes at a time. If a rank has another number than
            a multiple, softmax and its gradient go op by op.
        softmax_passes, softmax_ops: what that costs: passes over the matrices in f32, each read and written,
            and further small ops in the forward direction.
    """

    update_bytes: Annotated[float, Limits(gt=0, le=1e6, strict=True)] | None = None
    scaled_loss: bool = False
    softmax_matrices: Count = 1
    softmax_passes: Count = 0
    softmax_ops: Count = 0


@documented(complete=False)
@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a program under a runtime.

    Attributes:
        planner: "buffers" for the buffers that distgraph plans and keeps for the whole step; "liveness" for
            an allocator under which a value takes memory from the op that computes it to its last reader.
        fused: under "liveness", whether values between elementwise ops of a task are never in memory.
        recomputed: under "liveness", kinds of ops on inputs whose results are not kept for the backward part
            but recomputed.
        usable: share of the memory of a device that it lets a program use.
        context: bytes of a device that it takes for itself, outside of what a program may use.
        workspace: bytes of buffers of its libraries, allocated once.
        kernels: whether the kernels of distgraph for NumPy run, whose workspace is known.
        fragmentation: bytes lost between tensors, relative to activations and temporary values.
    """

    planner: Literal["buffers", "liveness"] = "buffers"
    fused: bool = False
    recomputed: tuple[str, ...] = ()
    usable: Fraction = 1.0
    context: Size = 0.0
    workspace: Size = 0.0
    kernels: bool = False
    fragmentation: Share = 0.0

    def available(self, memory: float) -> float:
        """Bytes of the memory of a device that a program may use."""
        return memory * self.usable - self.context


def _without_message(host: HostTimes) -> HostTimes:
    for name in ("message", "network_busy"):
        if getattr(host, name) is not None:
            raise ValueError(
                f"no {name}: who moves messages is a matter of the hardware (compute.host.{name})"
            )
    return host


@documented(complete=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeModel:
    """How a runtime executes a program.

    Attributes:
        name, about: of the runtime.
        executes: what it executes of a plan; a search for it offers nothing else.
        overlap: collectives that run while the device computes.
        messages: between stages.
        gradients: reductions of gradients.
        parameters: that are stored in parts.
        kernels: that differ from the ops of the program.
        host: times of the host that replace those of the resource file (`compute.host`): all but `message`
            and `network_busy`, which are a matter of the hardware.
        memory: bytes of a program, and what a device has for it.
        sources: path of a field, such as "memory.context" -> where its value comes from.
    """

    name: Text
    about: Text
    executes: Capabilities = ANY
    overlap: Overlap = Overlap()
    messages: Messages = Messages()
    gradients: Gradients = Gradients()
    parameters: Parameters = Parameters()
    kernels: Kernels = Kernels()
    host: Annotated[HostTimes, AfterValidator(_without_message)] = field(default_factory=HostTimes)
    memory: Memory = Memory()
    sources: Mapping[str, Source] = field(default_factory=dict, hash=False)

    def applied(self, cluster: Cluster) -> tuple[Cluster, RuntimeModel]:
        """The cluster as programs find it under this runtime, and the rest of the model.

        Devices have the memory that the runtime leaves to programs, and its host times. So code that knows
        only the cluster, such as a search, keeps to them.

        Raises:
            ResourceError: a device has no memory left for programs.
        """
        devices = tuple(map(self._device, cluster.devices))
        memory = replace(self.memory, usable=1.0, context=0.0)
        return replace(cluster, devices=devices), replace(self, memory=memory)

    def _device(self, device: Device) -> Device:
        compute = replace(device.compute, host=device.compute.host.replaced_by(self.host))
        memory = self.memory.available(device.memory)
        if memory <= 0:
            raise ResourceError(
                f"device {device.index} has {format_bytes(device.memory)} but runtime {self.name} lets "
                f"programs use {self.memory.usable:.0%} less {format_bytes(self.memory.context)}; take a "
                f"larger device, or another runtime"
            )
        return replace(device, memory=memory, compute=compute)
