"""What a program needs of PyTorch to be watched; the real one takes seconds to import."""

from pathlib import Path
from typing import Final

_FILES: Final = {
    "torch/__init__.py": "",
    "torch/optim/__init__.py": "",
    "torch/optim/optimizer.py": """
hooks = []
register_optimizer_step_post_hook = hooks.append
class Optimizer:
    def step(self):
        for hook in hooks:
            hook(self, (), {})
""",
    "torch/distributed/__init__.py": """
import time
def is_available():
    return False
def all_reduce():
    time.sleep(30)
""",
}


def write_program(folder: Path, program: str) -> Path:
    """Write ``program.py``, and the package ``torch`` beside it."""
    for name, content in {**_FILES, "program.py": program}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder / "program.py"
