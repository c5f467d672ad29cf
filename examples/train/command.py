"""`python examples/train`: trains a byte-level GPT on the ranks of this machine, or as one rank of a launcher's."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerators.output import NOBODY_READS, NotWritten, Parser, answer, complain, has_no_reader
from zero.errors import not_written
from zero.tools.commands import DONE, INTERRUPTED, status_of, tell

from .launch import is_rank, launch, unless_nobody_reads

if TYPE_CHECKING:
    from .options import Options
    from .text import Text

_DESCRIPTION = """Trains a GPT over bytes, sharded, and leaves in --directory checkpoints, records.jsonl (a line of JSON a step)
and report.html. The same command goes on where it was interrupted, or where a rank died, at any number of ranks.

Starts its ranks itself. Under torchrun it is one of them: torchrun --nnodes 2 ... examples/train --directory /shared/run"""
_STATUSES = "Exit status: 0 trained, 2 it could not be done, and the reason is on stderr, 130 interrupted."

_SAMPLE_BYTES = 300


def main(argv: list[str] | None = None) -> int:
    """Trains, and returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    return answer(lambda: status_of(partial(run, _parser().parse_args(words), words)))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python examples/train", description=_DESCRIPTION, epilog=_STATUSES,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    titles = ("the run", "the model and its data", "how it is trained")
    run_, model, how = (parser.add_argument_group(title) for title in titles)
    _add(run_, "--directory", "trained", "for checkpoints, records and the report; several machines share it", metavar="DIR")
    _add(run_, "--ranks", None, "how many to start (default: one a device, two on the CPU)", type=int, metavar="N")
    _add(run_, "--restarts", 3, "how often to start the ranks again after one died", type=int, metavar="N")
    _add(run_, "--save-every", 20, "steps from checkpoint to checkpoint", type=int, metavar="STEPS")
    _add(run_, "--log-every", 10, "steps from line to line where there is no terminal", type=int, metavar="STEPS")
    run_.add_argument("--tensorboard", action="store_true", help="also write the records for TensorBoard, into DIR/tensorboard")
    _add(run_, "--accelerator", None, "as ACCELERATOR: cpu, cuda, xpu, ... (default: the best there is)", metavar="NAME")
    _add(model, "--data", None, "a text file or a folder (default: the source of Python's standard library)", metavar="PATH")
    _add(model, "--layers", 6, "of the model", type=int)
    _add(model, "--width", 384, "of the model; a head is 64 wide", type=int)
    _add(model, "--context", 64, "bytes that a sample has", type=int)
    _add(model, "--dropout", 0.0, "part of what a block adds that is dropped", type=float)
    _add(model, "--seed", 0, "of the weights, the data and what is dropped", type=int)
    _add(how, "--steps", 160, "in all, those before an interruption included", type=int)
    _add(how, "--batch", 16, "samples of a step, of all ranks together", type=int)
    _add(how, "--lr", 1e-3, "the highest learning rate", type=float)
    _add(how, "--stage", 2, "0 shards nothing, 1 the optimizer's state, 2 the gradients too, 3 the weights too", type=int,
         choices=(0, 1, 2, 3))
    _add(how, "--dtype", "float32", "of the weights; narrow ones have fp32 masters", choices=("float32", "bfloat16", "float16"))
    _add(how, "--offload", "none", "where what is sharded lives", choices=("none", "cpu"))
    how.add_argument("--homes", action="append", default=[], metavar="KIND=PLACE",
                     help="where masters, moments, gradients or, at stage 3, weights live: masters=disk:/fast, for instance; "
                     "may be repeated")
    _add(how, "--accumulation", 1, "micro-batches of a step on each rank", type=int, metavar="N")
    how.add_argument("--compile", action="store_true", help="compile the model")
    return parser


def _add(group: Any, name: str, default: Any, words: str, **options: Any) -> None:
    suffix = "" if default is None else f" (default: {default})"
    group.add_argument(name, default=default, help=words + suffix, **options)


