"""First commands for a machine with GPUs: a check that everything works, and how fast it is.

    python -m benchmarks.on_gpu --to DIR [--only NAME ...]

Each step is a command that a user could type, and takes three minutes at most; the most telling are
first. Its output goes into a file of its name below ``DIR``, and a table of results is printed at
the end. The same command goes on where it was cut off: steps that worked are not done again. A step
that fails does not keep the others from running.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.tables import report, say
from training.system import devices

_LIMIT_S: Final = 180
_LAUNCH: Final = "python -m training.launch"
#: On the built-in text, as bytes: no download.
_FSDP: Final = f"{_LAUNCH} fsdp --local --model new:160m --seq-len 512 --max-steps 20 --json --run"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkStep:
    """A command."""

    name: str
    words: str
    """``python`` stands for the interpreter that runs this, ``{gpus}`` for their number, ``{runs}``
    for the folder of the runs, ``{data}`` for FashionMNIST's."""
    least_gpus: int = 1


def _beside(number: int) -> list[BenchmarkStep]:
    """A round of the recipes beside other loops, most telling first."""
    cases = ("ddp", "resnet50", "0.4b", "8b-lora", "1.3b")
    words = "python -m benchmarks.gpu {} --data {{data}}"
    return [
        BenchmarkStep(name=f"{case}-beside-{number}", words=words.format(case)) for case in cases
    ]


STEPS: Final = (
    BenchmarkStep(
        name="gpus",
        words="python -c 'import sys; from containers.host import hardware; "
        "sys.exit(hardware.gpu_faults({gpus}) or 0)'",
    ),
    *_beside(1),
    BenchmarkStep(name="second-start", words="python -m benchmarks.gpu 0.4b --alone --rounds 2"),
    *_beside(2),
    BenchmarkStep(
        name="bandwidth", words=f"{_LAUNCH} bandwidth --local --run links --json", least_gpus=2
    ),
    # Figures of the table of the public posts (docs/benchmarks.md).
    BenchmarkStep(
        name="fashion",
        words=f"{_LAUNCH} ddp --local --run posts --json --data {{data}} --preset tuned",
    ),
    BenchmarkStep(name="dolly", words="python -m benchmarks.gpu 6.9b --alone"),
    # Pictures that are made on the GPU: in the first epoch cuDNN chooses its algorithms, and the
    # result has the median.
    BenchmarkStep(
        name="b7",
        words=f"{_LAUNCH} imagenet --local --preset resnet50 --json --epochs 3 --image-size 224 "
        "--checkpoint-every-epochs 3 --first-size 0 --run b7 --model efficientnet-b7 "
        "--batch-per-worker 64 --synthetic-images 3840",
    ),
    # What is saved on a GPU can be loaded, exported and used.
    BenchmarkStep(name="ddp", words=f"{_LAUNCH} ddp --local --run images --json"),
    BenchmarkStep(name="ddp-again", words=f"{_LAUNCH} ddp --local --run images --json"),
    BenchmarkStep(
        name="ddp-torchrun",
        words="python -m torch.distributed.run --standalone --nproc-per-node {gpus} "
        "-m training.launch -- ddp --run images-torchrun --json",
    ),
    BenchmarkStep(name="fsdp", words=f"{_FSDP} text --checkpoint-every 10"),
    BenchmarkStep(name="lora", words=f"{_FSDP} adapters --lora-rank 8"),
    BenchmarkStep(name="export", words="python -m training.export text --to {runs}/exported"),
    BenchmarkStep(name="generate", words="python -m training.generate text 'The function returns'"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutcome:
    """End of a step."""

    exit_code: int | None
    """None: it exceeded its limit."""
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_gpu", description=__doc__)
    parser.add_argument("--to", required=True, metavar="DIR", help="folder of what is printed")
    parser.add_argument("--only", nargs="+", choices=[each.name for each in STEPS], metavar="NAME")
    parser.add_argument("--data", default="fashion-mnist", help="FashionMNIST, if not fetched")
    options = parser.parse_args()
    gpus = devices.gpu_names()
    if not gpus:
        print("error: nvidia-smi shows no GPU here", file=sys.stderr)
        return 2
    folder = Path(options.to).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    summary = folder / "summary.json"
    outcomes = worked_before(summary)
    for step in STEPS:
        if step.name not in (options.only or [step.name]) or step.name in outcomes:
            continue
        if len(gpus) < step.least_gpus:
            say(f"{step.name}: left out, it needs more GPUs")
            continue
        words = command(step, gpus=len(gpus), runs=folder / "runs", data=options.data)
        outcomes[step.name] = run(words, folder / f"{step.name}.txt", limit_s=_LIMIT_S)
        say(f"{step.name}: {outcomes[step.name]}")
        result = summed_up(outcomes, gpus)
        summary.write_text(json.dumps(result, indent=1), encoding="utf-8")
    report(summed_up(outcomes, gpus))
    return 0 if all(each.exit_code == 0 for each in outcomes.values()) else 1


def worked_before(summary: Path) -> dict[str, StepOutcome]:
    """The steps that an earlier command has done."""
    if not summary.exists():
        return {}
    steps = json.loads(summary.read_text(encoding="utf-8"))["steps"]
    found = {name: StepOutcome(**each) for name, each in steps.items()}
    return {name: each for name, each in found.items() if each.exit_code == 0}


def summed_up(outcomes: Mapping[str, StepOutcome], gpus: Sequence[str]) -> dict[str, object]:
    """What is printed, and kept for a command that goes on; the ratio is that of steps that
    worked."""
    worked = [name for name, outcome in outcomes.items() if outcome.exit_code == 0]
    return {
        "benchmark": "on_gpu",
        "ratio": len(worked) / max(1, len(outcomes)),
        "gpus": gpus,
        "steps": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }


def command(step: BenchmarkStep, *, gpus: int, runs: Path, data: str) -> list[str]:
    """The words of a step on this machine."""
    _, *words = (word.format(gpus=gpus, runs=runs, data=data) for word in shlex.split(step.words))
    words.insert(0, sys.executable)
    if any(word.startswith("training.") for word in words):
        words += ["--storage", str(runs)]
    return words


def run(words: Sequence[str], into: Path, *, limit_s: int) -> StepOutcome:
    """Run a command with its output in a file; kill it, and all it started, after its limit."""
    began = time.monotonic()
    with into.open("w", encoding="utf-8") as output:
        print("$", *words, file=output, flush=True)
        process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        code: int | None = None
        try:
            code = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    return StepOutcome(exit_code=code, seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    sys.exit(main())
