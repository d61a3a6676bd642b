"""What looks like a secret is refused as a variable of a job, as a word of its command and in a
file of its code; what only sounds like one is not."""

from pathlib import Path

import pytest

from tests.conftest import ROOT
from trainctl.aws.errors import UsageError
from trainctl.code_folder import CodeFolder
from trainctl.variables import refuse_secret_files, refuse_secrets

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "abcdefghijklmnop"),
        ("db_password", "correct-horse-battery"),
        ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
        ("DEPLOY_KEY", "a8f5f167f44f4964e6c998de"),
        ("OPENAI", "sk-proj-0123456789abcdefghij"),
        ("URL", f"https://user:ghp_{'a' * 36}@github.com/x/y"),
        ("CERTIFICATE", "-----BEGIN RSA PRIVATE KEY-----\nMII"),
        ("DATABASE_URL", "postgres://u:PASSWORD@db/x"),
        ("CACHE", f"redis://:{'hunter2' * 2}@host:6379"),
    ],
)
def test_a_secret_is_refused_by_its_name_or_its_value(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"--env {name} looks like a secret"):
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
            ["bash", "-c", "wandb login --api-key '0123456789abcdef0123' && python a.py"],
            "--api-key",
        ),
        (["sh", "-c", f"git clone https://me:{TOKEN}@host/x"], "word-3"),
        (["python", "a.py", "--db", "postgres://u:PASSWORD@db/x"], "--db"),
        (["ddp", "--model", "AKIAIOSFODNN7EXAMPLE"], "--model"),
    ],
)
def test_a_word_of_the_command_is_refused_by_its_name_and_can_be_excused(
    words: list[str], name: str
) -> None:
    with pytest.raises(UsageError, match=f"the command's {name} looks like a secret") as refused:
        refuse_secrets({}, words)
    assert TOKEN not in str(refused.value)
    assert "PASSWORD" not in str(refused.value)
    for given in (name, name.lstrip("-")):
        refuse_secrets({}, words, [given])


def test_usual_words_are_no_secrets() -> None:
    refuse_secrets({"HF_TOKEN": TOKEN}, [], ["HF_TOKEN"])
    words = "python train.py --eos-token <|endoftext|> --revision 5f0b8b5ae8ff4cf8c2ec1ab0b8f4ad06"
    words += " --sort-key=date --lr 1e-4 --data s3://bucket/a --init tcp://10.0.0.1:29500"
    refuse_secrets({}, [*words.split(), "sh", "-c", 'x="$HF_TOKEN" run --token $HF_TOKEN'])


KEY = "-----BEGIN PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("name", "text", "is_secret"),
    [
        # By their names.
        *((name, "x", True) for name in ("id_rsa", ".netrc", ".git-credentials", ".pypirc")),
        *(
            (name, "x", True)
            for name in ("key.pem", "a/credentials", "kaggle.json", "secrets.json")
        ),
        ("id_rsa.pub", "ssh-rsa AAAA", False),
        ("monkey.pem", "-----BEGIN CERTIFICATE-----", False),
        ("credentials.py", "def read(): ...", False),
        # By what is in them: of OpenSSL, Google, AWS, npm; a token in a script.
        ("tls/server.crt", f"{KEY}\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC\n", True),
        ("account.json", f'{{"private_key": "{KEY}\\nMIIEvQIBADANBgkqhkiG9w0B"}}', True),
        ("aws.ini", "[default]\naws_secret_access_key = " + "aB3/" * 10, True),
        (".npmrc", f"//registry.example/:_authToken={'4b1c2d3e4f5a6b7c8d9e0f'}", True),
        ("train.py", f"login('hf_{'QwErTyUiOpAsDfGhJkLzXcVbNm98'}')", True),
        ("a.yaml", f"url: postgres://u:{'Tr0ub4dor7'}@db.example.org/x", True),
        # What explains, checks or draws them.
        ("README.md", "login with hf_xxxxxxxxxxxxxxxxxxxxxxxx, AKIAIOSFODNN7EXAMPLE", False),
        ("check.py", f"if text.startswith('{KEY}'): raise", False),
        ("a.ipynb", '<div class="sk-toggleable__content-wrapper">', False),
        ("compose.yaml", "postgresql://postgres:postgres@localhost/db", False),
        ("data.bin", f"\0{KEY}\nMIIEvQIBADANBgkqhkiG9w0BAQEFAASC", False),
    ],
)
def test_a_file_with_a_secret_is_refused_by_its_name_and_can_be_excused(
    tmp_path: Path, name: str, text: str, is_secret: bool
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    if is_secret:
        with pytest.raises(UsageError, match=f"{name} looks like .* none: --not-secret {name}$"):
            refuse_secret_files(tmp_path, [path])
    refuse_secret_files(tmp_path, [path], [name] * is_secret)


def test_this_checkout_can_be_given_as_code() -> None:
    refuse_secret_files(ROOT, CodeFolder.of(ROOT).files)
