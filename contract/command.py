"""Reader of commands: which programs the words of a command, and the shell scripts of its folder,
start.

Nothing is executed, so conditions, loops and the output of other commands remain unknown. The value
of a word that depends on them is the shell's to tell (``containers.program.start.questions``).
"""

import functools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Final, Self

#: A comment; a redirection; a word, with its quotes; the end of a simple command.
_TOKEN: Final = re.compile(
    r"""(?s)(?<![^\s;&|()])\#[^\n]*
    |(?P<redirection>[\d&]*[<>]+&?)
    |(?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\{[^}]*\}|\$\([^()]*\)|`[^`]*`|[^\s;&|()<>"'`])+)
    |(?P<end>\|\||[\n;&|()])""",
    re.VERBOSE,
)
#: Words of a shell's grammar before a command.
_KEYWORDS: Final = {
    *("if", "then", "else", "elif", "fi", "while", "until", "do", "done", "!", "{", "}"),
    *("time", "exec"),
}
#: Commands after which the next one is run, with the same variables.
_HARMLESS: Final = re.compile(
    r"(?:\S*/)?(?:set|mkdir|cd|ulimit|nvidia-smi|date|sleep|ls|cat|rm|cp|pip3?|python[\d.]*|torchrun"
    r"|accelerate|deepspeed|env|uv|nohup|timeout|(?:ba|da|z)?sh)"
)
#: Larger files are no scripts; no name is longer.
_LARGEST, LONGEST_NAME = 2**20, 255
#: Commands whose arguments are text, and not what they start.
_TEXT: Final = {"echo", "printf", "type", "which"}
#: Word that a shell takes for an assignment.
ASSIGNMENT: Final = re.compile(r"(?s)[A-Za-z_]\w*=.*")
_VARIABLE: Final = re.compile(r"\$\{?(\w+)\}?")
#: Name of a shell.
SHELL: Final = re.compile(r"(?:\S*/)?(?:ba|da|z)?sh")
_PYTHON: Final = r"(?:\S*/)?python[\d.]*"
#: Launchers that start a program's processes on every node, as a command or a module. torchrun and
#: accelerate read from a node's environment what they need to find the others.
_LAUNCHERS: Final = (
    r"(?:(?P<torchrun>torchrun|-m torch\.distributed\.\w+)"
    r"|(?P<accelerate>accelerate[ -]launch"
    r"|-m accelerate\.commands\.(?:launch|accelerate_cli launch))"
    r"|(?P<deepspeed>deepspeed|-m deepspeed\.launcher\.\w+)"
    r"|(?P<composer>composer|-m composer\.cli\.launcher)"
    r"|(?P<other>fabric run|lightning run|tune run|-m lightning\.fabric\.cli run))"
)
#: What precedes a launcher sets variables or runs it, such as ``env A=1`` and ``uv run``; what
#: follows another program is an argument of that.
_START: Final = re.compile(
    r"(?:(?:\w+=\S*|-u \S+|-(?!m )\S+|\d\S*"
    r"|env|exec|time|nohup|timeout|nice|srun|uv|conda|coverage|run) )*?"
    rf"(?:{_PYTHON} (?:-[WX] \S+ |-(?!m )\S+ )*)?(?:\S*/)?{_LAUNCHERS} "
)
#: Ends of files that are run, or given as if they could be.
_FILES: Final = (".py", ".sh", ".ipynb")
#: After one of these, what runs is no file; after the first two, a module.
_NO_FILE: Final = ("-m", "--module", "-c", "--no-python", "--no_python")


