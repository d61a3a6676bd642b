"""The FSDP recipe's text, looked at before its loop starts. Imports no torch by itself."""

from pathlib import Path

from contract.errors import InputError
from training.data import text
from training.recipes.fsdp.settings import FsdpConfig
from training.recipes.recipe import Report


def look_at(config: FsdpConfig) -> None:
    """Check that a local file or folder is there; what is remote is left to ``prepare``.

    Raises:
        InputError: it is not.
    """
    if "://" not in config.data and not Path(config.data).exists():
        raise InputError(
            f"text {config.data} does not exist: give --data a file, a folder or an address"
        )


def prepare(config: FsdpConfig, report: Report | None = None) -> FsdpConfig:
    """Make the store of a run's text; return the settings with its key.

    Raises:
        InputError: text or tokenizer cannot be used, or the run has been trained on others.
    """
    return text.prepare(config, report)
