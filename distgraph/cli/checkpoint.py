"""Command line: `distgraph checkpoint list`, `verify`, `show`, `convert`, `prune`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from distgraph.errors import RuntimeFault
from distgraph.ir.dtypes import itemsize
from distgraph.resources.units import format_bytes
from distgraph.runtime.execute.checkpoint.convert import convert as convert_checkpoint
from distgraph.runtime.execute.checkpoint.folder import check_path
from distgraph.runtime.execute.checkpoint.index_schema import TensorEntry
from distgraph.runtime.execute.checkpoint.resharding import Checkpoint
from distgraph.runtime.execute.checkpoint.retention import CheckpointFolder, by_run, delete, find, select
from distgraph.serialization.documents import shown_path

app = typer.Typer(
    name="checkpoint",
    no_args_is_help=True,
    add_completion=False,
    help="List, verify, show, convert and delete checkpoints.",
)
_FOLDER = typer.Argument(help="Folder of a checkpoint, or a folder with checkpoints below it.")


@app.command("list")
def list_checkpoints(directory: Annotated[str, _FOLDER]) -> None:
    """List checkpoints: step, epoch, size, time of writing, metrics of the last epoch."""
    rows = [("checkpoint", "step", "epoch", "size", "written", "last epoch")]
    for each in _folders(directory):
        if each.checkpoint is None:
            rows.append((_name(each), "-", "-", "-", "-", _reason(each)))
            continue
        index = each.checkpoint.contents
        last = index.epochs[-1] if index.epochs else {}
        numbers = " ".join(f"{name} {number:.4g}" for name, number in last.items() if name != "epoch")
        missing = each.checkpoint.missing()
        size, note = format_bytes(each.bytes), f"damaged: {missing[0]}" if missing else numbers
        rows.append((_name(each), str(index.step), str(index.epoch), size, index.written, note))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        typer.echo("  ".join([*cells, row[5]]).rstrip())


@app.command()
def verify(directories: Annotated[list[str], _FOLDER]) -> None:
    """Verify the checksums of every byte of checkpoints; exit code 1 if one is damaged or missing."""
    failed = False
    for path in [check_path(directory) for directory in directories]:
        try:
            checkpoints = _folders(path)
        except RuntimeFault as error:
            typer.echo(f"{shown_path(path)}: missing: {error}")
            failed = True
            continue
        whole = [_verified(each) for each in checkpoints]
        failed |= not all(whole)
    raise typer.Exit(1 if failed else 0)


@app.command()
def show(
    directory: Annotated[str, typer.Argument(help="Folder of one checkpoint.")],
    blocks: Annotated[bool, typer.Option("--blocks", help="Show every block and its file.")] = False,
) -> None:
    """Show a checkpoint: the training position, and every tensor with shape, dtype, size and blocks."""
    index = Checkpoint.open(directory).contents
    place = f", {index.position} samples into it" if index.position else ""
    typer.echo(f"step {index.step}, epoch {index.epoch}{place}, seed {index.seed}")
    typer.echo(f"written {index.written} by distgraph {index.distgraph}, fingerprint {index.fingerprint}")
    for number, epoch in enumerate(index.epochs[-1:], len(index.epochs)):
        numbers = " ".join(f"{name} {each:.4g}" for name, each in epoch.items() if name != "epoch")
        typer.echo(f"epoch {number} of {number}: {numbers}")
    total = sum(entry.bytes for entry in index.files.values())
    typer.echo(f"{len(index.tensors)} tensors in {len(index.files)} files, {format_bytes(total)}")
    width = max((len(name) for name in index.tensors), default=0)
    for name, tensor in index.tensors.items():
        what = f"{tensor.dtype}{tensor.shape}"
        size = format_bytes(math.prod(tensor.shape) * itemsize(tensor.dtype))
        typer.echo(f"  {name.ljust(width)}  {tensor.kind.ljust(5)}  {what}  {size}  {_layout(tensor)}")
        for block in tensor.shards if blocks else ():
            where = ", ".join(f"{a}:{a + n}" for a, n in zip(block.start, block.shape, strict=True))
            typer.echo(f"    [{where}]  {block.file} from byte {block.begin}")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="Folder of a checkpoint, or a safetensors file.")],
    target: Annotated[str, typer.Argument(help="File or folder to write.")],
    weights_only: Annotated[
        bool,
        typer.Option(
            "--weights-only",
            help="Write parameters and buffers of the model only: no optimiser states, no state of training.",
        ),
    ] = False,
) -> None:
    """Write a checkpoint as one safetensors file, or a safetensors file as a checkpoint."""
    convert_checkpoint(check_path(source), check_path(target, "written"), weights_only)
    typer.echo(f"{source} -> {target}")


@app.command()
def prune(
    directory: Annotated[str, typer.Argument(help="Folder with checkpoints below it.")],
    keep: Annotated[
        int, typer.Option("--keep", min=1, help="Number of checkpoints of each run to keep: the last ones.")
    ],
    best: Annotated[
        str, typer.Option("--best", help='Also keep the checkpoint with the best "valid_loss", for example.')
    ] = "",
    mode: Annotated[str, typer.Option("--mode", help="min or max: which value is best.")] = "min",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be deleted; delete nothing.")
    ] = False,
) -> None:
    """Delete the older checkpoints of each run; those that stay are verified first, and damaged ones do not
    count."""
    if mode not in ("min", "max"):
        raise RuntimeFault(f'prune: --mode is {mode!r} but must be "min" or "max"')
    checkpoints, damaged = _folders(directory), list[CheckpointFolder]()
    if best and not any(each.metric(best) is not None for each in checkpoints):
        names = {
            n: None for f in checkpoints if f.checkpoint for e in f.checkpoint.contents.epochs[-1:] for n in e
        }
        raise RuntimeFault(
            f"prune: no checkpoint has the metric {best!r}; give one of {', '.join(names) or 'nothing'}, or "
            f"leave out --best"
        )

    def good(each: CheckpointFolder) -> bool:
        if each.checkpoint is not None and not each.checkpoint.verify():
            return True
        damaged.append(each)
        return False

    stay, gone = list[CheckpointFolder](), list[CheckpointFolder]()
    for group in by_run(checkpoints):
        retained, older = select(group, keep, best or None, mode, good)
        stay, gone = stay + retained, gone + older
    damaged += [each for each in checkpoints if each.checkpoint is None]
    for each in checkpoints:
        if each in gone:
            if not dry_run:
                delete(each.path)
            typer.echo(f"{_training(each)}: {'would be deleted' if dry_run else 'deleted'}")
        else:
            typer.echo(f"{_training(each)}: {'damaged, left' if each in damaged else 'kept'}")
    if not stay:
        raise RuntimeFault(f"prune: no checkpoint in {directory} is complete; nothing was deleted")


def _verified(each: CheckpointFolder) -> bool:
    """Verify a checkpoint and print the result; returns whether it is complete."""
    wrong = each.checkpoint.verify() if each.checkpoint is not None else [_reason(each)]
    for problem in wrong:
        typer.echo(f"{_name(each)}: damaged: {problem}")
    if not wrong and each.checkpoint is not None:
        index = each.checkpoint.contents
        what = f"step {index.step}, {len(index.tensors)} tensors, {len(index.files)} files"
        typer.echo(f"{_name(each)}: whole: {what}, {format_bytes(each.bytes)}")
    return not wrong


def _folders(directory: str | Path) -> list[CheckpointFolder]:
    folder = check_path(directory)
    checkpoints = find(folder)
    if not checkpoints:
        raise RuntimeFault(
            f"{shown_path(folder)} has no checkpoint; give the folder that engine.save wrote, or one above it"
        )
    return checkpoints


def _name(each: CheckpointFolder) -> str:
    return shown_path(each.path)


def _training(each: CheckpointFolder) -> str:
    """The folder of a checkpoint, its run and its step."""
    if each.checkpoint is None:
        return f"{_name(each)}: run unknown, step unknown"
    index = each.checkpoint.contents
    return f"{_name(each)}: run {shown_path(index.run[:40]) or 'unknown'}, step {index.step}"


def _reason(each: CheckpointFolder) -> str:
    return each.problem.removeprefix("checkpoint ")


def _layout(tensor: TensorEntry) -> str:
    """The blocks of a tensor, such as "2 x 1 blocks"."""
    if len(tensor.shards) <= 1:
        return "1 block" if tensor.shards else "empty"
    cuts = [len({block.start[dim] for block in tensor.shards}) for dim in range(len(tensor.shape))]
    return " x ".join(map(str, cuts)) + " blocks"