@dataclass(frozen=True, slots=True)
class SimpleCommand:
    """A simple command: one program and its arguments."""

    raw: tuple[str, ...]
    """Its words as a shell reads them, with quotes and variables."""
    before: tuple[str, ...] = ()
    """Assignments that precede it in its script, as a shell reads them."""
    is_certain: bool = True
    """False if it, or the value of one of its words, depends on a condition, a loop, an argument
    of its script or the output of another command."""

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """The command with these words, without a shell."""
        return cls(tuple(map(shlex.quote, words)))

    @property
    def words(self) -> tuple[str, ...]:
        """Its words without quotes; variables keep their names."""
        return tuple(map(_unquoted, self.raw))

    @property
    def launcher(self) -> str:
        """``torchrun``, ``accelerate``, ``deepspeed``, ``composer`` or ``other``; "" for none."""
        found = self._start
        return (found.lastgroup or "") if found else ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Raw words after the launcher; without one, after the command's name."""
        return self.raw[self._num_first :]

    @property
    def assignments(self) -> tuple[str, ...]:
        """Assignments that hold when it starts, those of ``env`` included."""
        own = filter(ASSIGNMENT.fullmatch, self.raw[: self._num_first])
        return (*self.before, *(f"export {each}" for each in own))

    @property
    def program(self) -> str:
        """The file that it runs, or ``-m MODULE``; "" if neither is certain."""
        first, rest = self.words[0], [*map(_unquoted, self.arguments), ""]
        is_shell = bool(SHELL.fullmatch(first))
        if self.launcher == "other":
            return ""  # it may be a name of the launcher's own
        if not (self.launcher or is_shell or re.fullmatch(_PYTHON, first)):
            return first if first.endswith(_FILES) else ""
        takes_value = False
        for word, after in pairwise(rest):
            if takes_value:
                takes_value = False
                continue
            if word in _NO_FILE[:2]:
                return f"-m {after}"
            if word in _NO_FILE or word == "-" or (is_shell and re.fullmatch(r"-\w*c", word)):
                return ""
            if word.endswith(_FILES):
                return word
            takes_value = not self.launcher and word in ("-W", "-X", "-o", "+o")
            if not (self.launcher or word.startswith(("-", "+")) or takes_value):
                return ""
            if not self.launcher and re.match(r"-\w*m\w", word):
                return ""
        return ""

    @property
    def named(self) -> list[str]:
        """Files and modules that it may run: its program, or else all that its words name."""
        if self.program:
            return [self.program]
        words = (word for word in self.words if len(word) <= LONGEST_NAME)
        found = re.findall(r"-m\s+[\w.]+|[\w./-]+\.py\b", " ".join(words))
        return [" ".join(name.split()) for name in found]

    @property
    def _start(self) -> re.Match[str] | None:
        # A word that holds spaces stays one.
        return _START.match(" ".join(re.sub(r"\s", "_", word) for word in self.words) + " ")

    @property
    def _num_first(self) -> int:
        return self._start[0].count(" ") if self._start else 1


def is_launcher(name: str) -> bool:
    """True for a Python, a shell or a launcher: programs that run a file."""
    return bool(re.fullmatch(rf"{_PYTHON}|{SHELL.pattern}|torchrun|accelerate|deepspeed", name))


def read(words: Sequence[str], files: Mapping[str, Path]) -> Iterator[SimpleCommand]:
    """The simple commands that the words of a command start, those of shells included.

    Args:
        files: of the folder in which it runs, by name: shell scripts among them are read, once.
    """
    first = SimpleCommand.of(words)
    yield from [*_Reader(files).simple(first.raw)] or [first]


def find(program: str, files: Mapping[str, Path]) -> Path | None:
    """The file that a command means by ``FILE`` or ``-m MODULE``; its shell may be in another
    folder by then."""
    module, name = program.startswith("-m "), program.removeprefix("-m ")
    base = name.replace(".", "/")
    ends = (f"/{base}.py", f"/{base}/__main__.py") if module else f"/{Path(name).as_posix()}"
    matching = [path for each, path in files.items() if f"/{each}".endswith(ends)]
    return min(matching, key=lambda path: len(path.parts), default=None)


