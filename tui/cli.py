"""The `cluster` command. A command's module, and what it imports, is loaded when that command runs and not before."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from discovery.errors import RoostError
from node.errors import UsageError
from tui.output import print_error, print_roost_error

COMMANDS = {
    "up": "Serve a model at one local OpenAI-compatible address.",
    "down": "Stop the running node.",
    "status": "What runs here, and how it does.",
    "run": "Ask a model one question, or chat with it.",
    "pull": "Fetch a model.",
    "models": "List the installed models; with --all what can be pulled.",
    "rm": "Remove an installed model.",
    "bench": "Measure prefill, decode and memory bandwidth.",
}

EXIT_FAILED, EXIT_MISUSED, EXIT_INTERRUPTED = 1, 2, 130


class LazyCommands(TyperGroup):
    """Knows the commands by name; imports one when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"tui.commands.{cmd_name}")
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name, help=module.__doc__)(module.command)
        return typer.main.get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(cls=LazyCommands, rich_markup_mode=None, pretty_exceptions_enable=False, name="cluster")


def print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"roost {version('roost')}")
        raise typer.Exit


@app.callback(epilog="Each flag of `up` has a ROOST_* variable and a line in <home>/config.toml; a flag wins.")
def cluster(
    version: bool = typer.Option(False, "--version", callback=print_version, is_eager=True, help="Show the version."),
) -> None:
    """The machines you own, as one local inference server."""


def main(args: list[str] | None = None) -> int:
    """Run one command line; returns the exit code: 0 done, 1 failed, 2 misused, 130 interrupted."""
    args = sys.argv[1:] if args is None else args
    try:
        code = app(args or ["--help"], prog_name="cluster", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as exc:
        context = getattr(exc, "ctx", None)
        print_error(exc.format_message(), f"{context.command_path} --help" if context else "")
        return EXIT_MISUSED
    except RoostError as exc:
        print_roost_error(exc)
        return EXIT_MISUSED if isinstance(exc, UsageError) else EXIT_FAILED
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
