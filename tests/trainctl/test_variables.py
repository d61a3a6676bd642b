"""What looks like a secret is refused as a variable of a job, as a word of its command and in a
file of its code; what only sounds like one is not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from containers.program.files.s3_files import report
from contract.secret_text import masked
from tests.aws.s3 import S3
from tests.conftest import ROOT
from trainctl.aws.errors import UsageError
from trainctl.aws.logs import NodeLogs
from trainctl.aws.tasks import Task
from trainctl.jobs.code_folder import CodeFolder
from trainctl.jobs.variables import refuse_secret_files, refuse_secrets
from training.record.writer import RunRecord

#: Made up here, in the shapes that their issuers give them.
HEX, LETTERS = "7d1f0c93be2a" * 4, "QwErTyUiOpAsDfGhJkLzXcVbNmqWeRtYuI"
TOKEN = f"hf_{LETTERS}"
DIGITS = "q7Wf2ZkP9vLs3XbT6nYd8RcM4gHj5tUe1oAq"
AWS = "AKIA" + "Q3EGS5XUVER4W2BZ"
PEM = "-----BEGIN RSA PRIVATE KEY-----"
SHAPED = [
    TOKEN,
    f"ghp_{DIGITS}",
    f"github_pat_{DIGITS * 2}{LETTERS[:10]}",
    f"glpat-{DIGITS[:20]}",
    AWS,
    f"sk-proj-{DIGITS}T3BlbkFJ{DIGITS}",
    f"sk-ant-api03-{DIGITS * 2}",
    f"AIza{DIGITS[:35]}",
    f"npm_{DIGITS}",
    f"pypi-AgEIcHlwaS5vcmc{DIGITS * 2}",
    "xoxb-" + f"4096128256-4096128256-{DIGITS[:24]}",
    f"sk_live_{DIGITS[:24]}",
    f"wandb_v1_{DIGITS}",
    f"r8_{DIGITS}Z",
    f"dapi{HEX[:32]}",
    f"https://me:{DIGITS[:12]}@host/x",
    f"redis://:{DIGITS[:10]}@host:6379",
    f"-----BEGIN OPENSSH PRIVATE KEY-----\n{DIGITS}",
]
#: Without a shape: by the name beside them. Each in a file, and what is refused there.
NAMED = {
    "login.py": f"wandb.login(key='{HEX[:40]}')",
    "run.sh": f"wandb login {HEX[:40]}",
    "conf/wandb.yaml": f"wandb_key: {HEX[:40]}",
    "comet.py": f'experiment = Experiment(api_key="{DIGITS[:25]}")',
    "neptune.py": f'NEPTUNE_API_TOKEN = "{DIGITS}=="',
    "a.py": f"os.environ['WANDB_API_KEY'] = '{HEX[:40]}'",
    "start.sh": f"python train.py --wandb-key {HEX[:40]} --lr 1",
    "hydra.sh": f"python train.py wandb.key={HEX[:40]}",
    "prod.env": f"DB_PASSWORD={DIGITS[:10]}",
    "env": "export DB_PASSWORD=correct-horse-battery",
    ".Renviron": f"SERVICE_TOKEN={DIGITS[:16]}",
    "db.toml": f"password = '{DIGITS[:10]}'",
    "aws.ini": "[default]\naws_secret_access_key = " + f"{DIGITS}/aB3",
    ".npmrc": f"//registry.example/:_authToken={DIGITS[:20]}",
    "account.json": f'{{"private_key": "-----BEGIN PRIVATE KEY-----\\nMIIE{DIGITS}"}}',
    "black.py": f'wandb.login(\n    key="{HEX[:40]}",\n)',
    "again.py": f'wandb.login(relogin=True, key="{HEX[:40]}")',
    "default.py": f'add_argument("--api-key", default="{HEX[:40]}")',
    "set.py": f'os.environ.setdefault("WANDB_API_KEY", "{HEX[:40]}")',
    "typed.py": f'API_KEY: Final[str] = (\n    "{HEX[:40]}"\n)',
    "comment.yaml": f"api_key: {HEX[:40]} # mine",
    "curl.sh": f"curl -H 'Authorization: Bearer {HEX[:40]}' $URL",
    "shell.ipynb": f'{{"source": ["!wandb login {HEX[:40]}\\n", "import x"]}}',
    "magic.ipynb": f'{{"source": ["%env WANDB_API_KEY {HEX[:40]}"]}}',
    "old.pem.txt": f"{PEM}\nProc-Type: 4,ENCRYPTED\nDEK-Info: A,B\n\nMIIE{DIGITS}",
    "nb.ipynb": f'{{"source": ["login(key=\\"{HEX[:40]}\\")\\n"]}}',
}


@pytest.mark.parametrize("value", SHAPED)
def test_a_token_is_known_by_its_shape_at_each_door(tmp_path: Path, value: str) -> None:
    with pytest.raises(UsageError, match=r"URL.* \(\S{4}\.\.\.\)") as refused:
        refuse_secrets({"A": "b", "URL": value})
    said = str(refused.value)
    if "\n" not in value:
        with pytest.raises(UsageError, match="--x") as refused:
            refuse_secrets({}, ["python", "train.py", "--x", value])
        said += str(refused.value)
    for name in ("train.py", "notes.md", "a.ipynb"):
        (tmp_path / name).write_text(f"first\nlogin('{value}')\n")
        with pytest.raises(UsageError, match=f"{name}, line 2 ") as refused:
            refuse_secret_files(tmp_path, [tmp_path / name])
        said += str(refused.value)
    assert value[:5] not in said.replace(str(tmp_path), ""), "more than four characters are shown"
    for line in (f"401: bad token {value}", json.dumps({"message": f"got {value}."})):
        shown = value.rpartition("@")[0] or value
        for text in (masked(line), masked(line, by_name=False)):
            assert shown[-5:] not in text, "reasons, records and logs show it"


@pytest.mark.parametrize("name", NAMED)
def test_a_secret_without_a_shape_is_known_by_the_name_beside_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(NAMED[name])
    with pytest.raises(UsageError, match=f"{name}, line ."):
        refuse_secret_files(tmp_path, [path])
    refuse_secret_files(tmp_path, [path], [name])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "qwertyuiopasdfgh"),
        ("db_password", "correct-horse-battery"),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCY"),
        ("DEPLOY_KEY", HEX[:24]),
        ("MY_TOKEN", DIGITS[:14]),
    ],
)
def test_a_variable_is_refused_by_its_name(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        refuse_secrets({"A": "b", name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_TOKENS", "1000000000000"),
        ("EOS_TOKEN", "<|endoftext|>"),
        ("SORT_KEY", "date"),
        ("PARTITION_KEY", "customer_region"),
        ("PAD_TOKEN", "endoftext_pad"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_TOKEN", ""),
        ("DATA", "s3://bucket/prefix/with/a/long/name"),
        ("PROXY", "http://user:$PASSWORD@proxy:80"),
        ("STORE", "tcp://10.0.0.1:29500/a@b"),
    ],
)
def test_what_is_none_is_none(name: str, value: str) -> None:
    refuse_secrets({name: value})


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["python", "train.py", "--hf_token", TOKEN], "--hf_token"),
        (["python", "train.py", f"--hf-token={TOKEN}"], "--hf-token"),
        (["python", "train.py", TOKEN], "word-3"),
        (["sh", "-c", f"cd x && HF_TOKEN={TOKEN} python train.py"], "HF_TOKEN"),
        (
            ["bash", "-c", f"wandb login --api-key '{HEX[:40]}' && python a.py"],
            "--api-key",
        ),
        (["bash", "-c", f"wandb login {HEX[:40]} && python a.py"], "login"),
        (["python", "a.py", f"wandb.key={HEX[:40]}"], "wandb.key"),
        (["sh", "-c", f"git clone https://me:{TOKEN}@host/x"], "word-3"),
        (["python", "a.py", "--db", f"postgres://u:{DIGITS[:12]}@db/x"], "--db"),
        (["ddp", "--model", AWS], "--model"),
    ],
)
def test_a_word_of_the_command_is_refused_by_its_name_and_can_be_excused(
    words: list[str], name: str
) -> None:
    with pytest.raises(UsageError, match=name) as refused:
        refuse_secrets({}, words)
    assert TOKEN not in str(refused.value)
    assert DIGITS[:12] not in str(refused.value)
    for given in (name, name.lstrip("-")):
        refuse_secrets({}, words, [given])


def test_usual_words_are_no_secrets() -> None:
    refuse_secrets({"HF_TOKEN": TOKEN}, [], ["HF_TOKEN"])
    words = "python train.py --eos-token <|endoftext|> --revision 5f0b8b5ae8ff4cf8c2ec1ab0b8f4ad06"
    words += " --sort-key=date --lr 1e-4 --data s3://bucket/a --init tcp://10.0.0.1:29500"
    refuse_secrets({}, [*words.split(), "sh", "-c", 'x="$HF_TOKEN" run --token $HF_TOKEN'])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("id_rsa.pub", "ssh-rsa AAAA"),
        ("monkey.pem", "-----BEGIN CERTIFICATE-----"),
        ("credentials.py", "def read(): ..."),
        # What explains, checks or draws secrets.
        ("README.md", "login with hf_xxxxxxxxxxxxxxxxxxxxxxxx, AKIAIOSFODNN7EXAMPLE"),
        ("setup.sh", "export HF_TOKEN=YOUR_TOKEN_HERE WANDB_API_KEY=$1"),
        ("check.py", "if text.startswith('-----BEGIN PRIVATE KEY-----'): raise"),
        ("a.ipynb", '<div class="sk-toggleable__content-wrapper">'),
        ("compose.yaml", "postgresql://postgres:postgres@localhost/db"),
        ("data.bin", f"\0{TOKEN}"),
        # Names of functions, settings and keys of public repositories: verl, Megatron-LM, torch,
        # AWS's SDK, TRL, Hydra, and a conversation about a password in LLaMA-Factory's data.
        (
            "convert.py",
            "def hf_to_mcore_config_dpskv3(hf_config): return hf_to_mcore_config_dpskv3",
        ),
        ("optimizer.py", "fp32_from_float16_params_key = 'fp32_from_fp16_params'"),
        ("protocol.py", '_padding_size_key = "_padding_size_key_x123d"'),
        ("guards.py", "l1_key = accessor_info.l1_key"),
        ("waiters.json", '"result_key": "S3AccessPointAttachments"'),
        ("example.json", '"ClientRequestToken": "a8ca07e4-61ec-4399-99f4-19853801bcd5"'),
        ("report.py", "f(url, private_token=RO_API_TOKEN, timeout=30  # A"),
        ("args.py", "token=script_args.hub_token_v2, api_key=os.environ['OPENAI_API_KEY']"),
        ("conf.yaml", "token: ${oc.env:HF_TOKEN}\nsort_key: resnet50_imagenet1k_v2"),
        ("chat.json", '"value": "{\\"password\\": \\"aB3#fG7!kL9@\\"}"'),
    ],
)
def test_what_only_sounds_like_a_secret_is_none(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    refuse_secret_files(tmp_path, [tmp_path / name])
    assert name == "data.bin" or masked(text) == text


def test_reasons_records_and_logs_show_no_token(tmp_path: Path) -> None:
    s3, display = S3(), MagicMock()
    report(f"failed: 401 {TOKEN}", storage="s3://bucket", run="r", job="j", client=s3)
    record = RunRecord(
        str(tmp_path), run="r", recipe="ddp", settings={"a": TOKEN}, environment={}, display=display
    )
    record.close()
    task = SimpleNamespace(id="t", kind="head", has_stopped=False)
    event = {"logStreamName": "head/node/t", "timestamp": 1, "message": TOKEN, "eventId": "e"}
    clients: Any = MagicMock()
    clients.logs.get_paginator().paginate().search.return_value = [event]
    logs = NodeLogs(clients, group="g")
    (line,) = logs._filtered(["head/node/t"], since=0, of_stream={"head/node/t": cast(Task, task)})
    kept = [*map(bytes.decode, s3.objects.values()), *(p.read_text() for p in tmp_path.iterdir())]
    for text in (*kept, line.text):
        assert TOKEN not in text
        assert "hf_Q***" in text or "{}" in text


def test_a_record_keeps_the_hashes_that_the_next_attempt_compares() -> None:
    config = json.dumps({"text_key": HEX[:40], "git_sha": HEX[:40]})
    assert masked(config, by_name=False) == config


@pytest.mark.parametrize(
    "name",
    ["id_rsa", ".netrc", ".git-credentials", ".pypirc", "key.pem", "credentials", "kaggle.json"],
)
def test_a_file_with_credentials_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(UsageError, match=name):
        refuse_secret_files(tmp_path, [tmp_path / name])
    refuse_secret_files(tmp_path, [tmp_path / name], [name])


def test_this_checkout_can_be_given_as_code() -> None:
    refuse_secret_files(ROOT, CodeFolder.of(ROOT).files)