class _Reader:
    """Reads a command, and each script that it leads to."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._scripts = {name: path for name, path in files.items() if path.suffix != ".py"}
        self._before: list[str] = []
        self._values: dict[str, str] = {}
        # Names of variables whose value depends on an argument or another command.
        self._open: set[str] = set()
        # True after what may skip a command, or change variables in a way that is not read here.
        self._is_in_doubt = False

    def text(self, text: str) -> Iterator[SimpleCommand]:
        """The simple commands of a shell's text."""
        words: list[str] = []
        is_target = False
        for token in _TOKEN.finditer(text.replace("\\\n", " ")):
            if token["end"]:
                yield from self.simple(words)
                words = []
                self._is_in_doubt |= token["end"] in ("||", "(", ")")
            elif token["word"] and not is_target:
                words.append(token["word"])
            is_target = bool(token["redirection"])
            self._is_in_doubt |= "<<" in (token["redirection"] or "")
        yield from self.simple(words)

    def simple(self, words: Sequence[str]) -> Iterator[SimpleCommand]:
        """One simple command, and those that it starts."""
        is_last = False
        while words and words[0] in _KEYWORDS:
            self._is_in_doubt |= words[0] not in ("time", "exec")
            is_last |= words[0] == "exec"
            words = words[1:]
        is_exported = words[:1] == ["export"]
        own = [*takewhile(ASSIGNMENT.fullmatch, words[is_exported:])]
        words = words[len(own) + is_exported :]
        if not words:
            for each in own:
                self._assign(each, is_exported=is_exported)
            return
        if name := _VARIABLE.fullmatch(words[0]):
            # Such as LAUNCHER="python -m torch.distributed.run".
            value = _unquoted(self._values.pop(name[1], ""))
            if value and not value.startswith("$"):
                yield from self.text(" ".join([value, *words[1:]]))
                return
        if words[0] in _TEXT:
            return
        command = SimpleCommand(
            tuple(words),
            (*self._before, *(f"export {each}" for each in own)),
            not (self._is_in_doubt or any(map(self._is_open, [*own, *words]))),
        )
        yield command
        yield from self._inner(command)
        self._is_in_doubt |= is_last  # exec does not come back

    def _assign(self, assignment: str, *, is_exported: bool) -> None:
        name, _, value = assignment.partition("=")
        self._values[name] = value
        if self._is_open(assignment):
            # Left out: whoever asks a shell about a command must not run another one by that.
            self._open.add(name)
            return
        self._open.discard(name)
        self._before.append(f"export {assignment}" if is_exported else assignment)

    def _is_open(self, word: str) -> bool:
        names = re.findall(r"\$\{?(\w+|.)", word)
        is_cut = word.endswith("$") or "`" in word
        return is_cut or any(not re.match(r"[A-Za-z_]", n) or n in self._open for n in names)

    def _inner(self, command: SimpleCommand) -> Iterator[SimpleCommand]:
        """Commands of the text or the script that a command gives to a shell."""
        words = command.words
        place = next((i for i, word in enumerate(words) if SHELL.fullmatch(word)), None)
        if words[0] in (".", "source") or (place is None and "/" in words[0]):
            found = [*self._script(words[-1] if words[0] in (".", "source") else words[0])]
            self._is_in_doubt |= not found
            yield from found
            return
        if not _HARMLESS.fullmatch(words[0]):
            self._is_in_doubt = True
        if command.launcher or any(re.fullmatch(_PYTHON, word) for word in words) or place is None:
            return
        for word, after in pairwise([*words[place + 1 :], ""]):
            if re.fullmatch(r"-\w*c", word):
                yield from self.text(after)
                return
            if not word.startswith("-"):
                yield from self._script(word)
                return

    def _script(self, name: str) -> Iterator[SimpleCommand]:
        path = find(name, self._scripts) if len(name) <= LONGEST_NAME else None
        if path is not None and path.stat().st_size <= _LARGEST:
            self._scripts = {k: v for k, v in self._scripts.items() if v != path}
            yield from self.text(path.read_text(errors="replace"))


@functools.lru_cache(maxsize=1024)
def _unquoted(word: str) -> str:
    try:
        return " ".join(shlex.split(word))
    except ValueError:  # a quote without its end
        return word
