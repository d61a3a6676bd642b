"""What the command of ``--code`` runs, as far as a laptop can read it: nothing is executed.

The files that it names and the modules of the folder that they import, by Python's own parser.
Where that is not clear, such as for a module that is installed, nothing is concluded.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from contract import requirements
from trainctl import code_folder, launchers
from trainctl.code_folder import CodeFolder

#: Signs of a program whose processes share their work, or that asks which of them it is.
_SHARES: Final = re.compile(
    r"\.distributed\b|import distributed|init_process_group|accelerate|lightning|\bray\b"
    r"|Trainer|deepspeed|horovod|mpi4py|jax|RANK\b|WORLD_SIZE|NUM_NODES|MASTER_ADDR"
    r"|megatron|mmengine|colossalai|torch_xla|TF_CONFIG|MultiWorker|SLURM_"
)


class Import(NamedTuple):
    """An imported module."""

    module: str
    """With dots; of ``from a import b``, ``a.b``."""
    level: int
    """Leading dots of a relative import."""


class Program:
    """A command and the files of a code folder that it starts."""

    def __init__(self, code: CodeFolder, words: Sequence[str]) -> None:
        self.code, self._words = code, words
        self._folder = folder = code.path
        files = [path for path in code.files if path.is_file()]
        self._files = {path.relative_to(folder).as_posix(): path for path in files}
        self.text = " ".join(words)
        """The command, and the shell scripts that it starts."""
        self.entries: list[Path] = []
        """The Python files that it starts."""
        # The first file, or module, is the program of a launcher; what follows are its arguments.
        todo = [code_folder.program_of(words) or self.text]
        while todo:
            for path in self._named(todo.pop()):
                if path.suffix == ".py":
                    self.entries.append(path)
                elif path in files:
                    files.remove(path)  # it may name itself
                    todo.append(re.sub(r"(?m)^\s*#.*", "", path.read_text(errors="replace")))
                    self.text += f"\n{todo[-1]}"
        self._imports = self._found()
        """Of those, and of the modules of the folder that they lead to, by file."""

    def _named(self, text: str) -> list[Path]:
        """The files that a text names, and those of modules after ``-m``."""
        found = []
        for module, name in re.findall(r"-m\s+([\w.]+)|([\w./-]+\.(?:py|sh))\b", text):
            base = module.replace(".", "/")
            ends = (f"/{base}.py", f"/{base}/__main__.py") if module else f"/{Path(name)}"
            matching = [path for each, path in self._files.items() if f"/{each}".endswith(ends)]
            # A shell may be in another folder by then.
            found += sorted(matching, key=lambda path: len(path.parts))[:1]
        return found

    def _found(self) -> dict[Path, list[Import]]:
        found: dict[Path, list[Import]] = {}
        todo = [*self.entries]
        roots = [self._folder / root for root in requirements.source_folders(self._folder)]
        roots += [entry.parent for entry in self.entries]
        while todo:
            path = todo.pop()
            if path in found or not path.is_file():
                continue
            found[path] = [*_imports_of(path)]
            for each in found[path]:
                for place in [*path.parents][each.level - 1 : each.level] if each.level else roots:
                    base = place
                    for part in each.module.split("."):  # packages run before their modules
                        base /= part
                        todo += [base.with_suffix(".py"), base / "__init__.py"]
        return found

    @property
    def of_ray(self) -> str:
        """What of it uses Ray, in words; "" where nothing does, or another launcher starts it."""
        if launchers.starts_on_nodes(self.text):
            return ""
        if re.search(r"^ray |-m (?:ray|verl|openrlhf)\b", self.text):
            return "its command"
        for path, imports in self._imports.items():
            if any(f"{each.module}.".startswith("ray.") for each in imports if not each.level):
                return str(path.relative_to(self._folder))
        return ""

    @property
    def is_alone(self) -> bool:
        """True for one process of which each node would run the same: ``python FILE`` in a folder
        that never mentions other processes."""
        if not self.entries or not re.fullmatch(r"python[\d.]*", self._words[0]):
            return False
        sources = [path for path in self._files.values() if path.suffix in (".py", ".sh")]
        texts = [self.text, *(path.read_text(errors="replace") for path in sources)]
        return not any(map(_SHARES.search, texts))


def _imports_of(path: Path) -> Iterator[Import]:
    """The imports of a Python file at any depth; of one in another Python's syntax, those that
    stand at the beginning of a line."""
    source = path.read_bytes()
    try:
        with warnings.catch_warnings(action="ignore"):  # the user's code: they are not about this
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        lines = re.findall(rb"(?m)^[ \t]*(?:import|from)\b([^#\n]*)", source)
        for name in re.findall(r"[\w.]+", b" ".join(lines).decode(errors="replace")):
            yield Import(name, 0)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base, level = getattr(node, "module", None), getattr(node, "level", 0)
            for alias in node.names:
                # What is imported from a package may be a module of it.
                module = f"{base}.{alias.name}" if base else alias.name
                yield Import(module, level)
