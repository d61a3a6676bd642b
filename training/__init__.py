"""Training on many GPUs: recipes, and what they share.

``python -m training.launch ddp --local`` is the way in; ``training.recipes`` has the loops to read.
"""

__version__ = "0.1.0"
