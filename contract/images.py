"""The tag of the images: a hash of what goes into them.

Building the images and deploying the stacks compute it from the same files, so the tag of an image
need not be written down anywhere.
"""

import hashlib
import json
from pathlib import Path
from typing import Final

#: Folders and files of the project that the images are built from; CI builds when one changes.
SOURCES: Final = (
    "contract",
    "store",
    "training",
    "containers",
    "requirements/images.txt",
    "requirements/training.txt",
    "requirements.lock",
)
#: Parts of them that `containers/Dockerfile.dockerignore` keeps out of the build.
_LEFT_OUT: Final = ("containers/Dockerfile.dockerignore", "containers/publish.py")


def _is_ignored(part: str) -> bool:
    """True for what editors, desktops or Python itself leave, and for what only people read."""
    return (
        part in ("__pycache__", "README.md") or part.startswith(".") or part.endswith(".egg-info")
    )


def setting(root: Path, name: str) -> str:
    """A setting of ``cdk.json`` of the project in ``root``, as ``stacks.settings`` finds it."""
    context = json.loads((root / "cdk.json").read_text(encoding="utf-8"))["context"]
    preset = context.get("presets", {}).get(context.get("preset"), {})
    return str({**context.get("defaults", {}), **preset, **context}[name])


def content_tag(root: Path, *, base: str = "") -> str:
    """The tag of images that are built from the project in ``root`` as it is on disk.

    Args:
        base: setting ``base_image``.
    """
    content = hashlib.sha256(base.encode())
    for source in SOURCES:
        path = root / source
        files = path.rglob("*") if path.is_dir() else [path]
        names = {file.relative_to(root).as_posix() for file in files if file.is_file()}
        for name in sorted(names):
            if name in _LEFT_OUT or any(map(_is_ignored, name.split("/"))):
                continue
            body = (root / name).read_bytes()
            runs = bool((root / name).stat().st_mode & 0o111)
            content.update(f"{name}\0{runs}\0{len(body)}\0".encode() + body)
    return f"content-{content.hexdigest()[:12]}"
