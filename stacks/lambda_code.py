"""Code of Lambda functions that use the project's ``contract`` package."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def stage(function: Path, folder: Path) -> None:
    """Copy a function's module, its package and ``contract`` into a folder, as Lambda shall see
    them."""
    shutil.copy(function, folder / function.name)
    for package in (ROOT / "contract", function.parent):
        target = folder / package.relative_to(ROOT)
        target.mkdir(parents=True)
        for module in sorted({*package.glob("*.py")} - {function}):
            shutil.copy(module, target / module.name)


@contextlib.contextmanager
def staged(function: Path) -> Iterator[str]:
    """A folder with the code; CDK copies it while the function is being defined."""
    with tempfile.TemporaryDirectory(prefix="lambda-") as folder:
        stage(function, Path(folder))
        yield folder
