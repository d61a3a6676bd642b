"""The pinned CDK command line, against a local AWS or an account."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from contract import outputs as stack_outputs
from rehearsal import children
from rehearsal.children import CommandError
from rehearsal.local_aws import ACCOUNT, REGION, ROOT

COMMAND: Final = ROOT / "node_modules" / ".bin" / "cdk"
#: It waits less between its looks at a stack: a deploy takes 3 seconds instead of 13.
POLLS: Final = ROOT / "rehearsal" / "cdk_polls.cjs"
#: A synthesis prints nothing, and takes minutes on a busy machine.
SILENT_S: Final = 900


class Cdk:
    """Runs the command line in a home of its own, so that it remembers no account."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        *,
        log: Path | None = None,
        silent_s: float = SILENT_S,
    ) -> None:
        if not COMMAND.exists():
            raise CommandError("there is no CDK command line: `make node` installs it")
        self.templates = folder / "cdk.out"
        """The cloud assembly of the last synth."""
        self._log, self._silent_s = log, silent_s
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),  # it remembers accounts in ~/.cdk
            "TMPDIR": str(folder),
            "CDK_DISABLE_CLI_TELEMETRY": "true",
            "NODE_OPTIONS": f'--require "{POLLS}"',
            "NODE_NO_WARNINGS": "1",  # its AWS client's, about a Node that will be too old
            "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
            **environment,
        }

    def __call__(self, *arguments: str, before: tuple[str, ...] = (), again: bool = False) -> str:
        """Run it; return what it printed on both streams.

        Args:
            before: A command to run it under.
            again: Take the templates of the last synth instead of making them.

        Raises:
            CommandError: it failed; the message has what it printed.
        """
        place = str(self.templates)
        output = ("--app", place) if again else ("--output", place)
        return children.run(
            [*before, str(COMMAND), *arguments, *output],
            environment=self.environment,
            folder=ROOT,
            log=self._log,
            silent_s=self._silent_s,
            streams_together=True,
        )

    def deploy(self, settings: Mapping[str, str]) -> None:
        """Deploy both stacks with these settings; ask nothing."""
        children.heard[0] = "synthesizing"
        stacks = (stack_outputs.CORE_STACK, stack_outputs.TRAINING_STACK)
        self("deploy", *stacks, "--require-approval", "never", *_context(settings))

    def destroy(self, settings: Mapping[str, str]) -> None:
        """Destroy the stacks that these settings name; ask nothing."""
        self("destroy", "--all", "--force", *_context(settings))

    def bootstrap(self) -> None:
        """Prepare the account, as is done once for each account and region."""
        self("bootstrap", f"aws://{ACCOUNT}/{REGION}", "--app", "")


def _context(settings: Mapping[str, str]) -> list[str]:
    return [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
