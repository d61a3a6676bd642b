"""What docs/from-the-posts.md and README promise to readers of the four posts is kept by a command
or a file that exists; a row that goes takes its entry here along, in the same commit."""

import re

import pytest
import typer.main

from tests.conftest import ROOT
from trainctl.__main__ import app

#: Of each post, the step or demand of a row, and what keeps it.
KEPT = {
    "Ray on ECS, data-parallel": {
        "`terraform apply`, core and example": "Makefile",
        "wait for the services": "trainctl cluster up",
        "Session Manager and `docker exec` into the head": "trainctl shell",
        "`ray status`": "trainctl shell",
        "`python training_example.py BUCKET`": "tests/rehearsal/test_programs.py",
        "469 batches of 128": "training/ddp/train.py",
        "service auto scaling": "containers/autoscaler.py",
        "read the printed accuracy": "trainctl report",
        "find the checkpoint in the bucket": "trainctl checkpoints",
        "desired count 0, `terraform destroy` twice": "stacks/teardown",
    },
    "Ray on ECS, fully sharded": {
        "`terraform apply`": "Makefile",
        "`training_example.py`": "training/fsdp/train.py",
        "the loss of a text that is mostly padding": "training/data/documents.py",
        "CloudWatch dashboard with two typed instance ids": "trainctl open",
        "full model gathered on rank 0": "trainctl export",
    },
    "Elastic ImageNet on EKS": {
        "an EKS cluster": "stacks/cluster/gpu_cluster.py",
        "etcd": "stacks/jobs/state_machine.py",
        "EFA device plug-in": "stacks/cluster/efa.py",
        "FSx": "stacks/storage/shared_file_system.py",
        "NCCL tests": "training/bandwidth/train.py",
        "replicas 1 to 4": "training/runtime/driver.py",
        "epoch times on 1 to 4 hosts": "examples/study.py",
        "a clean-up script for each set-up script": "stacks/teardown",
    },
    "Jobs on plain EC2": {
        "the workload starts with the instance": "stacks/jobs/state_machine.py",
        "all ends with the script": "stacks/jobs/keeper",
        "metadata by tags": "contract/nodes.py",
        "a path in S3 for each job": "trainctl download",
        "a log stream for each job and node": "trainctl logs",
        "rank, world size and address of the master": "containers/program/start/on_node.py",
        "spot, notice, resume": "containers/spot.py",
    },
}
#: Parts of README's first table.
PARTS = ["`CoreStack`", "`TrainingStack`", "ECS GPU cluster", "CloudWatch GPU dashboard", "images"]
PARTS += ["DDP and FSDP", "CI", "settings and presets"]


def rows(text: str) -> list[str]:
    """First cells of the tables of a text, without their heads."""
    return re.findall(r"(?m)^\| (?!step there|the series|part |---)(.+?) \|", text)


@pytest.mark.parametrize("post", KEPT)
def test_each_promise_of_a_post_has_what_keeps_it(post: str) -> None:
    page = (ROOT / "docs" / "from-the-posts.md").read_text()
    section = re.search(rf"(?ms)^## {post}$(.*?)(?=^## |\Z)", page)
    assert section, f"no section {post!r}"
    cells = rows(section[1])
    assert len(cells) == len(KEPT[post])
    commands = typer.main.get_group(app).commands
    for cell, (promise, kept_by) in zip(cells, KEPT[post].items(), strict=True):
        assert cell.startswith(promise)
        program, _, name = kept_by.partition(" ")
        if program == "trainctl":
            assert name.split()[0] in commands, kept_by
        else:
            assert (ROOT / kept_by).exists(), kept_by


def test_readme_names_the_parts_that_the_posts_have_and_their_files() -> None:
    page = (ROOT / "README.md").read_text()
    table = page.partition("| part | where |")[2].partition("\n\n")[0]
    cells = rows(table)
    assert len(cells) == len(PARTS)
    for cell, part in zip(cells, PARTS, strict=True):
        assert cell.startswith(part)
    for path in re.findall(r"`([\w./]+\.\w+|Dockerfile)`", table):
        assert (ROOT / path).exists(), path
