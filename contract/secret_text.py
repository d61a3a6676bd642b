"""Secrets in text: tokens by their shape, and what has none by the name beside it.

Everything that takes in or shows a user's text asks here: files of a code folder, variables, words
of a command, files of HOME, reasons, records, logs.
"""

import re
from collections.abc import Iterator
from typing import Final

#: Shapes of tokens, as gitleaks has them (github.com/gitleaks/gitleaks, config/gitleaks.toml of
#: 2026-07-22). The last four lines are not there: they are as users have seen them, not looked up.
_TOKENS: Final = (
    "hf_[A-Za-z0-9]{34}|api_org_[A-Za-z0-9]{34}",  # huggingface; also digits, as its tests have
    r"gh[opusr]_[0-9A-Za-z]{36}|github_pat_\w{82}",
    r"gl(?:pat|dt|rt|ft|ptt|cbt|soat|agent|imt|oas)-[\w.-]{20,}",
    "(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{16}|ABSK[A-Za-z0-9+/]{109,}",
    r"sk-(?:proj|svcacct|admin|ant-\w+|or-v1)-[\w-]{20,}|sk-[A-Za-z0-9]{32,}",  # OpenAI, Anthropic
    r"AIza[\w-]{35}|npm_[A-Za-z0-9]{36}|pypi-[\w-]{50,}|pplx-[A-Za-z0-9]{48}",
    r"dapi[a-f0-9]{32}|do[opr]_v1_[a-f0-9]{64}|hv[bs]\.[\w-]{90,}|pul-[a-f0-9]{40}",
    r"xox[abeoprs]-[\w-]{10,}|xapp-\d-[\w-]{20,}|hooks\.slack\.com/services/[\w+/]{40,}",
    r"[sr]k_(?:test|live|prod)_[A-Za-z0-9]{10,99}|SG\.[\w=.-]{66}|glsa_\w{32}_[A-Fa-f0-9]{8}",
    r"ey[A-Za-z0-9]{17,}\.ey[\w/-]{17,}\.[\w/-]{10,}",  # JSON Web Token
    r"wandb_v\d_\w{20,}",
    "r8_[A-Za-z0-9]{37}",  # Replicate
    r"lsv2_[a-z]{2}_\w{32,}",  # LangSmith
    "gsk_[A-Za-z0-9]{52}",  # Groq
)
_END: Final = r"(?:\s|\\[nr])+"
_PEM: Final = (
    rf"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----{_END}(?:[\w-]+: [^\n\\]+{_END})*"
    r"[\w+/=]{20}[\w+/=\s\\]*"
)
_SHAPED: Final = re.compile(rf"(?<![A-Za-z0-9_])(?:{'|'.join(_TOKENS)})(?!\w)|{_PEM}")
#: scheme://user:password@host, unless the password is a variable or a placeholder.
_ADDRESS: Final = re.compile(
    r"(?<![a-z\d+.-])[a-z][a-z\d+.-]*://[^\s/:@\"']*:([^\s/:@${<*\"'][^\s/@\"']*)@"
)
#: Names whose values are secrets (gitleaks' rule generic-api-key, and variables of wandb, Comet,
#: Neptune, ClearML and the Hub): what a name ends with.
_STRONG: Final = (
    r"(?:api|access|secret|private|auth|account|deploy|signing|encryption|wandb|comet|clearml)"
    r"[._-]?key|secret|passw(?:or)?d|passwd|pwd|passphrase|credentials?|bearer|"
    r"(?:hf|hub|huggingface|access|auth|api|bearer|gh|github|gitlab|git|slack|bot|refresh|session|"
    r"personal|deploy|npm|pypi|service)[._-]?token"
)
#: Names that may be of something else, too: EOS_TOKEN=</s>, SORT_KEY=date.
_WEAK: Final = (
    r"(?<!eos_)(?<!bos_)(?<!pad_)token|_key(?:_id)?|login\([^)]{0,60}\bkey|authtoken|login"
)
_NAME: Final = re.compile(rf"(?i)(?:(?P<strong>{_STRONG})|{_WEAK})$")
#: The end of such a name, and a value: in quotes, or to the end of a word (of a line in YAML). What
#: may come between: ``=``, ``: str =``, ``=>``, ``("NAME", default=``, a space after an option.
_PAIR: Final = re.compile(
    r"(?i)(?:token|key|secret|passw(?:or)?d|passwd|pwd|passphrase|credentials?|login|bearer)"
    r"(?P<end>(?:[._-]id)?[\"']?\]?\s*"
    r"(?P<sign>=>|:\s*[\w.\[\]]{1,40}\s*=|[=:(]|(?<=[\"']),\s*(?:default\s*=)?|\s(?=\S{1,80}\d))\s*\(?\s*)"
    r"(?:[rbfu]{0,2}[\"']{1,3}(?P<value>[^\s\"'\\]{8,512}+)[\"']|"
    r"(?P<bare>[^\s\"'\\,;)}]{8,512}+)(?=[\s;&|\"\'\\]|$))"
)
_BEFORE: Final = 80  # characters of a name that are looked at
_VALUE: Final = re.compile(r"[\w+/=.~:!@#%^&*-]+")
#: A name of a module, or a UUID, with which requests are told apart.
_IDENTIFIER: Final = re.compile(r"\.|\b[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12}\b")
#: More words after a value, but for a comment.
_PROSE: Final = re.compile(r" +[^\s#]")
_WORDS: Final = re.compile(r"\w*_\w*|[A-Za-z]+\d?")
#: What is shown for an example has few characters, or says so; in code, values say what they are.
_EXAMPLE: Final = re.compile(
    r"(?i)example|your|xxxx|fake|dummy|placeholder|change.?me|redacted|\.\.\."
)
_IN_CODE: Final = re.compile(r"(?i)1234|abcd|password|token|secret|api.?key|test|none|null")
#: Files that hold credentials, by their names.
FILES: Final = re.compile(
    r"id_(rsa|dsa|ecdsa|ed25519)|[._]netrc|\.(git-credentials|pypirc|pgpass|htpasswd|dockercfg)|"
    r"credentials(\.(json|csv|ya?ml|toml|ini))?|secrets\.(json|ya?ml|toml|env)|kaggle\.json|"
    r".*\.(ppk|p12|pfx|keystore|jks)|(.*[._-])?(private|secret)?_?key\.pem"
)
#: Characters of a secret that may be shown.
SHOWN: Final = 4


