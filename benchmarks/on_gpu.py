"""First commands for a machine with GPUs: a check that everything works, and how fast it is.

    python -m benchmarks.on_gpu --to DIR [--only NAME ...]

Each step is a command that a user could type; its output goes into a file of its name below
``DIR``, and a table of results is printed at the end. The first steps check that the recipes train,
save and export; the rest are the benchmarks that need a GPU. A step that fails does not keep the
others from running. No step interrupts a run and resumes it.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from benchmarks.tables import report, say
from training.system import devices

_LAUNCH: Final = "python -m training.launch"
#: Three epochs of pictures that are made on the GPU: in the first cuDNN chooses its algorithms, and
#: the result has the median.
_PICTURES: Final = (
    f"{_LAUNCH} imagenet --local --preset resnet50 --json --epochs 3 --checkpoint-every-epochs 3 "
    "--image-size 224 --first-size 0"
)
#: On the built-in text, as bytes: no download.
_FSDP: Final = f"{_LAUNCH} fsdp --local --model new:160m --seq-len 512 --max-steps 20 --json --run"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchmarkStep:
    """A command, and its time limit."""

    name: str
    words: str
    """``python`` stands for the interpreter that runs this, ``{gpus}`` for their number, ``{runs}``
    for the folder of the runs, ``{data}`` for FashionMNIST's."""
    limit_s: int = 300
    least_gpus: int = 1


STEPS: Final = (
    BenchmarkStep(
        name="gpus",
        words="python -c 'import sys; from containers.host import hardware; "
        "sys.exit(hardware.gpu_faults({gpus}) or 0)'",
        limit_s=120,
    ),
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
    BenchmarkStep(
        name="bandwidth",
        words=f"{_LAUNCH} bandwidth --local --run links --json",
        least_gpus=2,
    ),
    BenchmarkStep(name="gpu_fsdp", words="python -m benchmarks.gpu_fsdp", limit_s=600),
    BenchmarkStep(
        name="gpu_fsdp-eager",
        words="python -m benchmarks.gpu_fsdp --cases 0.6b --eager",
        limit_s=600,
    ),
    # Figures of the table of the public posts (docs/benchmarks.md).
    BenchmarkStep(
        name="fashion",
        words=f"{_LAUNCH} ddp --local --run posts --json --data {{data}} --preset tuned",
        limit_s=480,
    ),
    BenchmarkStep(
        name="dolly",
        words="python -m benchmarks.gpu_fsdp --cases 6.9b --without-trainer",
        limit_s=480,
    ),
    BenchmarkStep(
        name="resnet50",
        words=f"{_PICTURES} --run resnet50 --batch-per-worker 256 --synthetic-images 15360",
        limit_s=480,
    ),
    BenchmarkStep(
        name="b7",
        words=f"{_PICTURES} --run b7 --model efficientnet-b7 --batch-per-worker 64 "
        "--synthetic-images 3840",
        limit_s=480,
    ),
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
    outcomes: dict[str, StepOutcome] = {}
    for step in STEPS:
        if step.name not in (options.only or [step.name]):
            continue
        if len(gpus) < step.least_gpus:
            say(f"{step.name}: left out, it needs more GPUs")
            continue
        words = command(step, gpus=len(gpus), runs=folder / "runs", data=options.data)
        outcomes[step.name] = run(words, folder / f"{step.name}.txt", limit_s=step.limit_s)
        say(f"{step.name}: {in_words(outcomes[step.name])}")
    worked = [name for name, outcome in outcomes.items() if outcome.exit_code == 0]
    result = {
        "benchmark": "on_gpu",
        "ratio": len(worked) / max(1, len(outcomes)),
        "gpus": gpus,
        "steps": {name: asdict(outcome) for name, outcome in outcomes.items()},
    }
    report(result)
    return 0 if len(worked) == len(outcomes) else 1


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


def in_words(outcome: StepOutcome) -> str:
    """``worked, 41 s``."""
    how = {0: "worked", None: "did not end in time"}.get(
        outcome.exit_code, f"failed with exit code {outcome.exit_code}"
    )
    return f"{how}, {outcome.seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
