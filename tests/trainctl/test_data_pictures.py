"""``trainctl data prepare``: output and exit codes. The sets themselves are tested in
tests/training."""

from pathlib import Path

import pytest

from tests.trainctl.conftest import Cli
from tests.training import sample_pictures


def test_pictures_are_prepared_by_a_command(tmp_path: Path, cli: Cli) -> None:
    source = sample_pictures.write_tree(tmp_path / "source", num_train=30, num_val=10)
    (damaged,) = sample_pictures.damage(source / "train", num=1)
    target = tmp_path / "set"
    wish = ("--to", str(target), "--size", "64", "--processes", "1")
    said = cli("data", "prepare", "imagenet", str(source), *wish)
    assert said.out == f"{target}\n"
    assert f"left out: train/{damaged}: the file is empty" in said.err
    assert "29 train + 10 val pictures of 10 classes, 1 damaged" in said.err
    assert "100% of 40 pictures" in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["prepare", "imagenet", "nowhere", "--to", "there"], "nowhere does not exist"),
        (["prepare", "imagenet", ".", "--to", "there", "--form", "zip"], "--form is 'zip'"),
    ],
    ids=["source", "form"],
)
def test_mistakes_are_one_sentence(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cli: Cli,
) -> None:
    monkeypatch.chdir(tmp_path)
    said = cli.refuses("data", *words).splitlines()
    assert said[-1].startswith("error: ")
    assert message in said[-1]
    assert not [*tmp_path.iterdir()]


def test_a_file_is_no_place_for_a_set_and_s3_is_no_source(tmp_path: Path, cli: Cli) -> None:
    file = tmp_path / "file"
    file.write_text("")
    to = ["--to", str(file)]
    for words, message in (
        (["prepare", "imagenet", str(tmp_path), *to], "file is not a folder"),
        (["prepare", "imagenet", str(tmp_path), "--to", f"{file}/set"], "file/set is not a folder"),
        (["prepare", "imagenet", "s3://b/x", *to], "fetch it first (aws s3 sync s3://b/x DIR)"),
    ):
        said = cli.refuses("data", *words).splitlines()[-1]
        assert said.startswith("error: ")
        assert message in said
