"""Engine: a model, a loss and an optimiser, compiled for a mesh of ranks and run on them."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from distgraph.engine.agreement import agree, agree_on_call
from distgraph.engine.callbacks import Callback, ProgressBar
from distgraph.engine.callbacks.callback_events import watching
from distgraph.engine.checkpoints.checkpoint_retention import Checkpoints
from distgraph.engine.checkpoints.elastic_fit import ElasticFit
from distgraph.engine.checkpoints.loading import Loaded, check_records, restore_training, verify_files
from distgraph.engine.checkpoints.saving import Saves, contents_of
from distgraph.engine.commands.overrides import cluster_given, plan_for, strategy_given
from distgraph.engine.commands.script_runner import offer_program, offer_step
from distgraph.engine.compile.loss_scaling import SCALE
from distgraph.engine.compile.plan_apply import check_batch
from distgraph.engine.compile.plan_extract import extract_plan
from distgraph.engine.compile.program_summary import PlanView
from distgraph.engine.compile.program_warnings import warn_conflicts
from distgraph.engine.compile.strategy_passes import strategy_pipeline
from distgraph.engine.compile.training_spec import TrainingSpec, metric_names
from distgraph.engine.data import DataLoader, as_source, stand_ins, whole
from distgraph.engine.generation import Limits, Sampling, generate
from distgraph.engine.history import History, Means
from distgraph.engine.nonfinite import NonFiniteSteps, skipped_steps
from distgraph.engine.parameter_store import Memory, assign_tensors, gather_tensors
from distgraph.engine.session import Session
from distgraph.engine.validation import check_micro_batches, check_parts, first_sample
from distgraph.errors import RuntimeFault
from distgraph.errors.arguments import Count, Size, checked_arguments
from distgraph.kernels.random import random_key
from distgraph.optim import Optimizer
from distgraph.plan.plan import Plan
from distgraph.plan.strategy import Strategy
from distgraph.resources import Cluster
from distgraph.resources.runtimes.runtime_model import RuntimeModel
from distgraph.runtime.execute.checkpoint import Checkpoint
from distgraph.runtime.execute.measured_timeline import MeasuredTimeline
from distgraph.runtime.execute.process_group import enter, is_chief
from distgraph.runtime.execute.recorder import Recording, StepRecords

if TYPE_CHECKING:
    from distgraph.runtime.forecast.forecast import Forecast


class Engine:
    """Trains a serial model on a mesh of ranks.

    Without a launcher the ranks are threads of this process. Under `distgraph run -n N` or mpiexec every
    process is one rank: the same script runs in all of them, and rank 0 prints.

    Args:
        model: a `nn.Module`, or a function of tensors.
        loss: (output, target) -> the mean over the samples; None where the model returns its loss.
        optimizer: see `distgraph.optim`; None for an engine that does not train.
        metrics: functions (output, target) -> mean over the samples; a sequence, or a dict by name.
        strategy: how to distribute, see `Strategy`.
        cluster: a Cluster, or the path or name of a resource file, which gives the cost of collectives. By
            default their cost is the number of bytes sent.
        seed: seed of initial values, of shuffling and of dropout.
        plan: the decisions about the training program, or the path of a plan file: see docs/planning/plan.md.
            It replaces the meshes, micro-batches and schedule of the strategy.

    Example:
        >>> import numpy as np, distgraph as dg
        >>> x = np.random.default_rng(0).normal(size=(64, 3)).astype("f4")
        >>> engine = dg.Engine(dg.nn.Linear(3, 1), dg.nn.MeanSquaredError(), dg.optim.Adam(lr=0.1))
        >>> history = engine.fit((x, x.sum(1, keepdims=True)), epochs=20, batch_size=16, progress=False)
        >>> history["loss"][-1] < history["loss"][0] / 10
        True
    """

    def __init__(
        self,
        model: Callable[..., Any],
        loss: Callable[..., Any] | None = None,
        optimizer: Optimizer | None = None,
        metrics: Sequence[Callable[..., Any]] | Mapping[str, Callable[..., Any]] = (),
        strategy: Strategy | None = None,
        cluster: Cluster | str | Path | None = None,
        seed: int = 0,
        plan: Plan | str | Path | None = None,
    ) -> None:
        check_parts(model, loss, optimizer, metrics, strategy, cluster, seed, plan)
        given = strategy_given(strategy or Strategy())
        training_spec = TrainingSpec(model, loss, optimizer, metric_names(metrics), given)
        strategy_pipeline(training_spec.strategy)  # refuses passes that do not exist or do not fit together
        self.cluster = cluster_given(cluster)
        self.seed = seed
        self.step = 0
        self.epoch = 0
        self.position = 0  # samples of the epoch that are done
        self.history = History()
        self.should_stop = False
        self.validates = False  # whether `fit` has data to evaluate after each epoch
        self._given = training_spec  # without what a plan decides
        self._elastic: ElasticFit | None = None  # of the last `fit`
        self._recordings: dict[object, StepRecords] = {}  # of steps, by who records them
        self._means = Means()  # of the epoch under way
        self._nonfinite = NonFiniteSteps(training_spec.strategy)
        self._conflicts_reported = False  # whether annotations that compete have been looked for
        self._run = secrets.token_hex(8)  # of this training and all that it goes on from; rank 0's counts
        self._loaded: Loaded | None = None  # what it goes on from
        self.memory = Memory(seed, training_spec.parameters)
        self._saves = Saves(self._after_saving)
        self._session = Session(training_spec, self.cluster, self.memory, plan_for(training_spec, plan))

    @property
    def training_spec(self) -> TrainingSpec:
        """Model, loss, optimiser, metrics and strategy; the strategy without what a plan decides."""
        return self._session.training_spec

    def prepare(self, batch: Any) -> PlanView:
        """Trace, plan and compile the training program, without running it or making a parameter.

        Args:
            batch: arrays as in `fit`, or anything with their shapes and dtypes, such as
                `jax.ShapeDtypeStruct`.

        Raises:
            GraphError, ShardingError, ResourceError: the model, the annotations or the cluster do not fit.
        """
        without_optimizer = "evaluate" if self.training_spec.loss else "predict"
        mode = without_optimizer if self.training_spec.optimizer is None else "train"
        batch = whole(stand_ins(batch))
        offer_program(self._session.compile_request(mode, batch), self.cluster)
        self._session.program(mode, batch)
        return self.plan

    @checked_arguments(RuntimeFault)
    def fit(
        self,
        train: Any,
        epochs: Size = 1,
        batch_size: Count = 32,
        valid_data: Any = None,
        callbacks: Sequence[Callback] = (),
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        resume: bool = False,
        progress: bool = True,
    ) -> History:
        """Train.

        Args:
            train: (x, y), for two inputs (x, z, y), a dict of arrays, or a map-style data set; see
            `distgraph.engine.data`. Each rank loads the rows that it needs.
            epochs: how many more, or with `resume` how many in all.
            batch_size: samples in a batch, over all ranks and micro-batches.
            valid_data: evaluated after each epoch.
            callbacks: see `distgraph.engine.callbacks`.
            shuffle: draw a new order each epoch, from the seed and the epoch's number.
            drop_last: leave out a short batch at the end.
            resume: after `load`, go on in the middle of the epoch where the checkpoint was written.
            progress: show a bar on a terminal.

        Returns:
            the history of all that this engine has trained.

        Raises:
            GraphError, ShardingError, ResourceError: the data does not fit the model, or the program does not
                fit the ranks.
            RuntimeFault: an argument makes no sense, or is another one on another rank; or a rank failed.
            NonFiniteError: loss or gradients are not finite (nonfinite="raise"), or in no step ("skip").
        """
        if self._session.plan is not None:
            check_batch(self._session.plan, batch_size)
        check_micro_batches(batch_size, self.training_spec.strategy.start.micro_batches)
        source = as_source(train)
        facts = {"shuffle": shuffle, "drop_last": drop_last, "resume": resume, "samples": len(source)}
        agree("engine.fit()", self, epochs=epochs, batch_size=batch_size, **facts)
        elastic = self._elastic = ElasticFit(self)
        watchers = [elastic, *callbacks, *([ProgressBar()] if progress else []), elastic.end_of_step]
        last = epochs if resume else self.epoch + epochs
        resume = elastic.begin(callbacks, batch_size) or resume
        position = first_sample(self.position, resume, len(source))
        self.should_stop, self.validates = False, valid_data is not None
        with watching(self, watchers, last), elastic:
            while self.epoch < last and not self.should_stop:
                loader = DataLoader(source, batch_size, shuffle, drop_last, self.seed, self.epoch, position)
                self._fit_epoch(loader, valid_data, watchers)
                position = 0
            self._saves.wait()
        return self.history

    def run(self, batch: Any) -> dict[str, float]:
        """One training step on a batch: arrays, or a Batch of `dataloader`. Returns its loss and metrics.

        Raises:
            NonFiniteError: the loss or a gradient is nan or infinite, under Strategy(nonfinite="raise").
            GraphError, ShardingError, ResourceError, RuntimeFault: as `fit`.
        """
        enter("engine.run()")
        self._saves.poll()
        given, batch = batch, whole(batch)
        request = self._session.compile_request("train", batch)
        offer_step(request, self.cluster, self.memory, batch, self._scalars())
        offer_program(request, self.cluster)
        compiled = self._session.program("train", batch)
        if not self._recordings:
            logs = self._session.numbers(compiled, batch, self._scalars())
        else:
            records, step = tuple(self._recordings.values()), self.step + 1
            logs = self._session.recorded(compiled, batch, self._scalars(), records, step)
        nonfinite_counts = self._session.nonfinite(compiled)
        self._nonfinite.after_step(nonfinite_counts, logs["loss"], self.step + 1, given, self.history)
        self.step += 1
        if batch is given:  # it knows its place in the epoch; bare arrays have none
            self.epoch, self.position = batch.epoch, batch.position + len(batch)
        self.history.losses.append(logs["loss"])
        every = self.training_spec.strategy.verify_replicas
        if every is not None and self.step % every == 0:
            self._session.verify_replicas(self.step, compiled, batch)
        return logs

    @checked_arguments(RuntimeFault)
    def evaluate(self, data: Any, batch_size: Count | None = None) -> dict[str, float]:
        """Loss and metrics over a data set: the exact mean over its samples.

        Args:
            data: as in `fit`.
            batch_size: samples at a time; 256, or all there are, by default.
        """
        source = as_source(data)
        agree("engine.evaluate()", self, samples=len(source), batch_size=batch_size or min(256, len(source)))
        loader = DataLoader(source, batch_size or min(256, len(source)), shuffle=False)
        means = Means()
        for batch in loader:
            compiled = self._session.program("evaluate", batch)
            means.add(self._session.numbers(compiled, batch, self._scalars()), len(batch))
        return means.result()

    @checked_arguments(RuntimeFault)
    def predict(self, x: Any, batch_size: Count | None = None) -> Any:
        """Outputs of the model as whole arrays, on every process.

        Args:
            x: the arguments of the model: an array, a tuple or a dict of arrays, or a map-style data set of
                them.
            batch_size: samples at a time; 256, or all there are, by default.

        Returns:
            an array, or a dict of arrays where the model returns several; nested ones by path, as "heads.0".
        """
        source = as_source(x)
        agree("engine.predict()", self, samples=len(source), batch_size=batch_size or min(256, len(source)))
        loader = DataLoader(source, batch_size or min(256, len(source)), shuffle=False)
        parts: dict[str, list[np.ndarray]] = {}
        for batch in loader:
            compiled = self._session.program("predict", batch)
            compiled.check_rows(len(source))
            for label, array in self._session.arrays(compiled, batch, self._scalars()).items():
                parts.setdefault(label, []).append(array)
        outputs = {label: np.concatenate(arrays) for label, arrays in parts.items()}
        return outputs["output"] if list(outputs) == ["output"] else outputs

    def generate(
        self,
        prompts: Any,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        end_token: int | None = None,
        length: int | None = None,
        keep: int | None = None,
        seed: int = 0,
    ) -> list[np.ndarray]:
        """Continue sequences of tokens by a causal language model (docs/models/generation.md). Collective.

        Args:
            prompts: [b, s] integers, or b sequences of any lengths. The model maps tokens [b, n] to logits.
            max_new_tokens: for each sequence.
            temperature, top_k, top_p: see `Sampling`; by default the most probable token is chosen.
            end_token: ends a sequence.
            length: positions of the model; by default those of the samples it was trained with.
            keep: when all positions are used up, go on from this number of last tokens; None raises instead.
            seed: of the choices.

        Returns:
            each prompt and what follows it, up to and with its end token.

        Raises:
            GraphError: arguments do not fit; the model is not causal, or returns something else than logits.
        """
        enter("engine.generate()")
        limits = Limits(max_new_tokens, length, keep, end_token)
        return generate(self._session, prompts, limits, Sampling(temperature, top_k, top_p), seed)

    @checked_arguments(RuntimeFault)
    def dataloader(
        self,
        data: Any,
        batch_size: Count = 32,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        epoch: Size | None = None,
    ) -> DataLoader:
        """Batches of one epoch, for `run`; nothing is loaded until a rank needs it."""
        epoch = self.epoch if epoch is None else epoch
        return DataLoader(as_source(data), batch_size, shuffle, drop_last, self.seed, epoch)

    @checked_arguments(RuntimeFault)
    def save(self, path: str | Path, *, asynchronous: bool = False) -> None:
        """Write a checkpoint: parameters, states, and where training stands. Collective: every process calls
        it. Ctrl-C takes effect when it is written, a second one at once.

        Args:
            path: directory, made if it does not exist.
            asynchronous: copy the values and return; threads write the copy while training goes on. Every
                later step completes it if it is written by then; the next `save` or `load`, the end of `fit`,
                `close` and the end of the process wait for it. They raise its error.

        Raises:
            RuntimeFault: there is nothing to save yet, or it cannot be written; or ranks hold different
                copies of a value, under Strategy(verify_replicas=...). The previous checkpoint is whole.
            NonFiniteError: a parameter or state is nan or infinite; the previous checkpoint is whole.
        """
        agree("engine.save()", self, path=Path(path))
        self._saves.wait()
        contents = contents_of(self, self._session, self._loaded)
        self._session.verify_replicas(self.step)
        self._saves.save(path, self._session.ranks(), contents, asynchronous)

    def _after_saving(self, path: str | Path) -> None:
        if self._loaded is not None:
            self._loaded = self._loaded.after_saving(path)
            self.memory.reader = self._loaded.reader

    @checked_arguments(RuntimeFault)
    def load(self, path: str | Path, *, states: bool = True) -> None:
        """Take parameters, states and the place in training from a checkpoint, written under any mesh.

        All of it is compared with its checksums first; when it is damaged, the engine stays as it was.

        Args:
            path: directory that `save` wrote.
            states: whether the optimiser goes on from its states; False starts it anew.

        Raises:
            RuntimeFault: there is no checkpoint, it is damaged, or of another model; or a state is missing.
        """
        enter("engine.load()")
        self._saves.wait()
        checkpoint = Checkpoint.open(path)
        expected = self._session.expected()
        if expected:
            checkpoint.check(expected)
        check_records(checkpoint, self.memory.records, states, set(expected))
        verify_files(checkpoint, self._session.ranks())
        self._loaded = Loaded(checkpoint, states, frozenset(expected), self.memory.records)
        self._session.loaded, self.memory.reader = self._loaded, (reader := self._loaded.reader)
        self.memory.damaged = f"loading {path} did not end"
        self._session.ranks().run(lambda rank: self.memory.reload(rank, reader))
        self.memory.damaged = ""
        restore_training(self, checkpoint.index)

    def parameters(self) -> dict[str, np.ndarray]:
        """Parameters and buffers of the model by name, as whole arrays. Collective: every process calls it.
        Raises RuntimeFault when no program has been compiled yet."""
        enter("engine.parameters()")
        return gather_tensors(self._session.ranks(), self.memory, self._session.expected())

    @checked_arguments(RuntimeFault)
    def assign(self, arrays: Mapping[str, Any]) -> None:
        """Set parameters and buffers of these names to whole arrays; optimiser states stay. Collective.

        Raises:
            RuntimeFault: no program has been compiled yet, or the processes give different arrays.
            GraphError: there is no tensor of a name, or it does not fit; then none is set.
        """
        agree_on_call("engine.assign()", "values", arrays)
        assign_tensors(self._session.ranks(), self.memory, self._session.expected(), arrays)

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints that this training has written or will write; for `ModelCheckpoint`."""
        return Checkpoints(self._run, self._session.ranks(), self._saves.when_complete)

    @property
    def plan(self) -> PlanView:
        """The layout of every tensor with its reason, and the communication; `save` writes it as a plan file.

        Raises:
            RuntimeFault: no program has been compiled yet."""
        compiled = self._session.first_program("plan")
        build, mapping = compiled.build, compiled.mapping
        portable = functools.partial(extract_plan, compiled.request, build, mapping, self.cluster)
        return PlanView(build, compiled.mode, mapping, portable, self.training_spec.strategy)

    @checked_arguments(RuntimeFault)
    def forecast(
        self,
        cluster: Cluster | str | Path | None = None,
        *,
        runtime: RuntimeModel | str | None = None,
        html: str | Path | None = None,
        trace: str | Path | None = None,
        measured: MeasuredTimeline | str | Path | None = None,
    ) -> Forecast:
        """Seconds of a step and bytes of every rank on a cluster, without running. Print it.

        Args:
            cluster: where; that of the engine by default. For another one the program is compiled anew.
            runtime: what executes it: distgraph by default, or a name such as "megatron", the path of a file,
                or a model (docs/planning/runtimes.md).
            html: also write a report there, one page that needs no network; needs the extra `report`.
            trace: also write a Chrome trace there, for ui.perfetto.dev.
            measured: what `stop_recording` returned, or the path of a file that `callbacks.Timeline` wrote:
                shown below the forecast in the report, and as further rows in the trace.

        Raises:
            RuntimeFault: there is no program yet; plotly is not installed; a file cannot be written.
            ResourceError: there is no cluster, it has too few devices, or gives no number that a cost needs;
                there is no such runtime.
        """
        from distgraph.engine.compile.program_forecast import forecast_of  # noqa: PLC0415 (loads the forecast)

        compiled = self._session.first_program("forecast")
        built = compiled.build, compiled.mapping
        return forecast_of(compiled.request, built, self.cluster, cluster, runtime, html, trace, measured)

    def start_recording(self) -> None:
        """From the next training step on, record when every task runs on every rank, and when ranks wait.

        Ranks begin a recorded step together; GPUs end a task before the next one begins. `callbacks.Timeline`
        does so for some steps of `fit`.
        """
        self._recordings["timeline"] = Recording()

    def stop_recording(self) -> MeasuredTimeline:
        """End the recording and return it, the same on every process, for a file or for `forecast`.

        Raises:
            RuntimeFault: there is no recording.
        """
        recording = self._recordings.pop("timeline", None)
        if not isinstance(recording, Recording):
            raise RuntimeFault("engine records nothing; call start_recording before the steps to record")
        return recording.timeline()

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that prints: rank 0, or the only one."""
        return is_chief()

    def close(self) -> None:
        """End the ranks' threads, after the save in progress. Further use starts them again."""
        self._saves.wait()
        self._session.close()

    def _fit_epoch(self, loader: DataLoader, valid_data: Any, watchers: Sequence[Callback]) -> None:
        for watcher in watchers:
            watcher.on_epoch_begin(self, self.epoch, len(loader))
        epoch = self.epoch
        if not loader.start:
            self._means = Means()
        for batch in loader:
            logs = self.run(batch)
            if not self._conflicts_reported:
                self._conflicts_reported = True
                warn_conflicts(self._session.first_program("plan").build.completed)
            self._means.add(logs, 0 if self.step in self.history.skipped[-1:] else len(batch))
            for watcher in watchers:
                watcher.on_batch_end(self, self.step, logs)
            if self.should_stop and self.position < loader.stop:
                return
        self.epoch, self.position = epoch + 1, 0
        logs = {"epoch": epoch, **self._means.result()}
        if self.training_spec.strategy.nonfinite == "skip":
            steps = -(-loader.stop // loader.batch_size)
            logs["skipped_steps"] = skipped_steps(self._means, self.history, self.step, steps, loader.epoch)
        if valid_data is not None:
            valid_logs = self.evaluate(valid_data, loader.batch_size)
            logs |= {f"valid_{name}": number for name, number in valid_logs.items()}
        logs = self._session.ranks().share(logs, 0)
        self.history.epochs.append(logs)
        for watcher in watchers:
            watcher.on_epoch_end(self, epoch, logs)

    def _scalars(self) -> dict[str, Any]:
        """Scalar inputs of a step."""
        key = np.uint64(random_key(self.seed, "step", self.step))
        optimizer, skipped = self.training_spec.optimizer, len(self.history.skipped)
        numbers = {} if optimizer is None else optimizer.inputs(self.step, skipped)
        if self._nonfinite.scale is not None:
            numbers[SCALE] = self._nonfinite.scale.value
        return {"key": key, **numbers}
