"""What the command of ``--code`` runs, as far as a laptop can read it: nothing is executed.

The files that it names and the modules of the folder that they import, by Python's own parser.
Where that is not clear, such as for a module that is installed, nothing is concluded.
"""

import ast
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from contract import requirements
from contract.text import listed
from trainctl import code_folder, launchers
from trainctl.code_folder import CodeFolder

#: Import name and name of the package, where they differ.
_PACKAGES: Final = {
    "PIL": "pillow",
    "absl": "absl-py",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "functorch": "torch",
    "git": "gitpython",
    "google": "protobuf",
    "grpc": "grpcio",
    "mpl_toolkits": "matplotlib",
    "opentelemetry": "opentelemetry-api",
    "pkg_resources": "setuptools",
    "pylab": "matplotlib",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "torchgen": "torch",
    "yaml": "pyyaml",
}
#: Lines of a requirements.txt that name no package: other files, folders, addresses.
_NO_NAME: Final = re.compile(r"(?m)^\s*(-r|-e|--requirement|--editable|\.|/|[\w+]+:)")
#: Signs of a program whose processes share their work, or that asks which of them it is.
_SHARES: Final = re.compile(
    r"\.distributed\b|import distributed|init_process_group|accelerate|lightning|\bray\b"
    r"|Trainer|deepspeed|horovod|mpi4py|jax|RANK\b|WORLD_SIZE|NUM_NODES|MASTER_ADDR"
    r"|megatron|mmengine|colossalai|torch_xla|TF_CONFIG|MultiWorker|SLURM_"
)
#: No path of a file is longer.
_LONGEST: Final = 255
#: Relative paths of files with settings; and names of what a program writes.
_SETTINGS: Final = re.compile(r"[\w-][\w./-]*\.(ya?ml|json|toml)")
_WRITTEN: Final = re.compile(r"out|save|log|report|dump|dest|result|>")


class Import(NamedTuple):
    """An imported module."""

    module: str
    """With dots; of ``from a import b``, ``a.b``."""
    level: int
    """Leading dots of a relative import."""
    is_certain: bool
    """True if every start of the file gets to it: neither in a function nor in a ``try``."""


class Program:
    """A command and the files of a code folder that it starts."""

    def __init__(self, code: CodeFolder, words: Sequence[str]) -> None:
        self.code, self._words = code, words
        self._folder = folder = code.path
        self._packages = code.packages
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
        self._certain: set[Path] = set()
        """Those of them that every start imports."""
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
        todo = [(path, True) for path in self.entries]
        roots = [self._folder / root for root in requirements.source_folders(self._folder)]
        roots += [entry.parent for entry in self.entries]
        while todo:
            path, is_certain = todo.pop()
            if path in (self._certain if is_certain else found) or not path.is_file():
                continue
            if is_certain:
                self._certain.add(path)
            found[path] = [*_imports_of(path)]
            for each in found[path]:
                is_met = is_certain and each.is_certain
                for place in [*path.parents][each.level - 1 : each.level] if each.level else roots:
                    base = place
                    for part in each.module.split("."):  # packages run before their modules
                        base /= part
                        todo += [(base.with_suffix(".py"), is_met), (base / "__init__.py", is_met)]
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

    def warnings(self, options: Sequence[str]) -> list[str]:
        """What is probably wrong with it.

        Args:
            options: names of those of the command that submits it.
        """
        program = code_folder.program_of(self._words).removeprefix("-m ")
        after = " ".join(self._words).partition(f"{program} ")[2] if self.entries else ""
        text = _plain("".join(path.read_text(errors="replace") for path in self._imports))
        # A program that has an option mentions it, as one or as a field.
        found = [
            f"--{name} is passed to the program, which does not mention it: an option of the job "
            "comes before the --"
            for name in options
            if re.search(rf"(^| )--{name}(=| |$)", after) and _plain(name) not in text
        ]
        if missing := self._missing():
            found.append(
                f"{self.entries[0].name} imports {listed(missing)}: neither in the images nor "
                f"in {self._packages or requirements.REQUIREMENTS_TXT}"
            )
        if not self._packages and (unread := requirements.unread(self._folder)):
            found.append(
                f"{listed(unread)}: not read; list the packages in {requirements.REQUIREMENTS_TXT}"
            )
        return [*found, *self._absent()]

    def _absent(self) -> Iterator[str]:
        """Paths in the command that no node will have, in words."""
        uploaded = {path.resolve() for path in self._files.values()}
        uploaded |= {folder for path in uploaded for folder in path.parents}
        before = ""
        for word in " ".join(self._words).split():
            name, equals, value = word.partition("=")
            text = (value if equals else word).strip("\"';")
            option = name if equals else before
            before = word if word.startswith("-") or ">" in word else ""
            path = self._folder / text
            is_known = len(text) > _LONGEST or path.resolve() in uploaded
            if is_known or text.startswith("-") or _WRITTEN.search(option):
                continue
            if path.exists() and not os.path.isabs(text):
                yield f"{text}, which the command names, is not uploaded: git ignores it"
            elif path.exists() and path.is_relative_to(os.path.expanduser("~")):
                yield f"{text}, which the command names, is a path of this machine"
            # Hydra looks for it in a folder that its program names.
            elif (
                _SETTINGS.fullmatch(text)
                and not _WRITTEN.search(text)
                and not any(f"/{file}".endswith(f"/{text}") for file in self._files)
            ):
                yield f"{text}, which the command names, is not in {self._folder}"

    def _missing(self) -> list[str]:
        """Modules that the entry files import in any case, and that no node will have.

        Empty where that is not known: this is no checkout, which has the list of the images'
        packages; the command installs some itself; the folder's list refers to other places.
        """
        lock = Path(__file__).parents[1] / "requirements.lock"
        name = self._packages
        text = (self._folder / name).read_text(errors="replace") if name else ""
        is_txt = name == requirements.REQUIREMENTS_TXT
        if not lock.exists() or "install" in self.text or (is_txt and _NO_NAME.search(text)):
            return []
        images = re.findall(r"(?m)^[\w.-]+", _plain(lock.read_text()))
        own = {part for file in self._files for part in file.removesuffix(".py").split("/")}
        known = own | sys.stdlib_module_names
        packages = {
            module: _plain(_PACKAGES.get(module, module))
            for path in sorted(self._certain)
            for each in self._imports[path]
            if each.is_certain and not each.level
            for module in each.module.split(".")[:1]
        }
        # A list has variants too: opencv-python-headless.
        return [
            module
            for module, package in packages.items()
            if not (module in known or package in images or package in _plain(text))
        ]


def _plain(names: str) -> str:
    return names.lower().replace("-", "_")


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
            yield Import(name, 0, is_certain=False)
        return
    always = {*map(id, tree.body)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base, level = getattr(node, "module", None), getattr(node, "level", 0)
            for alias in node.names:
                # What is imported from a package may be a module of it.
                module = f"{base}.{alias.name}" if base else alias.name
                yield Import(module, level, is_certain=id(node) in always)
