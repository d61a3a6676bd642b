"""``trainctl data ls``: the data sets that jobs can train on."""

from dataclasses import asdict
from typing import Final

from contract.text import byte_size
from trainctl import data_sets, output
from trainctl.aws.deployment import Deployment
from trainctl.options import AsJson, Profile, Region
from training.data import catalog

_PUBLISHED: Final = "published"


def ls(*, as_json: AsJson = False, profile: Profile = None, region: Region = None) -> None:
    """List the data sets in the bucket, and those that can be had by name."""
    bucket = Deployment.find(profile=profile, region=region).bucket
    complete, incomplete = data_sets.stored(bucket)
    known = {each.name for each in complete}
    others = [each for each in catalog.ALL if each.name not in known]
    if as_json:
        output.print_json(
            {
                "stored": [{**asdict(each), "size": each.size} for each in complete],
                "incomplete": incomplete,
                _PUBLISHED: [
                    {"name": each.name, "kind": each.kind, "license": each.license}
                    for each in others
                ],
            }
        )
        return
    rows = [
        [each.name, f"in the bucket since {each.uploaded} UTC", byte_size(each.size)]
        for each in complete
    ]
    rows += [[name, "not complete: put it again", ""] for name in incomplete]
    rows += [
        [
            each.name,
            f"{_PUBLISHED}, nodes download it: {each.about}",
            byte_size(each.num_bytes),
        ]
        for each in others
        if each.name not in incomplete
    ]
    output.print_table(["name", "where", "size"], rows, prose=["where"])
