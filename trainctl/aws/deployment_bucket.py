"""The deployment's bucket."""

import json
from pathlib import Path

from contract.runs import RUNS_PREFIX, RunPaths, safe_join
from store import bucket
from store.bucket import Stored


def json_object(text: str | bytes | None) -> dict[str, object]:
    """A JSON object, of a run's record or an answer of AWS; empty where there is none."""
    try:
        found = json.loads(text or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class DeploymentBucket(bucket.Bucket):
    """Objects of the deployment's bucket, by key."""

    def run(self, run: str) -> RunPaths:
        """Addresses of a run's files."""
        return RunPaths.of(f"{self.uri}/{RUNS_PREFIX}", run)

    def holds(self, uri: str) -> bool:
        """True if an address is in this bucket."""
        return f"{uri}/".startswith(f"{self.uri}/")

    def key(self, uri: str) -> str:
        """The key of an address in this bucket."""
        assert self.holds(uri), uri
        return uri.removeprefix(f"{self.uri}/")

    def read_of_run(self, run: str, name: str) -> bytes | None:
        """A file directly in a run's folder; None when it is not there."""
        return self.get(self.key(self.run(run).file(name)))

    def placed(self, prefix: str, folder: Path) -> dict[Path, Stored]:
        """The objects below ``prefix``, which ends in a slash, by the files of ``folder`` that they
        would be.

        Raises:
            InputError: a key names a place outside ``folder``: any job may write into the bucket.
        """
        what = f"object of {self.uri}/{prefix}"
        # A key that ends in a slash is the empty object that consoles make for a folder.
        return {
            safe_join(folder, each.key.removeprefix(prefix), what=what): each
            for each in self.stored(prefix)
            if not each.key.endswith("/")
        }

    def fetch(self, prefix: str, folder: Path) -> None:
        """Fetch the objects below ``prefix`` into a folder. Raises as ``placed``."""
        for target, each in self.placed(prefix, folder).items():
            target.parent.mkdir(parents=True, exist_ok=True)
            self.download(each.key, target)


class EmptyBucket(DeploymentBucket):
    """The bucket of a deployment that has not been made."""

    def __init__(self) -> None:
        super().__init__("s3://BUCKET", None)

    def holds(self, _uri: str) -> bool:
        """Any address may be in it."""
        return True

    def get(self, _key: str) -> None:
        """Nothing is there."""

    def keys(self, _prefix: str) -> list[str]:
        return []
