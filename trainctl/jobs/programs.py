"""Programs that the command of ``--code`` starts, as far as a laptop can read them: nothing is
executed.

Python's own parser reads the files that the command names and the modules of the folder that they
import. Where that is ambiguous, such as for an installed module, nothing is concluded.
"""

import ast
import os
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from contract import command, requirements
from contract.nodes import SHARED_DIR, Range
from contract.text import listed
from trainctl.aws.errors import UsageError
from trainctl.jobs import other_systems
from trainctl.jobs.code_folder import CodeFolder

#: Signs of a program whose processes share their work, or that asks which of them it is.
_SHARES: Final = re.compile(
    r"\.distributed\b|import distributed|init_process_group|accelerate|lightning|\bray\b"
    r"|Trainer|deepspeed|horovod|mpi4py|jax|RANK\b|WORLD_SIZE|NUM_NODES|MASTER_ADDR"
    r"|megatron|mmengine|colossalai|torch_xla|TF_CONFIG|MultiWorker|SLURM_"
)
#: Names of what a program writes, and relative paths of files with settings that it reads.
_WRITTEN: Final = re.compile(r"out|save|log|report|dump|dest|result|>")
_SETTINGS: Final = re.compile(rf"(?!.*(?:{_WRITTEN.pattern}))[\w-][\w./-]*\.(ya?ml|json|toml)")
#: Folders that each node has.
_OF_NODES: Final = ("/tmp", "/dev", "/proc", "/usr", "/bin", "/opt/venv", SHARED_DIR)


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
        self._packages = code.packages
        self._files = {
            path.relative_to(folder).as_posix(): path for path in code.files if path.is_file()
        }
        self._commands = [*command.read(words, self._files)]
        """Those that it starts, itself and by shell scripts."""
        named = [name for each in self._commands for name in each.named]
        paths = [command.find(name, self._files) for name in named]
        self.entries = [path for path in paths if path and path.suffix == ".py"]
        """The Python files that it starts."""
        self._imports = self._found()
        """Imports of these files, and of the folder's modules that they lead to, by file."""

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
        """Part of the program that uses Ray: "its command" or a file; "" if no part does, or if
        another launcher starts it."""
        if any(each.launcher for each in self._commands):
            return ""
        if any(
            re.match(r"ray$|-m (?:ray|verl|openrlhf)\b", name)
            for name in (each.program or each.words[0] for each in self._commands)
        ):
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
        texts = [" ".join(self._words), *(path.read_text(errors="replace") for path in sources)]
        return not any(map(_SHARES.search, texts))

    def check(self, nodes: Range) -> None:
        """Fail if a shell cannot read its script, or its launcher find the job's other nodes.

        Raises:
            UsageError: that is certain.
        """
        for each in self._commands:
            path = command.find(each.program, self._files) if each.program else None
            if path and each.is_certain and path.suffix == ".sh" and b"\r\n" in path.read_bytes():
                raise UsageError(
                    f"{path.name} has the line ends of Windows, which a shell takes for a part of "
                    f"each command: sed -i 's/\\r$//' {path}"
                )
        alone = [
            each for each in self._commands if each.is_certain and each.launcher == "deepspeed"
        ]
        if nodes.high > 1 and any("--no_ssh" not in each.words for each in alone):
            raise UsageError(
                "deepspeed finds no other nodes here, and would train on each by itself: start the "
                "script with torchrun, which deepspeed.init_distributed() understands, or give "
                "--nodes 1"
            )

    def foreign(self, variables: Collection[str], *, has_own_base: bool) -> list[str]:
        """Words of another system in its command that are probable mistakes.

        Args:
            variables: of the job.
            has_own_base: True if the deployment's images have a base of its own.

        Raises:
            UsageError: the command certainly cannot run.
        """
        may_bring = bool(self._packages) or has_own_base or "PATH" in variables
        own = None if may_bring else requirements.scripts_of(self._folder)
        texts = (path.read_text(errors="replace") for path in self._imports)
        expands = any("expandvars" in text for text in texts)
        return other_systems.check(
            self._commands, known=variables, own_programs=own, expands=expands
        )

    def warnings(self, options: Sequence[str]) -> list[str]:
        """Probable mistakes in the program and its command.

        Args:
            options: names of the options of ``trainctl submit``.
        """
        program = self._commands[0].program.removeprefix("-m ")
        after = " ".join(self._words).partition(f"{program} ")[2] if self.entries else ""
        text = _plain("".join(path.read_text(errors="replace") for path in self._imports))
        # A program that has an option mentions it, as one or as a field.
        found = [
            f"--{name} is passed to the program, which does not mention it: an option of the job "
            "comes before the --"
            for name in options
            if re.search(rf"(^| )--{name}(=| |$)", after) and _plain(name) not in text
        ]
        if not self._packages and (unread := requirements.unread(self._folder)):
            found.append(
                f"{listed(unread)}: not read; list the packages in {requirements.REQUIREMENTS_TXT}"
            )
        return [*found, *self._unreadable(), *self._absent()]

    def _unreadable(self) -> Iterator[str]:
        """Python files of the program that this machine's Python cannot read, in words."""
        for path in self.entries:
            try:
                with warnings.catch_warnings(action="ignore"):
                    ast.parse(path.read_bytes())
            except SyntaxError as error:
                name = path.relative_to(self._folder)
                yield f"{name}, line {error.lineno}: {error.msg} (SyntaxError of this Python)"

    def _absent(self) -> Iterator[str]:
        """Paths in the command that no node will have, in words."""
        uploaded = {path.resolve() for path in self._files.values()}
        uploaded |= {folder for path in uploaded for folder in path.parents}
        for text in self._paths():
            path, is_absolute = self._folder / text, os.path.isabs(text)
            if path.resolve() in uploaded:
                continue
            if os.path.exists(path) and not is_absolute:  # Path.exists fails for a long text
                yield f"{text}, which the command names, is not uploaded: {self._lack(path)}"
            elif os.path.exists(path) and path.is_relative_to(os.path.expanduser("~")):
                yield f"{text}, which the command names, is a path of this machine"
            elif is_absolute and not text.startswith(_OF_NODES):
                yield (
                    f"{text}, which the command names, is not on a node unless something makes it "
                    "there: data are in the bucket, or below the mount of shared_storage"
                )
            # Hydra looks for it in a folder that its program names.
            elif _SETTINGS.fullmatch(text) and command.find(text, self._files) is None:
                yield f"{text}, which the command names, is not in {self._folder}"

    def _paths(self) -> Iterator[str]:
        """Words of the command that may be paths of what it reads."""
        before = ""
        for word in " ".join(self._words).split():
            name, equals, value = word.partition("=")
            text = (value if equals else word).strip("\"';")
            option = name if equals else before
            before = word if word.startswith("-") or ">" in word else ""
            is_path = len(text) <= command.LONGEST_NAME and not text.startswith("-")
            if is_path and not _WRITTEN.search(option):
                yield text

    def _lack(self, path: Path) -> str:
        """Reason why a path of this machine is not uploaded."""
        is_inside = path.resolve().is_relative_to(self._folder.resolve())
        return "git ignores it" if is_inside else "it lies outside of the folder"


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
            yield Import(name, 0)
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base, level = getattr(node, "module", None), getattr(node, "level", 0)
            for alias in node.names:
                # What is imported from a package may be a module of it.
                module = f"{base}.{alias.name}" if base else alias.name
                yield Import(module, level)
