"""Layout of ``--help``: plain text, commands under headings.

Typer's boxes look no better and cost more than the whole command: drawing them imports rich's
Markdown and the syntax highlighter behind it.
"""

from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from contract.text import decimal
from trainctl.aws.errors import UsageError
from trainctl.jobs import job_file, other_systems
from training.command import NOT_FOR_JOBS, UnknownOptionError

#: No wider than this on any terminal: longer lines are hard to read.
WIDTH = 100


class HelpGroup(TyperGroup):
    """A group of commands, listed under the headings that they were registered with."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """``trainctl runs``, without a command of the group, lists them; others show their help."""
        if args and not ctx.parent and (ours := other_systems.COMMANDS.get(args[0])):
            raise UsageError(f"there is no command {args[0]!r}: here it is trainctl {ours}")
        known = {*self.commands, *ctx.help_option_names}
        if ctx.info_name == "runs" and not ctx.resilient_parsing and known.isdisjoint(args[:1]):
            args = ["ls", *args]
        elif not args and not ctx.resilient_parsing:
            args = ["--help"]
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in their order, each with the first paragraph of its help."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            heading = command.rich_help_panel or "Commands"
            # Not click's own short help, which ends in "..." where the line does.
            text = (command.help or "").partition("\n\n")[0]
            sections.setdefault(heading, []).append((name, " ".join(text.split())))
        for heading, rows in sections.items():
            with formatter.section(typer.style(heading, bold=True)):
                formatter.write_dl(rows)


class HelpCommand(TyperCommand):
    """A command whose help shows arguments by their names, without the types of Python."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with numbers in ASCII digits only."""
        parsed = self.make_parser(ctx).parse_args([*args])[0]
        params: list[Any] = self.params
        for each in params:
            kind, value = each.type_descriptor.annotation, parsed.get(each.name)
            if kind in (int, float) and isinstance(value, str):
                try:
                    decimal(value)
                except ValueError:
                    text = f"{value!r} is not a valid {kind.__name__}."
                    raise typer.BadParameter(text, ctx=ctx, param=each) from None
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and below them the options."""
        params: list[Any] = self.params
        for each in params:
            if each.param_type_name == "argument":
                each.display_type_rich = lambda **_: ""
        super().format_options(ctx, formatter)


class ShellCommand(HelpCommand):
    """A command with an optional JOB, and another command after ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Leave JOB empty where all words come after ``--``."""
        if "--" in args:
            at = args.index("--")
            if not isinstance(self.make_parser(ctx).parse_args(args[:at])[0].get("job"), str):
                args = [*args[:at], "", *args[at:]]
        return super().parse_args(ctx, args)


class RecipeCommand(HelpCommand):
    """A command that takes a recipe and its settings."""

    def invoke(self, ctx: Any) -> Any:
        """Run it; what is no option of a recipe may be meant for one of the command."""
        try:
            return super().invoke(ctx)
        except UnknownOptionError as error:
            own = [option for each in self.params for option in each.opts]
            known = [*own, *(each for each in error.known if each not in NOT_FOR_JOBS)]
            see = f": see {ctx.command_path} --help"
            raise UnknownOptionError(error.option, known, otherwise=see) from None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read a job file, if one is given, before the options of the command line."""
        parsed = self.make_parser(ctx).parse_args([*args])[0]
        if (file := parsed.get("file")) and not ctx.resilient_parsing:
            args = job_file.expanded(Path(file), args, parsed.get("words") or [], self.params)
        return super().parse_args(ctx, args)


class TuneCommand(RecipeCommand):
    """``submit`` with values to try; a job file may be given by its name only."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0].endswith(".toml"):
            args = ["--file", *args]
        left = super().parse_args(ctx, args)
        if not (ctx.params.get("vary") or ctx.resilient_parsing):
            raise UsageError("give the values to try: --vary NAME=V1,V2, or vary in a job file")
        return left
