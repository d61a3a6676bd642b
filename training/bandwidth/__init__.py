"""Bandwidth: how fast workers exchange data, before a job depends on it. See ``train.py``."""

from typing import Final

from training.bandwidth.settings import PRESETS, BandwidthConfig
from training.recipe import ModelForm, Recipe
from training.record.events import Measure

# Bus bandwidth.
ALL_REDUCE: Final = Measure(name="all_reduce", label="all-reduce", unit="GB/s")

RECIPE: Final = Recipe(
    name="bandwidth",
    config=BandwidthConfig,
    presets=PRESETS,
    built_in_data="none",
    built_in_preset="all",
    data_help="none: nothing is trained",
    loop="training.bandwidth.train",
    measures=(ALL_REDUCE,),
    model=ModelForm.NONE,
    variables={
        # NCCL tells only in its log over what it sends; read by ``training.system.devices``.
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": "/tmp/nccl-%h-%p.log",
    },
)
