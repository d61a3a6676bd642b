"""What a shell completes: recipes, presets and settings from here, jobs and runs from AWS.

A completion must be quick and silent: AWS has two seconds, a failure completes nothing, and an
answer counts for half a minute.
"""

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import typer

from contract import runs as run_files
from training import recipes
from training.data import catalog
from training.recipes import command
from training.recipes.settings import fields_of

AWS_S: Final = 2.0
FRESH_S: Final = 30.0
_JOBS_MOST: Final = 100
#: What decides which account and region are asked, beside the options.
_VARIABLES: Final = (
    *("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL"),
    *("AWS_ACCESS_KEY_ID", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"),
)


def jobs(ctx: typer.Context, incomplete: str) -> list[str]:
    """IDs of jobs, and the runs whose newest job they could mean."""
    found = _looked_up(ctx)
    return _beginning([*found.get("jobs", []), *found.get("runs", [])], incomplete)


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of the runs in the bucket."""
    return _beginning(_looked_up(ctx).get("runs", []), incomplete)


def recipe(incomplete: str) -> list[str]:
    return _beginning(recipes.NAMES, incomplete)


def preset(ctx: typer.Context, incomplete: str) -> list[str]:
    """Presets of the recipe that is named, of all where none is."""
    given = ctx.params.get("recipe")
    return _beginning(
        [name for each in recipes.ALL if given in (None, each.name) for name in each.presets],
        incomplete,
    )


def words(ctx: typer.Context, incomplete: str) -> list[str]:
    """A recipe; after it, its settings and their values."""
    # Some shells take --data=x for three words.
    given = [word for word in ctx.params.get("words") or [] if word != "="]
    if ctx.params.get("code") is not None:
        return []
    if not given:
        return recipe(incomplete)
    found = next((each for each in recipes.ALL if each.name == given[0]), None)
    if found is None:
        return []
    if incomplete.startswith("-"):
        options = [
            option for action in command.parser(found)._actions for option in action.option_strings
        ]
        left_out = {*command.NOT_FOR_JOBS, "-h", "--help", *given}
        return _beginning([option for option in options if option not in left_out], incomplete)
    if given[-1] == "--data":
        return _beginning([each.name for each in catalog.ALL], incomplete)
    if given[-1] == "--preset":
        return _beginning(found.presets, incomplete)
    field = fields_of(found.config).get(given[-1].removeprefix("--").replace("-", "_"))
    return [] if field is None else _beginning(field.metadata["choices"] or (), incomplete)


def _beginning(names: Any, incomplete: str) -> list[str]:
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]


# --- AWS ------------------------------------------------------------------------------------------
def _looked_up(ctx: typer.Context) -> Mapping[str, list[str]]:
    """Names of jobs and runs; empty where AWS does not answer in time."""
    profile, region = ctx.params.get("profile"), ctx.params.get("region")
    file = _cache_file(profile, region)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(file.read_text())
        if 0 <= time.time() - kept["at"] < FRESH_S:
            return {name: [str(each) for each in kept[name]] for name in ("jobs", "runs")}
    found: dict[str, list[str]] = {}
    asking = threading.Thread(target=_ask, args=(profile, region, found), daemon=True)
    asking.start()
    asking.join(AWS_S)
    if asking.is_alive() or not found:
        return {}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"at": time.time(), **found}))
        new.replace(file)
    return found


def _ask(profile: str | None, region: str | None, found: dict[str, list[str]]) -> None:
    from trainctl.aws.deployment import Deployment

    with contextlib.suppress(Exception):
        deployment = Deployment.find(profile=profile, region=region)
        jobs_there = deployment.jobs.newest_ids(limit=_JOBS_MOST)
        _keys, runs_there = deployment.bucket.listed(f"{run_files.RUNS_PREFIX}/")
        found.update({"jobs": jobs_there, "runs": runs_there})


def _cache_file(profile: str | None, region: str | None) -> Path:
    chosen = [profile, region, *(os.environ.get(name) for name in _VARIABLES)]
    name = hashlib.sha256(json.dumps(chosen).encode()).hexdigest()[:16]
    place = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(place) / "trainctl" / f"names-{name}.json"
