"""Code of Lambda functions that use the project's ``contract`` package."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def stage(function: Path, folder: Path) -> None:
    """Copy a function's module and ``contract`` into a folder, as Lambda shall see them."""
    shutil.copy(function, folder / function.name)
    target = folder / "contract"
    target.mkdir()
    for module in sorted((ROOT / "contract").glob("*.py")):
        shutil.copy(module, target / module.name)


@contextlib.contextmanager
def staged(function: Path) -> Iterator[str]:
    """A folder with the code; CDK copies it while the function is being defined."""
    with tempfile.TemporaryDirectory(prefix="lambda-") as folder:
        stage(function, Path(folder))
        yield folder
