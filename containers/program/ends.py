"""Note of a Python that a shell has started: its words, and how it ends.

A shell goes on after a command that fails, and its own exit code is that of its last command.
``startup/sitecustomize.py`` runs this file; ``containers/program/cause.py`` reads the notes. Python
does not show a hook how it ends. The C library knows: it calls ``fputc(status, note)`` when the
process calls ``exit``. A note without that byte is one of a process that was killed, or runs still.
"""

from __future__ import annotations  # a program's own Python may be as old as 3.8

import os
import re
import time
from typing import Any, Final

#: Name of a note, after the process's id.
SUFFIX: Final = ".end"
# As in containers.program.process; a test compares them.
START: Final = "TRAIN_PROGRAM_START"
_SHELL: Final = re.compile(r"-?(ba|da|k|z)?sh")
#: Numbers of files under which bash and dash have their script open.
_SCRIPT: Final = (255, 10)
_LONGEST: Final = 100_000
#: Above the numbers that a program's own files get.
_HIGH: Final = 512


def _words(pid: int) -> list[str]:
    with open(f"/proc/{pid}/cmdline", errors="replace") as file:
        return file.read().rstrip("\0").split("\0")


def _shell() -> str | None:
    """Text of the shell that waits for this process, itself or through a ``timeout``, say; None
    where another program does, which learns how this one ends."""
    pid = os.getppid()
    while True:
        words = _words(pid)
        name = os.path.basename(words[0])
        with open(f"/proc/{pid}/environ", errors="replace") as file:
            if f"{START}=" not in file.read() or name.startswith("python"):
                return None
        if _SHELL.fullmatch(name):
            break
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    for i, word in enumerate(words[:-1]):
        if re.fullmatch(r"-\w*c", word):
            return words[i + 1]
    for number in _SCRIPT:
        try:
            with open(f"/proc/{pid}/fd/{number}", errors="replace") as file:
                return file.read(_LONGEST)
        except OSError:
            pass
    return ""


def is_expected(text: str, words: list[str]) -> bool:
    """True if a shell does something about a failure of this command, as far as its text shows."""
    files = [word for word in words[1:] if word.endswith(".py")] or words[1:2] or words
    name = rf"\b{re.escape(os.path.basename(files[0]))}"
    if files[0] == "-c":
        name = r"""\s-c\s+("[^"]*"|'[^']*')"""
    elif files[0] == "-m":
        name = rf"-m\s+{re.escape(words[2])}"
    before = rf"(^|[;&|({{]|\b(then|do|else)\s)\s*(if|elif|while|until|!)\s[^;\n]*{name}"
    after = rf"{name}([^;\n]*\|\||[^\n]*(\n(?!\s*(echo|printf)\b)[^\n]*)?(\$\?|PIPESTATUS))"
    return re.search(rf"(?m){before}|{after}", text.replace("\\\n", " ")) is not None


def begin(folder: str) -> bool:
    """Begin the note of this process; return False if its failure is expected."""
    text, words = _shell(), _words(os.getpid())
    if text is None:
        return True
    if is_expected(text, words):
        return False
    import ctypes
    import fcntl
    import json
    import zlib

    library = ctypes.CDLL(None)
    library.fdopen.restype = ctypes.c_void_p
    path = os.path.join(folder, f"{os.getpid()}{SUFFIX}")
    # What is started again with the same words and variables is another try.
    group = zlib.crc32(repr((words, sorted(os.environ.items()))).encode(errors="replace"))
    kills = re.search(r"\b(p?kill|killall|timeout)\b", text) is not None
    with open(path, "wb") as file:
        file.write(json.dumps([words, group, time.time(), kills]).encode() + b"\n")
        file.flush()
        number = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
    stream = library.fdopen(number, b"a")
    if not stream or library.on_exit(library.fputc, ctypes.c_void_p(stream)):
        os.unlink(path)
        return True

    def in_child() -> None:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), number, inheritable=False)

    def noted(function: Any, note: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            note(*given, **named)
            return function(*given, **named)

        return call

    os.register_at_fork(after_in_child=in_child)
    # Those that end this program without the C library's exit.
    os._exit = noted(os._exit, lambda status: os.write(number, bytes([status & 255])))
    for name in ("execv", "execve"):
        setattr(os, name, noted(getattr(os, name), lambda *_, **__: os.ftruncate(number, 0)))
    return True
