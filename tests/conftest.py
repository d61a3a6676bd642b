"""Fixtures of all tests: an environment that reaches nothing outside, and the real data's place.

``aws`` starts a local AWS on loopback, once per session, and ``s3_endpoint`` points this process at
it. Tests that use either are slow.
"""

import os
import shutil
import signal
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from rehearsal.local_aws import LocalAws, is_healthy, local_aws

pytest_plugins = ["tests.ordering"]

# A busy machine makes no example slow.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

ROOT = Path(__file__).resolve().parents[1]

# Started in the background of a script, a process ignores Ctrl-C and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Set before anything imports Ray, transformers or Matplotlib: they read it when imported. The
# processes that tests start inherit it.
for _name in [name for name in os.environ if name.startswith("AWS_")]:
    del os.environ[_name]  # no test may touch a real account
os.environ |= {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "agg",
    # Threads of torch spin while they wait for a busy processor: small models take 10x as long.
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A cluster that one test starts here makes a token, by default, which others then lack.
    "RAY_AUTH_MODE": "disabled",
}


def copy_project(folder: Path) -> None:
    """Copy the files of the project as they are now, without what git ignores."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # not deleted, and no link to an environment
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


@pytest.fixture(scope="session", autouse=True)
def _matplotlib_writes_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        yield


@pytest.fixture(autouse=True)
def _where_the_tests_began() -> Iterator[None]:
    """A folder that one test leaves the process in is gone for those after it."""
    begun = Path.cwd()
    yield
    stayed = Path().samefile(begun)
    os.chdir(begun)
    assert stayed, "the test has left its process in another folder: use monkeypatch.chdir"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Folder of the real data sets, beside the repository. Skips the test where there is none."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no real data: ../shared/data does not exist beside this repository")
    return folder


@pytest.fixture(scope="session")
def fashion_mini(data_dir: Path) -> Path:
    """Folder of the first 4,000 training and 1,000 test images of FashionMNIST, IDX-gz."""
    folder = data_dir / "fashion-mnist-mini"
    if not folder.is_dir():
        pytest.skip("no real data: ../shared/data has no fashion-mnist-mini")
    return folder


@pytest.fixture(scope="session")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAws]:
    """A local AWS, started once per session. Tests that use it are slow."""
    if not (ROOT / ".venv-aws" / "bin" / "python").exists():
        pytest.skip("no AWS emulator: `make venv-aws` installs it into .venv-aws")
    with local_aws(tmp_path_factory.mktemp("aws")) as running:
        yield running
    assert not is_healthy(running.endpoint), "the local AWS still answers after it was stopped"


@pytest.fixture
def s3_endpoint(aws: LocalAws, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of an S3 on loopback; the environment sends boto3, s3fs and pyarrow there.

    The server lives as long as the session, so every test makes a bucket of its own name.
    """
    for name, value in aws.environment().items():
        monkeypatch.setenv(name, value)
    return aws.endpoint


def write_wheel(
    folder: Path,
    *,
    requires: str = "",
    name: str = "greeting",
    version: str = "1.0",
    script: str = "",
    code: str = 'WORDS = "installed"\n\n\ndef main():\n    print(WORDS)\n',
) -> Path:
    """A package as a file that pip installs without an index.

    Args:
        script: of its command line programs, such as ``greet = greeting:main``.
        code: of its module.
    """
    path = folder / f"{name}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if requires:
        metadata += f"Requires-Dist: {requires}\n"
    about = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{about}/METADATA": metadata,
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    if script:
        files[f"{about}/entry_points.txt"] = f"[console_scripts]\n{script}\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for each, content in files.items():
            wheel.writestr(each, content)
    return path
