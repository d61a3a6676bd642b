"""Names that come from outside stay below their folder."""

from pathlib import Path

import pytest

from contract.errors import InputError
from contract.runs import RunPaths, check_relative, safe_join

ESCAPES = [
    "",
    "/etc/passwd",
    "//etc/passwd",
    "..",
    "../x",
    "a/../../x",
    "a/..",
    "a//b",
    "./a",
    "a/.",
]
ESCAPES += ["a/.", "a/", "a\\b", "..\\x", "a\0b", "a\nb", "a\x7fb", "a\udce9b"]


@pytest.mark.parametrize("name", ESCAPES)
def test_a_name_made_to_escape_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="is refused"):
        safe_join(tmp_path, name)


@pytest.mark.parametrize("name", ["a", "a/b.bin", "..a", "a..b", ".hidden", "é ü/中.txt", "a:b"])
def test_other_names_are_joined(tmp_path: Path, name: str) -> None:
    assert safe_join(tmp_path, name) == tmp_path / name
    assert check_relative(name) == name


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "out").symlink_to(tmp_path)
    (folder / "inside").symlink_to(folder)
    with pytest.raises(InputError, match="leads out"):
        safe_join(folder, "out/x")
    assert safe_join(folder, "inside/x") == folder / "inside" / "x"


def test_a_runs_files_have_one_address_each() -> None:
    for root in ("/data/runs", "s3://bucket/runs/"):
        paths = RunPaths.of(root, "mine")
        assert paths.checkpoint(12) == f"{root.rstrip('/')}/mine/checkpoints/step-00000012"
        assert paths.file("result.json") == f"{root.rstrip('/')}/mine/result.json"
    with pytest.raises(InputError, match="run name"):
        RunPaths.of("/data", "../x")
