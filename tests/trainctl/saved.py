"""Files that a run's nodes have saved, as ``containers.program`` writes them."""

import hashlib
from collections.abc import Mapping

from contract import files, runs
from contract.files import FileList, Mark, SavedFile
from tests.trainctl.account import Account


def save(
    account: Account,
    node: int,
    contents: Mapping[str, bytes],
    *links: SavedFile,
    number: int = 1,
    kind: str = "",
) -> None:
    """A node of the run r1 has saved a round; each file has two pieces."""
    prefix, objects = runs.output_prefix("r1"), account.objects

    def put(content: bytes) -> str:
        key = files.object_key(1, node, len(objects), hashlib.sha256(content).hexdigest())
        objects[prefix + key] = content
        return key

    saved = [
        SavedFile(
            name=name, size=len(content), mode=0o755, pieces=(put(content[:1]), put(content[1:]))
        )
        for name, content in contents.items()
    ]
    key = put(FileList(files=(*saved, *links)).to_json())
    objects[prefix + files.start_key(1)] = b"{}"
    objects[prefix + Mark(start=1, round=number, node=node, kind=kind).key] = key.encode()
