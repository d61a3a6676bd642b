"""``trainctl predict``: a run's model classifies pictures, on this machine."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from contract.runs import MODEL_DIR, PROCESSOR_FILE, run_prefix
from contract.text import percent
from trainctl import output
from trainctl.aws.errors import UsageError
from trainctl.here import needs_packages
from trainctl.options import AsJson, WhereOrHere

#: Classes that are printed of each picture.
_MOST = 5


def predict(
    *,
    run: Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.")],
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Pictures.")],
    as_json: AsJson = False,
    where: WhereOrHere,
) -> None:
    """Classify pictures with a run's model, on this machine, which needs torch."""
    for file in files:
        if not file.is_file():
            raise UsageError(f"there is no file {file}: give pictures")
    with needs_packages():
        from training.predict import predictions
    with tempfile.TemporaryDirectory(prefix="model-") as fetched:
        folder = Path(run, MODEL_DIR)
        if "/" in run and not folder.is_dir():
            raise UsageError(f"there is no folder {folder}: give the name or the folder of a run")
        if not folder.is_dir():
            folder, prefix = Path(fetched), f"{run_prefix(run)}{MODEL_DIR}/"
            where.find().bucket.fetch(prefix, folder)
        if not (folder / PROCESSOR_FILE).is_file():
            raise UsageError(
                f"run {run} has no {MODEL_DIR}/{PROCESSOR_FILE}: only a complete run on pictures "
                "classifies one; of an earlier version it has to be trained again"
            )
        found = [*predictions(folder, files)]
    if as_json:
        named = zip(files, found, strict=True)
        output.print_json([{"file": str(file), "classes": each} for file, each in named])
        return
    for file, classes in zip(files, found, strict=True):
        likely = [f"{name} {percent(value)}" for name, value in [*classes.items()][:_MOST]]
        output.print_text(f"{file}: {', '.join(likely)}")
