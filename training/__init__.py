"""Training on many GPUs: recipes, and what they share.

``python -m training.launch ddp --local`` starts one. The training scripts are ``ddp/train.py`` and
``fsdp/train.py``, with ``imagenet/train.py`` and ``bandwidth/train.py`` beside them.
"""

__version__ = "0.2.0"
