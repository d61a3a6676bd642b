"""A recipe as a record: everything that the rest of the system asks about one.

Standard library only. A new recipe is a folder below ``training`` whose ``__init__.py`` holds such
a record as ``RECIPE``, and an entry in ``training.recipes.ALL``; nothing else compares recipes by
name. Modules are named by strings, so that a laptop can read the record without torch.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from importlib import import_module
from typing import Any, Final

from contract import runs, text
from contract.errors import InputError
from training.data import catalog
from training.data.download import Report
from training.record.events import Evaluation, Measure
from training.record.result import Result
from training.settings import RunConfig, Value

#: A weighted mixture of data sets, which earlier releases trained on.
_MIXTURE: Final = re.compile(r"[\d.]+\s+\S.*,\s*[\d.]+\s+\S.*")


class ModelForm(StrEnum):
    """Form in which a complete run holds its model."""

    FOLDER = "folder"
    """The folder ``model/``, which transformers loads."""
    SHARDED = "sharded"
    """Checkpoints in parts: ``training.export`` makes such a folder of the newest."""
    NONE = "none"
    """Nothing: the recipe trains none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One way to train something, or to measure what training depends on."""

    name: str
    """Name of the recipe on the command line."""
    config: type[RunConfig]
    """Its settings."""
    presets: Mapping[str, Mapping[str, Value]]
    """Named starting points. The first one is used when ``--data`` is given and no preset."""
    built_in_data: str
    """Name of the data used without ``--data``; it comes with the installed packages."""
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
    """Modules that the loop imports late; ``--local`` loads them before it forks workers."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of its workers, beside what they have anyway."""
    measures: tuple[Measure, ...] = ()
    """Figures besides the loss by which its runs are judged. Evaluations and results have fields of
    these names; the display, the report and ``trainctl show`` print them."""
    model: ModelForm = ModelForm.FOLDER
    """Form of the model at the end of a run."""
    usage: tuple[str, ...] = ()
    """Python that uses a trained model, which is in the folder ``{model}``."""
    own_models: tuple[str, ...] = ()
    """Values of its setting ``model`` that transformers does not know."""
    rebuild: str = ""
    """Module with ``rebuild(settings, model_config, device)``, for sharded checkpoints: makes the
    run's model as it was before training, unsharded and with its first weights, in one process
    that only reads."""
    is_planned: bool = False
    """True if ``training.plan`` can compute what fits: the settings describe a sharded language
    model (``training.models.estimates.Setup``)."""
    check: Callable[[str, Mapping[str, Value]], None] | None = None
    """Called with a preset's name and the settings that it and the user give, without defaults;
    raises InputError where one is missing."""

    def __post_init__(self) -> None:
        assert self.built_in_preset in self.presets
        assert (self.model is ModelForm.SHARDED) == bool(self.rebuild)
        taken = {each.name for record in (Evaluation, Result) for each in fields(record)}
        for measure in self.measures:
            assert measure.name.isidentifier(), measure.name
            assert measure.name not in taken | {"type"}, f"{measure.name} is a field of the record"

    def preset_for(self, data: str | None) -> str:
        """Name of the preset that is used when none is given."""
        return self.built_in_preset if data is None else next(iter(self.presets))

    def check_data(self, data: str | None) -> None:
        """
        Raises:
            InputError: ``data`` names a published data set that this recipe does not train on, or
                several data sets with weights.
        """
        if data is None:
            return
        if _MIXTURE.fullmatch(data):
            raise InputError(
                f"--data is {data}, and mixtures are no longer supported: sample the sources into "
                "one folder, and give that"
            )
        catalog.check_kind(data, self.data_kind)

    def train(self) -> Callable[..., None]:
        """Import the loop; return its ``train(worker, config)``."""
        function: Callable[..., None] = import_module(self.loop).train
        return function

    def look_at(self, config: RunConfig) -> None:
        """Check cheaply, before anything starts, whether the data and the model are there.

        Raises:
            InputError: one is not.
        """
        if self.inputs and (self.is_planned or config.data != self.built_in_data):
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
        paths, name = runs.RunPaths(run_uri), run_uri.rpartition("/")[2]
        in_bucket = "://" in run_uri
        whole = f"trainctl download {name}" if in_bucket else paths.model
        own = f"{text.program('python')} -m training.export {run_uri}"
        export = f"trainctl export {name}" if in_bucket else own
        model = {
            ModelForm.FOLDER: {"model": whole},
            ModelForm.SHARDED: {"export": f"{export} --to DIR"},
            ModelForm.NONE: {},
        }
        return {"report": paths.file(runs.REPORT_FILE), **model[self.model]}

    def use(self, run_uri: str, settings: Mapping[str, object]) -> list[str]:
        """Lines that use the model of a complete run: commands, then Python.

        Args:
            settings: those of the run.
        """
        name, in_bucket = run_uri.rpartition("/")[2], "://" in run_uri
        if self.model is ModelForm.SHARDED:
            lines, folder = [self.places(run_uri)["export"]], "DIR"
        elif self.model is ModelForm.FOLDER:
            predict = f"trainctl predict {name}"
            if not in_bucket:
                predict = f"{text.program('trainctl')} predict {run_uri}"
            lines, folder = [f"{predict} PICTURE"], run_uri
            if settings.get("model") in self.own_models:
                return lines
            if in_bucket:
                lines, folder = [*lines, self.places(run_uri)["model"]], name
            folder += f"/{runs.MODEL_DIR}"
        else:
            return []
        return [*lines, "# in Python:", *(line.format(model=folder) for line in self.usage)]

    def rebuilt(
        self, settings: Mapping[str, object], model_config: Mapping[str, object], device: object
    ) -> Any:
        """The model of a run with sharded checkpoints, a ``torch.nn.Module``, before training.

        Args:
            settings: those of the run.
            model_config: from the ``config.json`` of one of its checkpoints.
            device: the ``torch.device`` that holds it.
        """
        return import_module(self.rebuild).rebuild(settings, model_config, device)

    def check_sharded(self, run: str, *, run_uri: str) -> None:
        """Fail unless a run's checkpoints are in parts, so that a model has to be made of them.

        Raises:
            InputError: its model is whole, or it has none.
        """
        if self.model is ModelForm.FOLDER:
            model = runs.RunPaths(run_uri).model
            how = f"; trainctl download {run} fetches it" if "://" in model else ""
            raise InputError(
                f"run {run!r} was trained with {self.name}, whose model is whole already: it is in "
                f"{model}{how}"
            )
        if self.model is ModelForm.NONE:
            raise InputError(
                f"run {run!r} is one of recipe {self.name}, which trains no model: there is "
                "nothing to export or to generate text with; give the name of another run"
            )
