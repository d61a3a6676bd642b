"""Data sets in the deployment's bucket: files below ``data/NAME/``, described in
``data/NAME.json``.

That list is removed before a file changes and written when all files are there, so a copy that was
interrupted is never taken for a data set. An upload that is repeated sends only what is missing.
"""

import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Self

from contract.errors import InputError
from contract.nodes import is_shared
from contract.text import byte_size, counted
from contract.typed_json import from_json, loads
from trainctl.aws.deployment_bucket import DeploymentBucket
from trainctl.aws.errors import UsageError
from training import recipes
from training.data import catalog
from training.data.contents import Contents
from training.data.pictures.index import StoredFile
from training.recipe import Recipe
from training.settings import RunConfig

PREFIX: Final = "data/"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_PLAIN_TEXT: Final = (".txt", ".md", ".jsonl")
_OPTIONS: Final = ("--data", "--validation")

Report = Callable[[int, int], None]
"""Is called with the bytes uploaded so far and the bytes there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSet:
    """A data set whose files are all in the bucket."""

    name: str
    files: Mapping[str, StoredFile]
    """Files by name, relative to the set's folder."""
    uploaded: str
    """When, in UTC: ``2026-01-31 12:00``."""
    by: str = "an unknown user"
    """User or role session of AWS that uploaded it."""
    contents: Contents | None = None
    """None: not looked at."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(each.size for each in self.files.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: bytes) -> Self | None:
        """Parse what ``to_json`` wrote; None for anything else."""
        what = "a data set"
        with suppress(InputError):
            return from_json(cls, loads(text, what=what), what=what, ignores_unknown=True)
        return None


def check_name(name: str) -> str:
    """Return ``name`` if a data set can be called so. Raises UsageError where it cannot."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"a data set cannot be called {name!r}: use 1 to 63 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit; --as gives it another name"
        )
    for recipe in recipes.ALL:
        if name == recipe.built_in_data:
            raise UsageError(
                f"a data set cannot be called {name}, which is the built-in data of recipe "
                f"{recipe.name}: give it another name with --as"
            )
    return name


def find(bucket: DeploymentBucket, name: str) -> StoredSet | None:
    """The complete data set of that name in the bucket."""
    content = bucket.get(list_key(name))
    return None if content is None else StoredSet.from_json(content)


def stored(bucket: DeploymentBucket) -> tuple[list[StoredSet], list[str]]:
    """All complete data sets in the bucket, and the names of those that are not complete."""
    lists, folders = bucket.listed(PREFIX)
    keys = [each.key for each in lists if each.key != PREFIX]
    names = [key.removeprefix(PREFIX).removesuffix(".json") for key in keys]
    complete = [each for name in names if (each := find(bucket, name)) is not None]
    known = {each.name for each in complete}
    return complete, [each for each in folders if each not in known]


def put(
    bucket: DeploymentBucket,
    name: str,
    files: Mapping[str, Path],
    *,
    by: str,
    contents: Contents | None = None,
    report: Report,
    ask: Callable[[str], None],
) -> StoredSet:
    """Upload files as a data set, which replaces the one of that name.

    Args:
        files: relative name -> file here.
        by: user or role session of AWS.
        ask: called before other files of that name are replaced or removed, with words for them;
            what it raises prevents that.

    Raises:
        UsageError: a file has changed in the meantime.
    """
    before = {each: _state(path) for each, path in files.items()}
    wanted = {
        each: StoredFile(size=before[each][0], sha256=_sha256(path)) for each, path in files.items()
    }
    there = find(bucket, name)
    if there is not None and dict(there.files) == wanted:
        return there
    folder = f"{PREFIX}{name}/"
    sizes = {each.key: each.size for each in bucket.stored(folder)}
    # An upload that is continued has some of these files, and no other ones.
    same = {f"{folder}{each}": file.size for each, file in wanted.items()}
    if there is not None or sizes.items() - same.items():
        when = f"uploaded {there.uploaded} UTC by {there.by}" if there else "not complete"
        ask(f"{counted(len(sizes), 'file')}, {byte_size(sum(sizes.values()))}, {when}")
    bucket.delete([list_key(name)])
    done, total = 0, sum(each.size for each in wanted.values())

    def sent(size: int) -> None:
        nonlocal done
        done += size
        report(done, total)

    for each, path in files.items():
        key = f"{folder}{each}"
        file = wanted[each]
        if sizes.get(key) == file.size and bucket.sha256(key) == file.sha256:
            sent(file.size)
        else:
            bucket.upload(path, key, sha256=file.sha256, report=sent)
        if _state(path) != before[each]:
            raise UsageError(f"{path} has changed while it was uploaded: upload it again")
    bucket.delete([key for key in sizes if key.removeprefix(folder) not in wanted])
    now = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    new = StoredSet(name=name, files=wanted, uploaded=now, by=by, contents=contents)
    bucket.put(list_key(name), new.to_json().encode())
    return new


