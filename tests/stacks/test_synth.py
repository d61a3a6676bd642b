"""``make synth`` validates what it synthesizes, and a deploy does not do it again."""

from pathlib import Path

import pytest

from rehearsal.cdk import Cdk
from rehearsal.processes import CommandError


@pytest.mark.parametrize(("command", "validation"), [("synth", ""), ("deploy", "false")])
def test_the_command_line_validates_a_synth_and_no_deploy(
    tmp_path: Path, command: str, validation: str
) -> None:
    """Validating takes more than half of a synth's time, and `make check` has done it."""
    probe = f'printf %s "$CDK_VALIDATION" > {tmp_path}/seen; exit 1'
    with pytest.raises(CommandError):
        Cdk(tmp_path, {})(command, "AnyStack", "--app", probe)
    assert (tmp_path / "seen").read_text() == validation
