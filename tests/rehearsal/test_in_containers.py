"""The images, and the standing cluster in real containers: a run on it is killed and resumed.

The unchanged stacks on a local AWS, the images of production, the command line as a user gives it.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from containers import publish
from contract import nodes, runs
from contract import outputs as stack_outputs
from rehearsal.children import Steps
from rehearsal.cycle import Rehearsal
from rehearsal.inventory import account_at
from tests.eventually import eventually
from tests.rehearsal.conftest import cluster_status, command, succeeded, trainctl
from trainctl.jobs import other_systems

pytestmark = [pytest.mark.slow, pytest.mark.engine]

MAX_IMAGE_BYTES = 2.2e9


@pytest.fixture(scope="module")
def rehearsal(deployment: Rehearsal) -> Iterator[Rehearsal]:
    """A head and two workers; none of them is left afterwards."""
    succeeded(deployment, "cluster", "up", "--nodes", "2", "--yes")
    yield deployment
    succeeded(deployment, "cluster", "down", "--yes")
    eventually(
        "no container is left",
        lambda: not deployment.engine.labelled("container", deployment.name),
        timeout_s=120,
    )


def tasks_of(rehearsal: Rehearsal, node: str) -> list[dict[str, Any]]:
    return [task for task in cluster_status(rehearsal)["tasks"] if task["node"] == node]


def inside(rehearsal: Rehearsal, image: str, script: str) -> str:
    return rehearsal.engine("run", "--rm", "--user", "0", "--entrypoint", "sh", image, "-c", script)


def ecs(rehearsal: Rehearsal) -> Any:
    return account_at(rehearsal.state()["endpoint"]).client("ecs")


# --- the images -----------------------------------------------------------------------------------
def images(deployment: Rehearsal) -> dict[str, dict[str, Any]]:
    found = {}
    for node in (nodes.HEAD, nodes.WORKER):
        name = f"ecs-train-{node}:{deployment.state()['image_tag']}"
        record = deployment.engine.inspect("image", name)
        assert record is not None
        found[name] = record
    return found


def test_images_are_small_and_share_their_large_layers(deployment: Rehearsal) -> None:
    head, worker = images(deployment).values()
    assert head["Size"] <= MAX_IMAGE_BYTES
    assert worker["Size"] <= MAX_IMAGE_BYTES
    assert head["RootFS"]["Layers"] == worker["RootFS"]["Layers"], "with CPU builds of torch"


def test_images_run_as_an_ordinary_user_and_say_what_they_are(deployment: Rehearsal) -> None:
    for record in images(deployment).values():
        config = record["Config"]
        assert config["User"] == "1000:1000"
        assert config["Entrypoint"][0] == "tini"
        assert config["Healthcheck"]["Test"][-1] == "containers.health"
        labels = config["Labels"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", labels["org.opencontainers.image.version"])
        assert re.fullmatch(r"[0-9a-f]{40}|unknown", labels["org.opencontainers.image.revision"])


def test_images_hold_nothing_of_the_machine_and_what_packages_are_built_with(
    deployment: Rehearsal,
) -> None:
    name = next(iter(images(deployment)))
    environment = images(deployment)[name]["Config"]["Env"]
    assert not [each for each in environment if "CERT" in each or "TOKEN" in each or "PIP_" in each]
    found = inside(
        deployment,
        name,
        # Jobs keep packages there where the host has no folder for them.
        "find / -xdev ! -user root ! -path '/proc/*' ! -path '/sys/*' ! -path /var/cache/train;"
        "ls -A /tmp /var/tmp /root/.cache /var/cache/pip /var/cache/apt/archives/*.deb 2>/dev/null"
        " | grep -v ':$';"
        "command -v g++ make;"
        "git --version >/dev/null || echo no git;"
        "echo '#include <Python.h>' | gcc -fsyntax-only -x c"
        """ -I$(python -c 'import sysconfig; print(sysconfig.get_path("include"))') - 2>&1;"""
        # Certificates: those of Debian's package and no other.
        'for f in /usr/share/ca-certificates/mozilla/*.crt; do cat "$f"; done >/tmp/all;'
        "sort -u /tmp/all >/tmp/all.sorted; rm /tmp/all;"
        "grep -v -e '^-----' /etc/ssl/certs/ca-certificates.crt | sort -u |"
        " comm -23 - /tmp/all.sorted | head -n 3",
    )
    assert found.split() == []


def test_the_laptop_knows_each_program_of_the_images(deployment: Rehearsal) -> None:
    """Add what is missing to ``contract/image_programs.txt``."""
    no_program = re.compile(r"__pycache__|.*\.(py|ps1)|Activate.*", re.IGNORECASE)
    for name in images(deployment):
        found = inside(deployment, name, "ls -1 $(echo $PATH | tr : ' ') 2>/dev/null | grep -v :$")
        programs = {each for each in found.split() if not no_program.fullmatch(each)}
        assert programs - other_systems.programs() == set()


def test_an_image_trains_without_a_network_on_a_file_system_that_cannot_be_written(
    deployment: Rehearsal,
) -> None:
    image = f"ecs-train-{nodes.WORKER}:{deployment.state()['image_tag']}"
    publish.try_out(deployment.docker(), image)  # raises where it does not end as it should


# --- the cluster ----------------------------------------------------------------------------------
def test_the_cluster_is_what_the_templates_say(rehearsal: Rehearsal) -> None:
    found = cluster_status(rehearsal)
    assert found["ray"] == {"num_nodes": 3, "num_cpus": 4, "num_gpus": 0}
    assert [task["health"] for task in found["tasks"]] == ["HEALTHY"] * 3
    assert len({task["address"] for task in found["tasks"]}) == 3
    definitions = {
        node: ecs(rehearsal).describe_task_definition(
            taskDefinition=rehearsal.outputs(stack_outputs.TRAINING_STACK)[output]
        )["taskDefinition"]["containerDefinitions"][0]
        for node, output in (
            (nodes.HEAD, stack_outputs.HEAD_TASK),
            (nodes.WORKER, stack_outputs.WORKER_TASK),
        )
    }
    for task in found["tasks"]:
        record = rehearsal.engine.inspect("container", task["runtime_id"])
        assert record is not None
        host, wanted = record["HostConfig"], definitions[task["node"]]
        assert host["Memory"] == wanted["memory"] * 2**20
        assert host["ShmSize"] == wanted["linuxParameters"]["sharedMemorySize"] * 2**20
        assert host["Init"] is True
        assert record["Config"]["User"] == "1000:1000"


def test_another_rehearsal_on_the_same_engine_leaves_its_containers_alone(
    rehearsal: Rehearsal, tmp_path: Path
) -> None:
    def running() -> list[str]:
        return sorted(rehearsal.engine("ps", "--quiet", "--filter", f"name={name}") for name in ids)

    ids = [task["id"][:8] for task in cluster_status(rehearsal)["tasks"]]
    before = running()
    assert "" not in before
    other = Rehearsal(rehearsal.engine, folder=tmp_path / "beside")
    try:
        other.start(Steps(1))
        assert running() == before
    finally:
        other.down(Steps(1))
    assert running() == before


def test_what_runs_is_what_was_pushed(rehearsal: Rehearsal) -> None:
    pushed = rehearsal.state().get("digests")
    if not pushed:
        pytest.skip("no image registry here: install docker-registry")
    arns = ecs(rehearsal).list_tasks(
        cluster=rehearsal.outputs(stack_outputs.TRAINING_STACK)[stack_outputs.CLUSTER]
    )["taskArns"]
    found = ecs(rehearsal).describe_tasks(
        cluster=rehearsal.outputs(stack_outputs.TRAINING_STACK)[stack_outputs.CLUSTER], tasks=arns
    )["tasks"]
    assert {task["containers"][0]["imageDigest"] for task in found} == {*pushed.values()}


def test_up_a_second_time_says_that_it_is_up(rehearsal: Rehearsal) -> None:
    run = succeeded(rehearsal, "cluster", "up", "--nodes", "2", "--yes")
    assert "Already requested: a head, 2 worker nodes." in run.stderr
    assert "trainctl shell -- ray status" in run.stdout


def test_a_command_in_the_shell_has_its_own_exit_code_and_output(rehearsal: Rehearsal) -> None:
    run = trainctl(rehearsal, "shell", "--", "sh", "-c", "echo data; echo note >&2; exit 7")
    assert (run.returncode, run.stdout, run.stderr) == (7, "data\n", "note\n")


def test_a_sharded_run_is_killed_resumed_and_exported_in_the_bucket(rehearsal: Rehearsal) -> None:
    account = account_at(rehearsal.state()["endpoint"])
    bucket = rehearsal.outputs(stack_outputs.CORE_STACK)[stack_outputs.BUCKET]
    run = f"{runs.RUNS_PREFIX}/sharded"

    def keys(prefix: str) -> set[str]:
        found = account.items("s3", "list_objects_v2", "Contents", Bucket=bucket, Prefix=prefix)
        return {each["Key"].removeprefix(prefix) for each in found}

    def read(name: str) -> str:
        body = account.client("s3").get_object(Bucket=bucket, Key=f"{run}/{name}")["Body"]
        return str(body.read().decode())

    training = ["shell", "--", "python", "-m", "training.launch", "fsdp", "--workers", "2"]
    training += ["--run", "sharded", "--max-steps", "56", "--evaluate-every", "8", "--json"]
    first = subprocess.Popen(
        **command(rehearsal, *training), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    saved = "checkpoints/step-00000008/manifest.json"
    eventually(
        "a checkpoint is whole",
        lambda: f"/{saved}" in keys(run),
        timeout_s=300,
        over=lambda: first.poll() is not None and first.communicate()[0],
    )
    # The command in the head is killed, as if its host were lost; Ray ends its workers.
    (head,) = tasks_of(rehearsal, nodes.HEAD)
    kill = (
        "import psutil\n"
        "for each in psutil.process_iter(['cmdline']):\n"  # not of those that end meanwhile
        "    if 'training.launch' in (each.info['cmdline'] or ()):\n"
        "        each.kill()\n"
    )
    rehearsal.engine("exec", head["runtime_id"], "python", "-c", kill)
    said = first.communicate(timeout=120)[0]
    assert first.returncode != 0, said
    assert "/result.json" not in keys(run)

    result = json.loads(succeeded(rehearsal, *training).stdout)
    assert result == json.loads(read("result.json"))
    assert len({*result["hosts"]}) == 2, "a rank on each worker"
    assert result["resumed_from"] in range(8, 56, 8)
    assert json.loads(read("evaluation.json"))["loss"] == result["loss"]
    events = [json.loads(line) for line in read("metrics.jsonl").splitlines()]
    (loaded,) = [each for each in events if each["type"] == "loaded"]
    (before,) = [
        each
        for each in events
        if each["type"] == "evaluation" and each["step"] == result["resumed_from"]
    ]
    assert loaded["loss"] == pytest.approx(before["loss"], abs=1e-5)
    newest = keys(f"{run}/checkpoints/step-00000056-lease2/")
    assert {"__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"} <= newest

    place = f"s3://{bucket}/exported"
    export = ["shell", "--", "python", "-m", "training.export", "sharded", "--to", place]
    assert succeeded(rehearsal, *export).stdout.strip() == place
    assert keys("exported/") == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
