"""DistributedModule: a model of torch that runs as a plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from distgraph.errors import RuntimeFault, ShardingError
from distgraph.plan.apply.dtensor_module import DTensorModule
from distgraph.plan.apply.pipeline_stages import FlatModule, TiedGradients, pipeline_schedule
from distgraph.plan.apply.stage_layouts import StageLayout

if TYPE_CHECKING:
    from distgraph.plan.plan import Plan


class Pipeline:
    """The stage of this rank in a pipeline, and its schedule.

    Args:
        schedule: name of the class in torch.distributed.pipelining.
        part: module of the stage.
        number: of the stage.
        ranks: [stages, ranks of a stage] in the process group.
        device: of this rank.
        plan: whose micro-batches it runs.
        flat: rebuilds the result of the model from that of the last stage.
        gradients: of parameters that several stages hold.
    """

    def __init__(
        self,
        schedule: str,
        part: torch.nn.Module,
        number: int,
        ranks: Sequence[Sequence[int]],
        device: torch.device,
        plan: Plan,
        flat: FlatModule,
        gradients: TiedGradients,
    ) -> None:
        self.number, self.last, self.width = number, len(ranks) - 1, len(ranks[number])
        self.gradients, self._flat = gradients, flat
        self._loss: Callable[..., Any] | None = None
        self._schedule = pipeline_schedule(
            schedule, part, number, ranks, device, plan.micro_batches, self._loss_of
        )

    def step(
        self, inputs: Sequence[torch.Tensor], target: torch.Tensor, loss: Callable[..., Any]
    ) -> torch.Tensor:
        """Gradients of a step from the rows of this rank; returns its part of the mean loss."""
        self._loss = loss
        gradients: list[torch.Tensor] = []
        if self.number == 0:
            self._schedule.step(*inputs)
        elif self.number == self.last:
            self._schedule.step(target=target, losses=gradients)
        else:
            self._schedule.step()
        return torch.stack(gradients).mean().detach() / self.width if gradients else torch.zeros(())

    def _loss_of(self, output: Any, target: Any) -> Any:
        assert self._loss is not None
        return self._loss(self._flat.rebuilt(output), target)


class DistributedModule(torch.nn.Module):  # type: ignore[misc]
    """A model of torch, distributed by a plan; made by `Plan.apply_to_torch`.

    Attributes:
        module: the model, or the part of this rank's stage; its parameters are DTensors.
        mesh: DeviceMesh of the stage, (dp_replicate, dp_shard, tp).
        optimizer: the one given, which now trains the parameters of this rank.
        plan: what was applied.
        stage: number of the stage of this rank.
    """

    def __init__(
        self,
        local: DTensorModule,
        mesh: Any,
        optimizer: torch.optim.Optimizer | None,
        plan: Plan,
        layout: StageLayout,
        pipeline: Pipeline | None,
        notes: Sequence[str],
        parameters: Mapping[str, torch.nn.Parameter],
    ) -> None:
        super().__init__()
        self._local, self._layout, self._pipeline = local, layout, pipeline
        self._planned_notes, self._by_name = tuple(notes), dict(parameters)
        self.mesh, self.optimizer, self.plan, self.stage = mesh, optimizer, plan, layout.number

    @property
    def module(self) -> torch.nn.Module:
        """The model, or the part of this rank's stage."""
        return self._local.module

    @property
    def notes(self) -> tuple[str, ...]:
        """What runs in another way than planned, one line each; grows when ops ran for the first time."""
        mode = self._local.mode
        gathered = sorted(mode.gathered) if mode is not None else []
        return (
            *self._planned_notes,
            *(f"{name} has no sharding rule in DTensor: it runs on whole tensors" for name in gathered),
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model computes of the rows of this rank (`rows`), as plain tensors.

        Raises:
            ShardingError: the plan has several stages.
        """
        if self._pipeline is not None:
            raise ShardingError(
                f"plan of {self.plan.program.name} has {len(self.plan.stages)} stages, and no rank "
                "computes the whole model; call train_step, which runs the pipeline"
            )
        return self._local(*args, **kwargs)

    def rows(self, batch: Any) -> Any:
        """The rows of a micro-batch that this rank computes: of an array of torch or NumPy, or of those in a
        tuple or dict."""
        replicate, shard = self.mesh.get_local_rank("dp_replicate"), self.mesh.get_local_rank("dp_shard")
        number = replicate * self.mesh.size(1) + shard
        return pytree.tree_map(lambda x: self._pieces(x, self._layout.parts)[number], batch)

    def train_step(self, inputs: Any, targets: Any, loss: Callable[[Any, Any], Any]) -> float:
        """One step of training on a whole batch, which every rank gets; collective.

        Args:
            inputs: of the model: a tensor, a tuple of them, or a dict by name.
            targets: a tensor, or where the plan has one stage a NumPy array, or a tuple or dict of them.
            loss: (output of the model, targets) -> the mean over the samples.

        Returns:
            the mean of the loss over the batch.

        Raises:
            RuntimeFault: there is no optimizer.
            ShardingError: the batch does not divide into the micro-batches and ranks of the plan.
        """
        if self.optimizer is None:
            raise RuntimeFault(
                "train_step needs an optimizer; give one to apply_to_torch, or call the module as "
                "any other of torch"
            )
        count = self.plan.micro_batches
        pieces = [self._micro_batch((inputs, targets), number) for number in range(count)]
        total = self._accumulate(pieces, loss) if self._pipeline is None else self._run(pieces, loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total)

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Name -> the parameter with all its elements, of this rank's stage. Collective."""
        return {
            name: p.full_tensor() if isinstance(p, DTensor) else p.detach()
            for name, p in self._by_name.items()
        }

    def _micro_batch(self, batch: Any, number: int) -> Any:
        """Rows of this rank in a micro-batch."""
        count = self.plan.micro_batches
        return self.rows(pytree.tree_map(lambda x: self._pieces(x, count)[number], batch))

    def _pieces(self, x: Any, count: int) -> Any:
        """Equal parts of an array of torch, NumPy or others; whatever else is in a batch belongs to each."""
        if not getattr(x, "shape", ()):
            return [x] * count
        rows, remaining = divmod(x.shape[0], count)
        if remaining:
            raise ShardingError(
                f"batch of {x.shape[0]} samples does not divide into {count} equal parts; the plan has "
                f"{self.plan.micro_batches} micro-batches and {self._layout.parts} ranks that share a batch"
            )
        return [x[number * rows : (number + 1) * rows] for number in range(count)]

    def _accumulate(self, pieces: Sequence[Any], loss: Callable[..., Any]) -> torch.Tensor:
        """Gradients over the micro-batches; returns this rank's part of the mean loss."""
        total = torch.zeros((), device=self.mesh.device_type)
        synced = getattr(self.module, "set_requires_gradient_sync", None)
        for number, (inputs, targets) in enumerate(pieces):
            if synced is not None:
                synced(number == len(pieces) - 1)
            args, kwargs = _arguments(inputs)
            value = loss(self(*args, **kwargs), targets) / len(pieces)
            value.backward()
            total += value.detach()
        return total / dist.get_world_size()

    def _run(self, pieces: Sequence[Any], loss: Callable[..., Any]) -> torch.Tensor:
        """Gradients by the pipeline; returns this rank's part of the mean loss."""
        assert self._pipeline is not None
        columns = [_flat(inputs) for inputs, _ in pieces]
        other = next((x for x in columns[0] if not isinstance(x, torch.Tensor)), None)
        if other is not None:
            raise ShardingError(
                f"inputs of a pipeline have a {type(other).__name__} but torch.distributed.pipelining sends "
                "tensors; give tensors, and keep other settings in the model"
            )
        inputs = [torch.cat(column) for column in zip(*columns, strict=True)]
        targets = [target for _, target in pieces]
        if not all(isinstance(target, torch.Tensor) for target in targets):
            raise ShardingError(
                f"targets of a pipeline are a {type(targets[0]).__name__} but torch.distributed.pipelining "
                "takes one tensor; stack them into one"
            )
        total = self._pipeline.step(inputs, torch.cat(targets), loss)
        self._pipeline.gradients.sum(self._by_name)
        return total.to(self.mesh.device_type)


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def _flat(inputs: Any) -> list[torch.Tensor]:
    args, kwargs = _arguments(inputs)
    return [*args, *kwargs.values()]
