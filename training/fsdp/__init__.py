"""FSDP: a language model, sharded over all workers. The script is ``train.py``."""

from collections.abc import Mapping
from typing import Final

from contract.errors import InputError
from training.data import PYTHON_HELP, catalog
from training.fsdp.settings import PRESETS, FsdpConfig
from training.recipe import ModelForm, Recipe
from training.record.events import PERPLEXITY
from training.settings import Value


def _check(preset: str, settings: Mapping[str, Value]) -> None:
    if "model" not in settings:
        raise InputError(
            f"preset {preset} needs an existing model: give --model a Hugging Face id, a "
            "folder or an s3:// address (or --preset tiny, a small one with random weights)"
        )


RECIPE: Final = Recipe(
    name="fsdp",
    config=FsdpConfig,
    presets=PRESETS,
    built_in_data=PYTHON_HELP,
    built_in_preset="tiny",
    data_help=f"text: {', '.join(catalog.names(catalog.TEXT))}, a file, a folder, http(s)://, "
    "s3:// or a Hugging Face data set, hf://owner/name[/CONFIGURATION[/SPLIT]], as .txt, "
    ".jsonl, .parquet, .json or .csv, all but .txt also of conversations "
    "(default: Python's help texts)",
    data_kind=catalog.TEXT,
    inputs="training.fsdp.inputs",
    loop="training.fsdp.train",
    preload=(
        "torch._dynamo",  # torch's optimizers import it
        "transformers.models.auto.modeling_auto",
        "transformers.models.gpt_neox.modeling_gpt_neox",
    ),
    variables={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},  # no gaps: 2-10 % of memory
    measures=(PERPLEXITY,),
    model=ModelForm.SHARDED,
    usage=(
        "from transformers import pipeline",
        'print(pipeline("text-generation", "{model}")("Once upon a time"))',
    ),
    rebuild="training.fsdp.model",
    is_planned=True,
    check=_check,
)
