"""``trainctl download``: what each node wrote, and nothing outside the folder that was named."""

import subprocess
from pathlib import Path

import pytest

from contract import files, runs
from contract.files import SavedFile, base_to_json
from tests.trainctl.account import Account
from tests.trainctl.conftest import Cli
from tests.trainctl.saved import save
from trainctl.jobs.code_folder import DOWNLOADED, files_of


@pytest.fixture
def saved(account: Account) -> Account:
    save(account, 0, {"work/last.pt": b"older"})
    save(account, 0, {"work/last.pt": b"weights", "output/log.txt": b"zero"}, number=2, kind="part")
    save(account, 1, {"output/log.txt": b"one"})
    account.objects |= {"runs/r1/config.json": b"{}", "runs/r1/model/config.json": b"{}"}
    account.objects[runs.ray_prefix("r1") + "train/checkpoint_0/model.pt"] = b"of ray"
    return account


def below(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in (DOWNLOADED, ".gitignore")
    }


@pytest.mark.usefixtures("saved")
def test_it_fetches_what_all_nodes_wrote(tmp_path: Path, cli: Cli) -> None:
    printed = cli("download r1 --to", str(tmp_path / "new"))
    assert below(tmp_path / "new") == {
        "node-0/work/last.pt": b"weights",
        "node-0/output/log.txt": b"zero",
        "node-1/output/log.txt": b"one",
        "ray/train/checkpoint_0/model.pt": b"of ray",
        "model/config.json": b"{}",
    }
    assert (tmp_path / "new/node-0/work/last.pt").stat().st_mode & 0o777 == 0o755
    assert printed.out == f"{tmp_path / 'new'}\n"


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("in_git", [False, True])
def test_what_was_fetched_into_a_folder_of_code_is_not_uploaded_again(
    code: Path, in_git: bool, cli: Cli
) -> None:
    if in_git:
        subprocess.run(["git", "init", "-q", str(code)], check=True)
    mine = code / "r1" / "ray" / "mine.py"
    mine.parent.mkdir(parents=True)
    mine.touch()
    expected = {code / "mine.py", mine}
    cli("download r1 --node 0 --to", str(code / "r1"))
    assert (code / "r1" / "node-0" / "work" / "last.pt").is_file()
    assert {*files_of(code)} == expected
    # A folder that was there before is the user's.
    cli("download r1 --to", str(code / "r1"))
    assert {*files_of(code)} == {*expected, mine.parent / "train/checkpoint_0/model.pt"}


@pytest.mark.usefixtures("saved")
@pytest.mark.parametrize("words", ["--node 7", "*.jpg"])
def test_what_is_not_there_is_refused(tmp_path: Path, cli: Cli, words: str) -> None:
    cli.refuses("download r1", *words.split(), "--to", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["../../out", "/etc/x", "work/../../../x"])
def test_a_list_that_names_another_place_writes_nothing(
    account: Account, tmp_path: Path, cli: Cli, name: str
) -> None:
    save(account, 0, {"work/good": b"x", name: b"bad"})
    cli.refuses("download r1 --to", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", [b"other", None], ids=["damaged", "removed"])
def test_a_file_that_is_not_what_was_listed_is_asked_for_again(
    saved: Account, tmp_path: Path, cli: Cli, content: bytes | None
) -> None:
    (key,) = [key for key, each in saved.objects.items() if each == b"eights"]
    if content is None:
        del saved.objects[key]
    else:
        saved.objects[key] = content
    cli.refuses("download r1 last.pt --to", str(tmp_path), code=1)
    assert below(tmp_path / "node-0") == {}


def test_before_the_first_round_of_a_start_it_fetches_what_that_restores(
    saved: Account, tmp_path: Path, cli: Cli
) -> None:
    prefix = runs.output_prefix("r1")
    marks = [key for key in saved.objects if "/rounds/" in key]
    base = {number: saved.objects[key].decode() for number, key in enumerate(marks[1:])}
    saved.objects[prefix + files.start_key(2)] = b"{}"
    saved.objects[prefix + files.base_key(2)] = base_to_json(base)
    for key in marks:
        del saved.objects[key]
    cli("download r1 output/* --to", str(tmp_path))
    assert below(tmp_path) == {"node-0/output/log.txt": b"zero", "node-1/output/log.txt": b"one"}


@pytest.mark.usefixtures("saved")
def test_what_is_in_the_way_of_a_file_is_named(tmp_path: Path, cli: Cli) -> None:
    target, words = tmp_path / "node-0/work/last.pt", ("download", "r1", "last.pt", "--node", "0")
    (tmp_path / "node-0").write_text("once a file")
    assert f"{target}: Not a directory" in cli.refuses(*words, "--to", str(tmp_path))
    (tmp_path / "node-0").unlink()
    target.mkdir(parents=True)
    assert f"{target}: Is a directory" in cli.refuses(*words, "--to", str(tmp_path))
    assert below(tmp_path) == {}, "no part of a file is left"


@pytest.mark.usefixtures("saved")
def test_a_file_of_the_user_is_not_replaced_and_one_of_an_earlier_download_is(
    tmp_path: Path, cli: Cli
) -> None:
    mine = tmp_path / "ray/train/checkpoint_0/model.pt"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"a year of work")
    assert str(mine) in cli.refuses("download r1 --to", str(tmp_path))
    assert below(tmp_path) == {"ray/train/checkpoint_0/model.pt": b"a year of work"}
    for _ in range(2):
        cli("download r1 last.pt --to", str(tmp_path))
        (tmp_path / "node-0/work/last.pt").write_bytes(b"older")
    cli("download r1 last.pt --to", str(tmp_path))
    assert (tmp_path / "node-0/work/last.pt").read_bytes() == b"weights"


def test_links_that_are_left_out_are_counted(account: Account, tmp_path: Path, cli: Cli) -> None:
    links = (
        SavedFile(name="work/last.pt", link="5.pt"),
        SavedFile(name="work/first.pt", link="5.pt"),
        SavedFile(name="output/log", link="x"),
    )
    save(account, 0, {"work/5.pt": b"weights"}, *links)
    assert "node-0/work/last.pt -> 5.pt" in cli("download r1 *.pt --to", str(tmp_path)).err
    assert below(tmp_path) == {"node-0/work/5.pt": b"weights"}


@pytest.mark.usefixtures("saved")
def test_git_ignores_what_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.chdir(tmp_path)
    cli("download r1")
    status = ["git", "status", "--porcelain", "--untracked-files=all"]
    assert subprocess.run(status, capture_output=True, text=True, check=True).stdout == ""
