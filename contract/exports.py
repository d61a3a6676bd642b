"""What a run's model can be exported as: the command line offers it, a job's head writes it."""

from collections.abc import Mapping
from typing import Final

#: ``--dtype`` -> the name of the type in torch, which this package does not import.
DTYPES: Final[Mapping[str, str]] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
DEFAULT_DTYPE: Final = "fp32"