def secrets_in(
    text: str, *, is_certain: bool = False, by_name: bool = True
) -> Iterator[tuple[int, int]]:
    """Start and end of each secret in a text: a file, a line of a log, ``NAME=VALUE``.

    Args:
        is_certain: it has variables and their values, and no code.
        by_name: look for those without a shape too.
    """
    for found in _SHAPED.finditer(text):
        # A name has another length than one of letters only.
        if found[0][:3] in ("hf_", "api", "---") or _is_random(found[0], least=15, digits=1):
            yield found.span()
    for found in _ADDRESS.finditer(text):
        if _is_random(found[1], least=6, digits=1):
            yield found.span(1)
    for found in _PAIR.finditer(text if by_name else ""):
        kind = "value" if found["value"] else "bare"
        # In code, what is not quoted is a name; in prose it is followed by more.
        is_name = bool(not is_certain and kind == "bare" and _WORDS.fullmatch(found[kind]))
        is_name |= found["sign"] == ":" and bool(_PROSE.match(text, found.end()))
        name = text[max(0, found.start() - _BEFORE) : found.start("end")]
        if not is_name and is_secret(name, found[kind], is_certain=is_certain):
            yield found.span(kind)


def is_secret(name: str, value: str, *, is_certain: bool = False) -> bool:
    """Check if a value is a secret by the name beside it.

    Args:
        is_certain: it is the value of a variable or option, and no code.
    """
    named = _NAME.search(name)
    if not named or not _VALUE.fullmatch(value) or (not is_certain and _IN_CODE.search(value)):
        return False
    if named["strong"]:
        return _is_random(value, least=8, digits=2) or (is_certain and _is_random(value, least=12))
    if not is_certain and (_IDENTIFIER.search(value) or _WORDS.fullmatch(value)):
        return False
    return _is_random(value, least=12 if is_certain else 20, digits=3)


def masked(text: str, *, by_name: bool = True) -> str:
    """A text in which only the first four characters of each secret are left.

    Args:
        by_name: what is known only by the name beside it counts too. Not in what programs read
            again: the hash of a text is a ``text_key``.
    """
    for start, end in sorted({*secrets_in(text, by_name=by_name)}, reverse=True):
        text = f"{text[: start + SHOWN]}***{text[end:]}"
    return text


def _is_random(value: str, *, least: int, digits: int = 0) -> bool:
    """Check if a value is long and mixed enough for a secret, and is no example."""
    return (
        len(value) >= least
        and len({*value}) >= min(least, 10) * 2 // 3
        and len(re.findall(r"\d", value)) >= digits
        and bool(re.search("[A-Za-z]", value))
        and not _EXAMPLE.search(value)
    )
