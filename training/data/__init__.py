"""Data sets: found, read, and put in the order of the steps. This file is for laptops too."""

from typing import Final

#: What trains without ``--data``, because it comes with packages that are installed anyway.
DIGITS: Final = "digits"  # scikit-learn's images
PYTHON_HELP: Final = "python-help"  # the help texts of Python itself