def run(args: argparse.Namespace, words: list[str]) -> int:
    """Starts the ranks, or is one; they are given the same words."""
    # Imported here, as a user who asks for the help does not need torch.
    import accelerators
    from zero.sharding.metrics import board_writer

    from .loop import check_directory, check_same
    from .options import Options
    from .text import Text, read_text

    if args.accelerator is not None:
        os.environ["ACCELERATOR"] = args.accelerator  # started ranks read it, too
    options = Options(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Options)})
    options.check()
    text = Text(read_text(options.data, options.directory), options.context, options.seed)
    accelerator = accelerators.current()
    if is_rank():
        return _train(options, text)
    done = check_same(options, options.identity(text.digest))  # done before ranks are started, which would all report it
    if done >= options.steps and options.report.is_file():  # a program that was killed after its last step has no report yet
        tell(options.json, {"steps": done, "begun_at": done, **_files(options)}, (
            f"The training in {options.directory} is complete, at step {done}. Its report is {options.report}. To go on, raise "
            "--steps; to train from the beginning, give another --directory."
        ))  # fmt: skip
        return DONE
    usual = 2 if accelerator.device().type == "cpu" else accelerator.device_count()
    ranks = usual if args.ranks is None else args.ranks
    if ranks < 1 or args.restarts < 0:
        raise ValueError(f"Cannot train with --ranks {ranks} --restarts {args.restarts}: the least is 1 and 0. Raise them.")
    options.check_ranks(ranks)
    if options.tensorboard:
        board_writer()
    check_directory(options)
    if ranks == 1:
        return _train(options, text)
    status = launch([str(Path(__file__).parent), *words], ranks, args.restarts)
    return NOBODY_READS if status == DONE and has_no_reader(unknown=False) else status


def _files(options: Options) -> dict[str, str]:
    """Returns the paths of what a training leaves."""
    return {"report": str(options.report), "records": str(options.records), "checkpoints": str(options.checkpoints)}


def _train(options: Options, text: Text) -> int:
    """Trains as one rank, and returns the exit status; rank 0 also prints the answer."""
    try:
        return _trained(options, text)
    except (BrokenPipeError, NotWritten):
        raise
    except OSError as error:
        raise not_written(error.filename or options.directory, error) from error.__cause__


def _trained(options: Options, text: Text) -> int:
    from .display import Display
    from .loop import read_records, train
    from .model import write
    from .report import write_report
    from .stages import measure_stages, stages_table

    display = Display(options.steps, options.log_every, options.json)
    try:
        result = train(options, text, display.show)
    finally:
        display.close()
    engine = result.engine
    is_first = engine.optimizer.sharding.group.rank == 0
    if result.stopped_by is not None:
        if is_first:
            complain(
                f"Stopped at step {engine.global_steps} of {options.steps} ({result.stopped_by}), which is saved in "
                f"{options.directory}. The same command goes on."
            )
        return INTERRUPTED
    stages = measure_stages(options)
    if is_first:
        records, sample = read_records(options.records), write(engine.module, b"def ", _SAMPLE_BYTES, options.seed)
        numel = sum(param.numel() for param in engine.module.parameters())
        ranks = f"{records[-1]['ranks']} rank{'s' * (records[-1]['ranks'] > 1)}"
        speed = sum(record["tokens_per_second"] for record in records) / len(records)
        summary = (
            f"{numel:,} parameters at stage {options.stage} on {ranks} ({engine.device.type}), "
            f"{options.steps} steps on {text.num_bytes:,} bytes of text: loss {records[0]['loss']:.4f} to "
            f"{records[-1]['loss']:.4f}, {speed:,.0f} tokens/s"
        )
        shown = stages_table(stages)
        write_report(options.report, records, summary, shown, sample)
        files = _files(options)
        answer = {
            "parameters": numel, "steps": options.steps, "begun_at": result.begun_at, "loss": records[-1]["loss"],
            "tokens_per_second": speed,
            "stages": [{"stage": stage, **two.as_dict()} for stage, two in stages.items()],
            "sample": sample, **files,
        }  # fmt: skip
        lines = [summary, "", "Bytes of rank 0, counted in two steps of each stage, and as predicted:", shown, "",
                 "It writes:", sample, "", *(f"{name:12} {path}" for name, path in files.items())]  # fmt: skip
        with unless_nobody_reads():
            tell(options.json, answer, "\n".join(lines))
    engine.close()
    return DONE
