"""What a bucket in memory has of a program's files."""

from contract import files, runs
from contract.files import FileList, Mark
from tests.aws.s3 import S3


def list_of(s3: S3, run: str, node: int = 0) -> FileList:
    """The list of a node that was written last, or that its newest start restores."""
    prefix = runs.output_prefix(run)
    keys = [key.removeprefix(prefix) for key in [*s3.objects]]
    for start in reversed(files.start_numbers(keys)):
        own = [mark for mark in Mark.of(keys) if (mark.start, mark.node) == (start, node)]
        if own:
            mark = files.newest_by_node(own)[node]
            return FileList.from_json(s3.objects[prefix + s3.objects[prefix + mark.key].decode()])
        if base := s3.objects.get(prefix + files.base_key(start)):
            key = files.base_from_json(base).get(node)
            return FileList.from_json(s3.objects[prefix + key]) if key else FileList()
    return FileList()


def saved_in(s3: S3, run: str) -> dict[str, str]:
    """What is saved of node 0, according to that list."""
    prefix = runs.output_prefix(run)
    return {
        file.name: b"".join(s3.objects[prefix + key] for key in file.pieces).decode()
        for file in list_of(s3, run).files
        if not file.link
    }
