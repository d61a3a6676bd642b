"""Values that look like secrets are refused as variables of a job; what only sounds like one is
not."""

import pytest

from trainctl.aws.errors import UsageError
from trainctl.variables import refuse_secrets


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
    ],
)
def test_what_is_none_is_none(name: str, value: str) -> None:
    refuse_secrets({name: value})
