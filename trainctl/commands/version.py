"""``trainctl version``, and ``trainctl --version``."""

import typer


def version_text() -> str:
    """Name and version of the program."""
    from importlib import metadata

    return f"trainctl {metadata.version('ecs-train')}"


def print_version(wanted: bool) -> None:
    """Callback of ``--version``."""
    if wanted:
        print(version_text())
        raise typer.Exit


def version() -> None:
    """Print the version."""
    print(version_text())
