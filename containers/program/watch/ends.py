"""Note of a Python that a shell has started: its words, and how it ends.

A shell goes on after a command that fails, and its own exit code is that of its last command.
``startup/sitecustomize.py`` runs this file; ``containers/program/watch/cause.py`` reads the notes.
Python shows no hook how it ends, but the C library does: it calls ``fputc(status, note)`` when the
process calls ``exit``. A note without that byte is one of a process that was killed, or runs still.
"""

from __future__ import annotations  # a program's own Python may be as old as 3.8

import os
import re
from typing import Final

#: Name of a note, after the process's id.
SUFFIX: Final = ".end"
#: Numbers of files under which bash and dash have their script open.
_SCRIPT: Final = (255, 10)
#: Above the numbers that a program's own files get.
_HIGH: Final = 512
#: What deals with a failure: before a command in its line; behind it, or in the next command.
_BEFORE: Final = r"(?:^|[\n;&|({]|\b(?:then|do|else)\s)\s*(?:if|elif|while|until|!)\s[^;\n]*$"
_AFTER: Final = (
    r"[^;\n]*(?:(?:;\s*\})?\s*\|\||[;\n](?!\s*(?:echo|printf)\b)[^;\n]*(?:\$\?|PIPESTATUS))"
)


def _read(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def _words(pid: int) -> list[str]:
    return _read(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")


def _shell() -> str | None:
    """Text of the shell that waits for this process, itself or through a ``timeout``, say; None
    where another program does, which learns how this one ends."""
    pid, name, words = os.getpid(), "", [""]
    while not re.fullmatch(r"-?(ba|da|k|z)?sh", name):
        pid = int(_read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
        words = _words(pid)
        name = os.path.basename(words[0])
        if pid == 1 or name.startswith(("python", "ray::")):
            return None
    for i, word in enumerate(words[:-1]):
        if re.fullmatch(r"-\w*c", word):
            return words[i + 1]
    scripts = [f"/proc/{pid}/fd/{number}" for number in _SCRIPT]
    return _read(next(path for path in scripts if os.path.exists(path)))


#: The same behind a look whether a package is there: python -c "import flash_attn" && ...
_AFTER_IMPORT: Final = rf"[^;\n]*&&|{_AFTER}"


def is_expected(text: str, words: list[str]) -> bool:
    """True if a shell does something about a failure of this command, as far as its text shows."""
    text = text.replace("\\\n", " ")
    i = next((i for i, word in enumerate(words) if word.endswith(".py")), 1)
    # As much of it as the script has as it is: other arguments may come from variables.
    parts = [re.escape(word) for word in [os.path.basename(words[i]), *words[i + 1 :]]]
    while parts and not re.search(name := r"(?<!\w)" + r"[\s\"']+".join(parts), text):
        parts.pop()
    is_look = words[1:2] == ["-c"] and re.match(r"\s*(import|from)\b", "".join(words[2:3]))
    after = _AFTER_IMPORT if is_look else _AFTER
    return bool(parts) and all(
        re.search(_BEFORE, text[: each.start()]) or re.match(after, text[each.end() :])
        for each in re.finditer(name, text)
    )


def begin(folder: str) -> bool:
    """Begin the note of this process; return False if its failure is expected."""
    pid, text = os.getpid(), _shell()
    if text is None:
        return True
    words = _words(pid)
    if is_expected(text, words):
        return False
    import ctypes
    import json
    import time
    import zlib
    from fcntl import F_DUPFD_CLOEXEC, fcntl

    library = ctypes.CDLL(None)
    library.fdopen.restype = ctypes.c_void_p
    # What is started again with the same words and variables is another try.
    group = zlib.crc32(repr((words, sorted(os.environ.items()))).encode(errors="replace"))
    # A signal that the shell may send is no failure.
    killed = "\0" * bool(re.search(r"\b(p?kill|killall|timeout)\b", text))
    at_exit, put, leave = library.on_exit, library.fputc, os._exit
    with open(os.path.join(folder, f"{pid}{SUFFIX}"), "w") as file:
        number = fcntl(file, F_DUPFD_CLOEXEC, _HIGH)
        file.write(f"{json.dumps([words, group, time.time()])}\n{killed}")
    at_exit(put, ctypes.c_void_p(library.fdopen(number, b"a")))

    def noted(status: int) -> None:
        if os.getpid() == pid:  # and not a child process, which ends so as a rule
            os.write(number, bytes([status & 255]))
        leave(status)

    os._exit = noted  # type: ignore[assignment]
    return True
