"""A recipe as a record: everything that the rest of the system asks about one.

Standard library only. A new recipe is a folder below ``training/recipes`` whose ``__init__.py``
holds such a record as ``RECIPE``, and an entry in ``training.recipes.ALL``; nothing else compares
recipes by name. Modules are named by strings, so that a laptop can read the record without torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from contract import runs
from training.data import catalog
from training.recipes.settings import RunConfig, Value

Report = Callable[[int, int], None]
"""Is called with the bytes read so far and the bytes to read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One way to train something."""

    name: str
    """What the command line calls it."""
    config: type[RunConfig]
    """Its settings."""
    presets: Mapping[str, Mapping[str, Value]]
    """Named starting points. The first one is used when ``--data`` is given and no preset."""
    built_in_data: str
    """What it trains on without ``--data``: something that comes with the installed packages."""
    built_in_preset: str
    """The preset that suits the built-in data."""
    data_help: str
    """Help text of ``--data``."""
    data_kind: str = ""
    """Kind of the published data sets (``training.data.catalog``) that suit it; empty: any."""
    loop: str
    """Module whose ``train(worker, config)`` is the training loop."""
    inputs: str = ""
    """Module with ``look_at(config)`` and ``prepare(config, report)``; it must be importable
    without torch. Empty: there is no data to look at before the loop runs."""
    preload: tuple[str, ...] = ()
    """Modules that the loop imports late; a fork server imports them before it forks workers."""
    is_sharded: bool = False
    """Checkpoints are in parts: ``training.export`` and ``training.generate`` read them. Otherwise
    a finished run has its model in a folder that transformers loads."""
    check: Callable[[str, Mapping[str, Value]], None] | None = None
    """Called with a preset's name and the settings that it and the user give, without defaults;
    raises InputError where one is missing."""

    def __post_init__(self) -> None:
        assert self.built_in_preset in self.presets

    def preset_for(self, data: str | None) -> str:
        """Name of the preset that is used when none is given."""
        return self.built_in_preset if data is None else next(iter(self.presets))

    def check_data(self, data: str | None) -> None:
        """
        Raises:
            InputError: ``data`` names a published data set that this recipe does not train on.
        """
        if data is not None:
            catalog.check_kind(data, self.data_kind)

    @property
    def preloads(self) -> str:
        """Modules that a worker imports sooner or later, as ``training.runtime.forkserver`` takes
        them."""
        return ",".join((self.loop, *self.preload))

    def train(self) -> Callable[..., None]:
        """Import the loop; return its ``train(worker, config)``."""
        function: Callable[..., None] = import_module(self.loop).train
        return function

    def look_at(self, config: RunConfig) -> None:
        """Check cheaply, before Ray starts, whether the data is there.

        Raises:
            InputError: it is not.
        """
        if self.inputs and config.data != self.built_in_data:
            import_module(self.inputs).look_at(config)

    def prepare(self, config: RunConfig, report: Report | None = None) -> RunConfig:
        """Read a run's data before any worker does, and make of it what they share.

        Args:
            report: called while that takes time.

        Returns:
            The settings, with what was decided.

        Raises:
            InputError: the data cannot be used; reported here once, and not by every worker.
        """
        if not self.inputs:
            return config
        module: Any = import_module(self.inputs)
        prepared: RunConfig = module.prepare(config, report)
        return prepared

    def places(self, run_uri: str) -> dict[str, str]:
        """Where the report and the model of a complete run are, or how to get them."""
        paths = runs.RunPaths(run_uri)
        model = f"python -m training.export {run_uri} --to DIR" if self.is_sharded else paths.model
        return {"report": paths.file(runs.REPORT_FILE), "model": model}
