"""Processes of tests that need torch: forked from one that has imported it, once for all of them.

A process that imports torch and transformers itself takes five CPU seconds before it does anything.
Not for tests that change variables of the environment: a fork has those of the first.
"""

import multiprocessing
from typing import Final

#: ``multiprocessing`` knows the method by this name.
METHOD: Final = "forkserver"
FORKS: Final = multiprocessing.get_context(METHOD)
# Nothing of this project: another checkout may be the one that is installed.
FORKS.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed.fsdp", "accelerate", "sklearn.datasets"),
        *("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
        *("transformers.models.gpt_neox.modeling_gpt_neox",),
        *("transformers.models.llama.modeling_llama",),
        *("transformers.models.efficientnet.modeling_efficientnet",),
        *("transformers.models.resnet.modeling_resnet",),
    ]
)
