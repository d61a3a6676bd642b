"""What every test gets: an environment that reaches nothing outside, and where the real data lies.

``s3_endpoint`` starts an AWS emulator on loopback, once per session. Tests that use it are slow.
"""

import http.client
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Set before anything imports Ray, transformers or Matplotlib: they read it when imported. The
# processes that tests start inherit it.
for _name in [name for name in os.environ if name.startswith("AWS_")]:
    del os.environ[_name]  # nobody's account is to be touched by a test
os.environ |= {
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "agg",
    # Threads of torch spin while they wait for a busy processor: small models take 10x as long.
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@pytest.fixture(scope="session", autouse=True)
def _matplotlib_writes_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        yield


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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _is_healthy(endpoint: str) -> bool:
    connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=5)
    try:
        connection.request("GET", "/_ministack/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        return False
    finally:
        connection.close()


@pytest.fixture(scope="session")
def _s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = ROOT / ".venv-aws" / "bin" / "python"
    if not python.exists():
        pytest.skip("no AWS emulator: `make venv-aws` installs it into .venv-aws")
    folder = tmp_path_factory.mktemp("ministack")
    port = _free_port()
    endpoint = f"http://127.0.0.1:{port}"
    environment = {
        "PATH": os.environ["PATH"],
        "TMPDIR": str(folder),
        "HOME": str(folder),
        "GATEWAY_PORT": str(port),
        "BIND_HOST": "127.0.0.1",  # its defaults listen on all interfaces, here and for MQTT
        "IOT_MTLS_ENABLED": "0",
        "SFTP_ENABLED": "0",
        # Where Docker runs, it would stop what an earlier emulator has started there.
        "DOCKER_HOST": f"unix://{folder}/no-docker",
    }
    log = folder / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [python, "-m", "ministack"],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 60
        while not _is_healthy(endpoint):
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the AWS emulator did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield endpoint
    finally:
        server.terminate()
        try:
            server.wait(timeout=15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
    assert not _is_healthy(endpoint), "the AWS emulator still answers after it was stopped"


@pytest.fixture
def s3_endpoint(_s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of an S3 on loopback; the environment sends boto3, s3fs and pyarrow there.

    The server lives as long as the session, so every test makes a bucket of its own name.
    """
    for name, value in {
        "AWS_ENDPOINT_URL": _s3_server,
        "AWS_ACCESS_KEY_ID": "000000000000",  # the emulator takes the key for the account
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    return _s3_server
