"""Make the data of ``train.py``: Python's own help texts as bytes, in ``data/``."""

import pydoc
import sys
from pathlib import Path

MODULES = (
    "argparse",
    "asyncio",
    "collections",
    "csv",
    "datetime",
    "json",
    "random",
    "re",
    "string",
)


def main() -> None:
    folder = Path("data")
    if (folder / "train.bin").exists() and (folder / "held-out.bin").exists():
        print("the data are there already", flush=True)
        return
    for name in MODULES:
        __import__(name)
    text = "\n".join(pydoc.plain(pydoc.render_doc(sys.modules[name])) for name in MODULES).encode()
    folder.mkdir(exist_ok=True)
    cut = len(text) * 9 // 10
    (folder / "train.bin").write_bytes(text[:cut])
    (folder / "held-out.bin").write_bytes(text[cut:])
    print(f"{len(text):,} bytes of text", flush=True)


if __name__ == "__main__":
    main()
