"""Requirements of a folder of code: the file that counts, and what it lists.

The command line reads it before the upload and a node before the installation, so that the first
refuses what the second would refuse.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from contract.errors import InputError

REQUIREMENTS_TXT: Final = "requirements.txt"
UV_LOCK: Final = "uv.lock"
PYPROJECT: Final = "pyproject.toml"
#: In this order: a list that was written for the job goes before what locks a whole project.
FILES: Final = (REQUIREMENTS_TXT, UV_LOCK, PYPROJECT)
#: Lists that are not read.
_UNREAD: Final = (
    *("environment.yml", "environment.yaml", "conda.yml", "conda.yaml", "pixi.toml"),
    *("Pipfile", "Pipfile.lock", "poetry.lock", "pdm.lock", "pylock.toml", "setup.py", "setup.cfg"),
)
_OTHER_LIST: Final = re.compile(r"(?m)^\s*(?:-r|--requirement)[ =]*(\S+)")
_SSH: Final = re.compile(r"[^\s\"']*\bssh://[^\s\"'?#]*|git\+git@\S+")


def file_of(folder: Path) -> str:
    """Name of the file directly in ``folder`` that says which packages to install; "" for none.

    A ``pyproject.toml`` without dependencies, such as one that only sets up tools, does not count.

    Raises:
        InputError: that file cannot be used.
    """
    name = next((each for each in FILES if (folder / each).is_file()), "")
    if name == UV_LOCK and not (folder / PYPROJECT).is_file():
        raise InputError(
            f"{UV_LOCK} belongs to a {PYPROJECT}, and there is none beside it: add that file, or "
            f"a {REQUIREMENTS_TXT}"
        )
    if name == PYPROJECT and not dependencies(folder):
        return ""
    if name:
        _check_addresses(folder / name)
    return name


def _check_addresses(file: Path) -> None:
    """Refuse repositories that no node can read, also in lists that a list includes."""
    todo, seen = [file], set[Path]()
    while todo:
        path = todo.pop().resolve()
        if path in seen or not path.is_file():  # uv names one that is missing
            continue
        seen.add(path)
        text = path.read_text(encoding="utf-8", errors="replace")
        if found := _SSH.search(re.sub(r"(?m)^\s*#.*", "", text)):
            raise InputError(
                f"{path.name}: {found[0]} cannot be installed, because nodes have no SSH key: list "
                "a public git+https:// address, or put the package's wheel into the folder and "
                "list ./NAME.whl"
            )
        if path.suffix == ".txt":
            todo += [path.parent / name for name in _OTHER_LIST.findall(text)]


def dependencies(folder: Path) -> tuple[str, ...]:
    """Dependencies that ``pyproject.toml`` lists below ``[project]``.

    Raises:
        InputError: the file is no TOML, or computes its dependencies when it is built.
    """
    project = _project(folder)
    if "dependencies" in project.get("dynamic", []):
        raise InputError(
            f"{PYPROJECT}: its dependencies are dynamic, so only a build knows them: list them "
            f"below [project], or in a {REQUIREMENTS_TXT}"
        )
    found = project.get("dependencies", [])
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise InputError(
            f"{PYPROJECT}: dependencies must be a list of texts, such as 'einops>=0.8'"
        )
    return tuple(found)


def unread(folder: Path) -> list[str]:
    """Names of files that list packages and are not read."""
    found = [name for name in _UNREAD if (folder / name).is_file()]
    found += sorted(each.name for each in folder.glob("requirements[-_]*.txt"))
    if "poetry" in _pyproject(folder).get("tool", {}):
        found.append(f"[tool.poetry] of {PYPROJECT}")
    return found


def python_of(folder: Path) -> str:
    """Versions of Python that the folder's project allows, such as ``>=3.11``; "" for any.

    Raises:
        InputError: ``pyproject.toml`` is no TOML.
    """
    return str(_project(folder).get("requires-python", ""))


def scripts_of(folder: Path) -> Mapping[str, str]:
    """Programs of the folder's own project: name -> ``module:function``.

    Raises:
        InputError: ``pyproject.toml`` is no TOML.
    """
    found = _project(folder).get("scripts", {})
    return {
        name: each
        for name, each in found.items()
        if re.fullmatch(r"[\w.-]+:[\w.]+:[\w.]+", f"{name}:{each}")
    }


def source_folders(folder: Path) -> tuple[str, ...]:
    """Folders, relative to ``folder``, from which the project's own packages are imported."""
    has_src = (folder / PYPROJECT).is_file() and (folder / "src").is_dir()
    return (".", "src") if has_src else (".",)


def _project(folder: Path) -> Mapping[str, Any]:
    project = _pyproject(folder).get("project", {})
    return project if isinstance(project, dict) else {}


def _pyproject(folder: Path) -> dict[str, Any]:
    if not (folder / PYPROJECT).is_file():
        return {}
    try:
        return tomllib.loads((folder / PYPROJECT).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{PYPROJECT} cannot be read: {error}") from None
