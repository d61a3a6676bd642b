"""The deployment's bucket."""

from pathlib import Path

from contract.runs import RUNS_PREFIX, RunPaths, safe_join
from trainctl.aws.clients import Clients, code_of


class Bucket:
    """Objects of the bucket, by key."""

    def __init__(self, clients: Clients, *, name: str) -> None:
        self._clients, self.name = clients, name

    @property
    def uri(self) -> str:
        return f"s3://{self.name}"

    def run(self, run: str) -> RunPaths:
        """Where the files of a run lie."""
        return RunPaths.of(f"{self.uri}/{RUNS_PREFIX}", run)

    def key(self, uri: str) -> str:
        """The key of an address in this bucket."""
        assert uri.startswith(f"{self.uri}/"), uri
        return uri.removeprefix(f"{self.uri}/")

    def read(self, key: str) -> bytes | None:
        """An object; None when it is not there."""
        from botocore.exceptions import ClientError

        try:
            answer = self._clients.s3.get_object(Bucket=self.name, Key=key)
        except ClientError as error:
            if code_of(error) in ("NoSuchKey", "404"):
                return None
            raise
        return answer["Body"].read()

    def upload(self, file: Path, key: str) -> str:
        """Put a file into the bucket; return its address."""
        self._clients.s3.upload_file(str(file), self.name, key)
        return f"{self.uri}/{key}"

    def download_folder(self, prefix: str, folder: Path) -> int:
        """Fetch all objects below ``prefix``, which ends in a slash; return how many.

        Raises:
            InputError: a key names a place outside ``folder``; nothing has been fetched then.
        """
        s3 = self._clients.s3
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        keys = [each["Key"] for page in pages for each in page.get("Contents", [])]
        # Any job may write into the bucket, so keys are checked before the first file is written.
        # A key that ends in a slash is the empty object that consoles make for a folder.
        targets = {
            key: safe_join(folder, key.removeprefix(prefix), what=f"object of {self.uri}/{prefix}")
            for key in keys
            if key != prefix and not key.endswith("/")
        }
        for key, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(self.name, key, str(target))
        return len(targets)
