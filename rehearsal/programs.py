"""Programs that ``make abuse`` runs while their nodes are killed, and what they print."""

import importlib.util
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rehearsal.cycle import RehearsalError
from rehearsal.local_aws import ROOT
from rehearsal.watch import Line

_STARTS: Final = re.compile(r"\brank (\d+) of (\d+) starts at \D*(\d+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program as a user brings it, long enough to lose two nodes."""

    name: str
    words: tuple[str, ...]
    """Its command."""
    source: str = ""
    """``PACKAGE:FILE`` where it is an installed package's; else it is in ``examples/NAME``."""
    ends_with: Mapping[str, int] = field(default_factory=dict)
    """Of its result, what must be exactly so."""
    is_seeded: bool = True
    """It ends with the same figures after any interruption."""
    progress: str = ""
    """Pattern of a line with how far it is; empty: its lines are counted."""
    steps: int = 1
    """What such a line counts by, in the steps of the line with which it starts."""
    length: float
    """How far it is at its end, in the same."""
    prints_saves: bool = False
    """It saves whenever it prints such a line."""
    file: str = ""
    """The end of the path of a file that each save writes; empty: it saves nothing."""
    has_ranks: bool = True
    """It prints which rank it is and where it starts, and its result."""
    ends_saying: str = ""
    """A part of what it prints at its end, where it prints no result."""

    def bring(self, folder: Path) -> Path:
        """Put its files into a new folder below ``folder``; return that."""
        place = folder / self.name
        if not self.source:
            return Path(shutil.copytree(ROOT / "examples" / self.name, place))
        package, _, file = self.source.partition(":")
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            raise RehearsalError(f"{self.name} needs the package {package}: make venv-dev")
        place.mkdir()
        shutil.copy(Path(found.origin).parent / file, place)
        return place


PROGRAMS: Final = (
    Program(
        name="ddp",
        words=("torchrun", "train.py", "--steps", "24000", "--save-every", "400"),
        ends_with={"steps": 24000, "world_size": 2},
        progress=r"^step (\d+) loss",
        length=24000,
        prints_saves=True,
        file="work/checkpoint.pt",
    ),
    Program(
        name="gpt",
        words=(
            *("sh", "-c"),
            "python prepare.py && torchrun train.py --steps 3000 --save-every 50",
        ),
        ends_with={"steps": 3000, "world_size": 2},
        progress=r"^step (\d+) loss",
        length=3000,
        prints_saves=True,
        file="out/checkpoint.pt",
    ),
    Program(
        name="hf_trainer",
        words=("torchrun", "train.py", "--max_steps", "2000", "--save_steps", "200"),
        ends_with={"steps": 2000, "world_size": 2},
        progress=r"'epoch': '?([\d.]+)",
        steps=256,
        length=2000,
        file="trainer_state.json",
    ),
    Program(
        name="accelerate",
        words=("torchrun", "train.py", "--epochs", "400"),
        ends_with={"epochs": 400, "world_size": 2},
        progress=r"^epoch (\d+) loss",
        length=400,
        prints_saves=True,
        file="checkpoint/model.safetensors",
    ),
    # Its order of batches follows from the number of workers, which may change on the way; Ray
    # Train takes 2 s for each report.
    Program(
        name="ray_train",
        words=("python", "train.py", "--epochs", "60"),
        ends_with={"epoch": 60, "world_size": 2},
        is_seeded=False,
        progress=r"\bepoch (\d+) loss",
        length=60,
        prints_saves=True,
        # Ray Train writes it some seconds after a checkpoint, which counts only then.
        file="/checkpoint_manager_snapshot.json",
    ),
    # Of the packages' own tests and examples: short, and they save nothing.
    Program(
        name="accelerate_sync",
        source="accelerate:test_utils/scripts/test_sync.py",
        words=("torchrun", "test_sync.py"),
        has_ranks=False,
        is_seeded=False,
        ends_saying="gradient accumulation with optimizer and scheduler",
        length=10,
    ),
    Program(
        name="ray_linear",
        source="ray:train/examples/pytorch/torch_linear_example.py",
        words=("python", "torch_linear_example.py", "-n", "2"),
        has_ranks=False,
        is_seeded=False,
        ends_saying="'loss': ",
        length=5,
    ),
)


def starts_in(lines: Sequence[Line]) -> list[tuple[float, int, int]]:
    """When ranks have started, which ones, and at which step."""
    found = [(line.at, _STARTS.search(line.text)) for line in lines]
    return [(at, int(each[1]), int(each[3])) for at, each in found if each]


def progress_of(program: Program, lines: Sequence[Line]) -> float | None:
    """How far a program is that has printed these lines since it began; None: it trains not yet."""
    if not program.progress:
        return float(len(lines))
    found = [each[1] for line in lines if (each := re.search(program.progress, line.text))]
    return float(found[-1]) * program.steps if found else None