def files_of(place: Path) -> dict[str, Path]:
    """The files of a folder but hidden ones, or the one file, by their names in the bucket.

    Links to files are followed.

    Raises:
        UsageError: there is none, or a link leads to a folder or nowhere.
    """
    if place.is_file():
        return {place.name: place}
    found: dict[str, Path] = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise UsageError(f"{path} cannot be read: without its files the set is not complete")
        if path.is_file():
            found[name.as_posix()] = path
        elif path.is_symlink():
            # Left out without a word, its files would be missing in a set marked as complete.
            what = "a link to a folder" if path.is_dir() else "a link that leads to no file"
            raise UsageError(
                f"{path} is {what}, which is not uploaded: put the files in its place, or remove it"
            )
    if not found:
        raise UsageError(f"{place} holds no files: give the folder of a data set")
    return found


def resolve(words: Sequence[str], recipe: Recipe, bucket: DeploymentBucket) -> list[str]:
    """The words of a recipe with the address of a data set in place of its name.

    Names that the bucket does not have, and the node can fetch by itself, stay.

    Raises:
        InputError: it is a data set of another kind than the recipe's.
        UsageError: no node could read it.
    """
    found = [*words]
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option not in _OPTIONS:
            continue
        if equals:
            found[place] = f"{option}={_address(value, recipe, bucket)}"
        elif place + 1 < len(words):
            found[place + 1] = _address(words[place + 1], recipe, bucket)
    return found


def check_places(config: RunConfig, bucket: DeploymentBucket, *, has_shared: bool) -> None:
    """
    Raises:
        UsageError: data, model, tokenizer or template are where no node of a job can read them.
    """
    values = config.to_json()
    for name in ("data", "model", "tokenizer", "chat-template", "validation"):
        place = str(values.get(name.replace("-", "_")) or "")
        if place.startswith("s3://") and not bucket.holds(place):
            raise UsageError(
                f"--{name} {place} is in another bucket, and jobs may read {bucket.uri} only: copy "
                f"it there, for example with aws s3 cp --recursive {place} {bucket.uri}/{name}/"
            )
        if is_shared(place):
            if not has_shared:
                raise UsageError(
                    f"--{name} {place}: the hosts of this deployment share no file system; give an "
                    f'address in {bucket.uri}, or deploy one: make deploy ARGS="-c '
                    'shared_storage=fsx"'
                )
            continue
        # A name such as owner/model is the Hub's, even if there is a folder that is called so.
        is_path = place.startswith((".", "/", "~"))
        if name != "data" and is_path and "://" not in place:
            at = f"{bucket.uri}/{name}s/{Path(place).resolve().name}"
            folder = "--recursive " if Path(place).is_dir() else ""
            raise UsageError(
                f"--{name} {place} is a path of this machine, which no node can read: upload it, "
                f"aws s3 cp {folder}{shlex.quote(place)} {shlex.quote(at)}, and give --{name} {at}"
            )


def check_contents(config: RunConfig, recipe: Recipe, bucket: DeploymentBucket) -> None:
    """
    Raises:
        InputError: a recipe's reader refuses a data set in the bucket, in its own words.
    """
    values = config.to_json()
    for place in (config.data, str(values.get("validation") or "")):
        there = _stored(place, bucket)
        if there is None or there.contents is None:
            continue
        if reason := there.contents.reason_against(recipe.data_kind, values):
            raise InputError(f"recipe {recipe.name} cannot read data set {there.name}: {reason}")


def _stored(place: str, bucket: DeploymentBucket) -> StoredSet | None:
    """The data set of an address that ``resolve`` has given."""
    folder = f"{bucket.uri}/{PREFIX}"
    name = place.removeprefix(folder).rstrip("/")
    return find(bucket, name) if place.startswith(folder) and _NAME.fullmatch(name) else None


def _address(data: str, recipe: Recipe, bucket: DeploymentBucket) -> str:
    if not data or "://" in data or data == recipe.built_in_data or data.startswith("--"):
        return data
    recipe.check_data(data)
    if is_shared(data):
        return data
    if _NAME.fullmatch(data):
        if find(bucket, data) is not None:
            # The slash marks a folder, even if it is called corpus.txt.
            return f"{bucket.uri}/{PREFIX}{data}/"
        if bucket.keys(f"{PREFIX}{data}/"):
            raise UsageError(
                f"data set {data} in {bucket.uri} is not complete: its upload was interrupted; "
                f"repeat it with trainctl data put ... --as {data}"
            )
        if catalog.find(data) is not None:
            return data
    if Path(data).expanduser().exists():
        raise UsageError(
            f"--data {data} is on this machine, where no node can read it: upload it with "
            f"trainctl data put {data} --as NAME, then give --data NAME"
        )
    raise UsageError(
        f"--data {data}: {bucket.uri} has no such data set, and none is published by this name; "
        f"{catalog.by_name(data)}. Upload your own with trainctl data put DIR --as NAME; trainctl "
        "data ls lists them"
    )


def text_bytes(data: str, bucket: DeploymentBucket) -> int | None:
    """Size of a plain text, from which the number of tokens of an epoch follows.

    Args:
        data: as ``resolve`` returns it.

    Returns:
        None where that is not known here.
    """
    if (published := catalog.find(data)) is not None:
        return published.num_bytes if published.kind == catalog.TEXT else None
    there = _stored(data, bucket)
    if there is None or not all(each.endswith(_PLAIN_TEXT) for each in there.files):
        return None
    return there.size


def list_key(name: str) -> str:
    """Key of the list that makes files a data set."""
    return f"{PREFIX}{name}.json"


def _state(path: Path) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    return found.st_size, found.st_mtime_ns


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
