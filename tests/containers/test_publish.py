"""Publishing names images after what is in them, and refuses what could not be traced."""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any, ClassVar

import pytest

from containers import publish
from containers.publish import DockerCommand, PublishError
from contract.errors import InputError
from tests.conftest import ROOT


class Recorder(DockerCommand):
    """Stands for the docker command: notes what it was asked, and answers."""

    calls: ClassVar[list[tuple[str, ...]]] = []
    answers: ClassVar[dict[str, str]] = {}

    def run(self, *arguments: str, capture: bool = False) -> str:
        self.calls.append(arguments)
        return self.answers.get(arguments[0], "") if capture else ""


@pytest.fixture
def docker() -> Recorder:
    Recorder.calls, Recorder.answers = [], {}
    return Recorder()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("training", "containers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file.py").write_text("x = 1\n")
    (tmp_path / "requirements.lock").write_text("torch==2\n")
    identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    return tmp_path


def test_the_tag_is_the_commit(repository: Path) -> None:
    sha = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=repository, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert publish.commit() == sha


def test_changes_that_no_commit_has_are_refused_by_name(repository: Path) -> None:
    (repository / "training" / "file.py").write_text("x = 2\n")
    with pytest.raises(InputError, match=r"(?s)a tag must name what is in it.*training/file\.py"):
        publish.commit()


def test_without_a_repository_a_tag_must_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(InputError, match="give a name with --tag"):
        publish.commit()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tag", "t"], "--head and --worker are needed to push"),
        (["--tag", "a b", "--no-push"], "tag 'a b' is not usable"),
        (["--tag", "x" * 129, "--no-push"], "is not usable"),
    ],
)
def test_bad_input_is_refused_before_anything_is_built(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish.main(argv) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_machine_without_docker_is_told_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    assert publish.main(["--tag", "t", "--no-push"]) == 1
    assert "there is no command 'docker': install Docker" in capsys.readouterr().err


def test_both_targets_are_built_with_what_they_are_in_their_labels(docker: Recorder) -> None:
    publish.build(
        docker, targets={"head": "h:1", "worker": "w:1"}, git_sha="abc", build_arguments=["A=b"]
    )
    head, worker = docker.calls
    assert head[:1] == worker[:1] == ("build",)
    assert head[3:7] == ("--target", "head", "--tag", "h:1")
    assert worker[3:7] == ("--target", "worker", "--tag", "w:1")
    for call in docker.calls:
        assert {"A=b", "GIT_SHA=abc"} < {*call}
        labels = [part for part in call if part.startswith("ecs-train.")]
        assert [label.partition("=")[0] for label in labels] == [
            "ecs-train.ray",
            "ecs-train.torch",
            "ecs-train.transformers",
        ]
        assert all(re.fullmatch(r"\d+\.\d+\.\d+", label.partition("=")[2]) for label in labels)


def test_a_cache_elsewhere_needs_buildx(docker: Recorder) -> None:
    publish.build(docker, targets={"head": "h:1"}, git_sha="abc", options=["--cache-from=type=gha"])
    assert docker.calls[0][:3] == ("buildx", "build", "--load")
    assert "--cache-from=type=gha" in docker.calls[0]


@pytest.mark.parametrize(
    "result", [{"steps": 1, "status": "succeeded"}, {"steps": 2, "status": "failed"}]
)
def test_an_image_that_does_not_train_is_not_published(
    result: dict[str, Any], docker: Recorder
) -> None:
    Recorder.answers = {"run": json.dumps(result)}
    with pytest.raises(PublishError, match="two steps of training ended as"):
        publish.try_out(docker, "w:1")


def test_the_digest_is_that_of_the_repository_pushed_to(docker: Recorder) -> None:
    names = ["other/w@sha256:1", "here/w@sha256:2"]
    Recorder.answers = {"image": json.dumps(names)}
    assert publish.push(docker, "here/w:tag") == "sha256:2"
    Recorder.answers = {"image": "[]"}
    with pytest.raises(PublishError, match="no digest"):
        publish.push(docker, "here/w:tag")


def test_the_tag_is_written_where_the_next_deploy_reads_it(tmp_path: Path) -> None:
    settings = tmp_path / "cdk.json"
    before = (ROOT / "cdk.json").read_text()
    settings.write_text(before)
    publish.write_tag(settings, "0123abcd")
    changed = json.loads(settings.read_text())
    assert changed["context"]["image_tag"] == "0123abcd"
    changed["context"]["image_tag"] = json.loads(before)["context"]["image_tag"]
    assert changed == json.loads(before)
    assert len(settings.read_text().splitlines()) == len(before.splitlines())
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match="no setting image_tag"):
        publish.write_tag(tmp_path / "other.json", "t")
