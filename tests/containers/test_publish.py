"""Publishing names images after what is in them, and builds nothing that is there already."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from containers import publish
from containers.publish import DockerCommand, PublishError
from contract.images import content_tag


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


def test_the_label_of_the_images_is_the_commit_or_says_that_it_is_not(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["git", "rev-parse", "HEAD"]
    head = subprocess.run(command, cwd=repository, capture_output=True, text=True).stdout.strip()
    assert publish.commit() == head
    (repository / "other.md").write_text("not in the images")
    assert publish.commit() == head
    (repository / "training" / "file.py").write_text("x = 2\n")
    assert publish.commit() == f"{head}-dirty"
    outside = tmp_path_factory.mktemp("outside")
    monkeypatch.setattr(publish, "ROOT", outside)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(outside.parent))
    assert publish.commit() == "unknown"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tag", "t", "--head", "h"], "give both --head and --worker, or neither"),
        (["--tag", "a b", "--no-push"], "tag 'a b' is not usable"),
        (["--tag", "x" * 129, "--no-push"], "is not usable"),
        (["--worker-torch", "cpu", "--no-push"], "name this one with --tag NAME"),
        (["--build-arg", "BASE_IMAGE=x", "--no-push"], "deploy it with -c image_tag=NAME"),
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
    for call, name in zip(docker.calls, ("head", "worker"), strict=True):
        assert call[0] == "build"
        assert call[3:7] == ("--target", name, "--tag", f"{name[0]}:1")
        assert {"A=b", "GIT_SHA=abc"} < {*call}
        labels = [part for part in call if part.startswith("ecs-train.")]
        assert [label.partition("=")[0] for label in labels] == [
            "ecs-train.ray",
            "ecs-train.torch",
            "ecs-train.transformers",
        ]
        assert all(re.fullmatch(r"\d+\.\d+\.\d+", label.partition("=")[2]) for label in labels)


@pytest.mark.parametrize(
    "result", [{"steps": 1, "status": "succeeded"}, {"steps": 2, "status": "failed"}]
)
def test_an_image_that_does_not_train_is_not_published(
    result: dict[str, Any], docker: Recorder
) -> None:
    Recorder.answers = {"run": json.dumps(result)}
    with pytest.raises(PublishError, match="two steps of ddp ended as"):
        publish.try_out(docker, "w:1")


def test_the_digest_is_that_of_the_repository_pushed_to(docker: Recorder) -> None:
    names = ["other/w@sha256:1", "here/w@sha256:2"]
    Recorder.answers = {"image": json.dumps(names)}
    assert publish.push(docker, "here/w:tag") == "sha256:2"
    Recorder.answers = {"image": "[]"}
    with pytest.raises(PublishError, match="no digest"):
        publish.push(docker, "here/w:tag")


class Registry(Recorder):
    """One that has some images already, and takes others."""

    images: ClassVar[set[str]] = set()

    def has(self, image: str) -> bool:
        return image in self.images

    def log_in(self, registry: str, *, password: str) -> None:
        self.calls.append(("login", registry, password))

    def run(self, *arguments: str, capture: bool = False) -> str:
        super().run(*arguments, capture=capture)
        match arguments[0]:
            case "run":
                return json.dumps({"steps": 2, "status": "succeeded"})
            case "image":
                return json.dumps([f"{arguments[-1].rpartition(':')[0]}@sha256:1"])
        return ""


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch, repository: Path) -> Callable[..., dict[str, Any]]:
    """``pushed(*arguments)``: what the command prints, with a registry that has ``images``."""

    def run(*arguments: str, images: Sequence[str] = ()) -> dict[str, Any]:
        Recorder.calls, Recorder.answers = [], {}
        Registry.images = {*images}
        done: dict[str, Any] = publish.publish(publish.build_parser().parse_args(arguments))
        return done

    for folder in ("containers", "training", "requirements"):
        (repository / folder).mkdir(exist_ok=True)
    (repository / "requirements" / "training.txt").write_text("ray==1.2.3\n")
    (repository / "training" / "__init__.py").write_text('__version__ = "1"\n')
    set_base(repository, "")
    monkeypatch.setattr(publish, "DockerCommand", Registry)
    return run


def set_base(repository: Path, image: str, *, by_preset: bool = False) -> None:
    own = {"base_image": image}
    context = {"presets": {"lab": own}, "preset": "lab"} if by_preset else {"defaults": own}
    (repository / "cdk.json").write_text(json.dumps({"context": {"deployment": "", **context}}))


@pytest.mark.parametrize("by_preset", [False, True])
def test_another_base_image_makes_another_tag_and_is_what_is_built_on(
    pushed: Callable[..., dict[str, Any]], repository: Path, *, by_preset: bool
) -> None:
    own = content_tag(repository)
    set_base(repository, "mine@sha256:1", by_preset=by_preset)
    done = pushed("--head", "r/h", "--worker", "r/w", images=[f"r/h:{own}", f"r/w:{own}"])
    assert done["tag"] == content_tag(repository, base="mine@sha256:1") != own
    built = [call for call in Recorder.calls if call[0] == "build"]
    assert len(built) == 2
    assert all("BASE_IMAGE=mine@sha256:1" in call for call in built)


def test_a_name_that_is_taken_is_refused_because_it_says_nothing_of_the_sources(
    pushed: Callable[..., dict[str, Any]],
) -> None:
    with pytest.raises(PublishError, match=r"r/h:v1.*--tag"):
        pushed("--head", "r/h", "--worker", "r/w", "--tag", "v1", images=["r/h:v1"])
    assert Recorder.calls == []


def test_the_tag_is_that_of_the_content_and_what_is_there_is_not_built_again(
    pushed: Callable[..., dict[str, Any]], repository: Path
) -> None:
    tag = content_tag(repository)
    done = pushed("--head", "r/h", "--worker", "r/w", images=[f"r/h:{tag}"])
    assert done == {
        "tag": tag,
        "head": {"image": f"r/h:{tag}"},
        "worker": {"image": f"r/w:{tag}", "digest": "sha256:1"},
    }
    said = [" ".join(call) for call in Recorder.calls]
    assert [call for call in said if f"r/h:{tag}" in call] == []
    built, ddp, fsdp, push, _ = said
    assert "--platform linux/amd64" in built
    assert "launch ddp" in ddp
    assert "launch fsdp" in fsdp
    assert push == f"push r/w:{tag}"
    assert pushed("--head", "r/h", "--worker", "r/w", images=[f"r/h:{tag}", f"r/w:{tag}"])
    assert Recorder.calls == []


def test_the_repositories_are_those_of_the_stack_and_the_login_ends(
    pushed: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = "1.dkr.ecr.eu-west-1.amazonaws.com"
    repositories = {"head": f"{registry}/h", "worker": f"{registry}/w"}
    monkeypatch.setattr(publish, "repositories_of_the_stack", lambda: (repositories, "p"))
    done = pushed("--tag", "t")
    assert done["head"]["image"] == f"{registry}/h:t"
    assert Recorder.calls[0] == ("login", registry, "p")
    assert Recorder.calls[-1] == ("logout", registry)


@pytest.mark.parametrize(
    ("region", "message", "code"),
    [("", "set AWS_REGION", 2), ("eu-west-1", "cannot be read: Could not connect", 79)],
)
def test_where_there_is_no_deployment_one_sentence_says_so(
    region: str,
    message: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", region)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    assert publish.main([]) == code
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""
