"""The command line: typer for the grammar, tables for people, JSON for programs.

Invariant: every error ends in one line on stderr and an exit code that `EXIT_CODES` lists; a traceback is a bug.

A command loads its own module alone, because all of them together load most of the daemon, which takes longer than most
commands. The help and the completion of a command's name load none.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from tierd import __version__
from tierd.cli.purposes import OPTIONS, PURPOSES
from tierd.core import errors, manifest
from tierd.ipc.messages import EXIT_BAD_INPUT, EXIT_HELD
from tierd.ipc.protocol import PROTOCOL
from tierd.logs import make_formatter

MODULES: dict[str, tuple[str, ...]] = {  # the commands of each module; the help shows the modules in this order
    "commands.daemon_commands": ("run", "pin", "unpin"),
    "commands.config_commands": ("config",),
    "commands.prune_commands": ("prune", "disown"),
    "commands.checkpoint_commands": ("ls", "show", "verify"),
    "commands.diff_command": ("diff",),
    "commands.run_commands": ("runs", "rm", "du"),
    "commands.status_commands": ("status",),
    "commands.pause_commands": ("pause", "resume"),
    "commands.top_command": ("top",),
    "commands.doctor_command": ("doctor",),
    "commands.notify_command": ("notify",),
    "commands.measuring_commands": ("check-resume", "bench"),
    "commands.flush_waits": ("drain", "wait"),
    "commands.advise_command": ("advise",),
    "commands.inspect_command": ("inspect",),
    "commands.retrieval_commands": ("follow", "export", "restore"),
    "commands.watch_commands": ("watch", "prepare"),
    "commands.copy_commands": ("copy", "import"),
}
_SERVICES = ("commands.daemon_commands", "commands.watch_commands")  # their log is what a person reads
GROUPS: dict[str, tuple[str, ...]] = {  # the help's and the reference's sections
    "The daemon and its node": (
        "run",
        "watch",
        "top",
        "status",
        "doctor",
        "notify",
        "drain",
        "wait",
        "pause",
        "resume",
    ),
    "Checkpoints in the spool and on tiers": (
        *("runs", "ls", "show", "diff", "verify", "du", "prune", "pin", "unpin", "rm", "disown"),
        *("restore", "copy", "import", "prepare", "export", "follow"),
    ),
    "Tools": ("inspect", "check-resume", "advise", "bench", "config"),
}
_EXIT_CODES: dict[type[errors.TierdError], int] = {
    errors.CheckpointNotFound: 4,
    errors.ObjectNotFound: 4,
    errors.CorruptChunk: 5,
    errors.ManifestError: 5,
    errors.StoreUnavailable: 6,
    errors.StoreRefused: 6,
    errors.DaemonUnavailable: 6,
    errors.SpoolHeld: EXIT_HELD,
}


class _Command(TyperCommand):
    """A command whose help names its arguments as the reference does, without typer's types and braces."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [self.options_metavar or "", *(name for name, _ in self._arguments())]

    def _arguments(self) -> list[tuple[str, str]]:
        arguments: list[Any] = [param for param in self.params if param.param_type_name == "argument"]
        names = [param.metavar or param.name.upper() for param in arguments]
        return [
            (name if param.required or name.startswith("[") else f"[{name}]", param.help or "")
            for name, param in zip(names, arguments, strict=True)
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        options = [param.get_help_record(ctx) for param in self.get_params(ctx) if param.param_type_name == "option"]
        for title, records in (("Arguments", self._arguments()), ("Options", [*filter(None, options)])):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


_OPTION = re.compile("[=|]")


class _CompletedCommand(TyperCommand):
    """A command whose options are completed from `OPTIONS`, so that its module is not loaded."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.args = args
        return args

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        completion: Any = type(super().shell_complete(ctx, "--help")[0])  # typer's class, or click's in an older one
        options = {name: values for name, *values in map(_OPTION.split, OPTIONS[self.name or ""].split())}
        if ctx.args and (values := options.get(ctx.args[-1])):
            words = values  # one is empty where the shell is to complete names of files
        elif incomplete.startswith("-"):
            given = {argument.partition("=")[0] for argument in ctx.args}
            words = [*(name.removesuffix("+") for name in options if name not in given), "--help"]
        else:
            words = []
        return [completion(word) for word in words if word and word.startswith(incomplete)]


class _GroupedCommands(TyperGroup):
    """The commands, which the help lists by `GROUPS`. A command's module is loaded when it is asked for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = formatter.width - max(map(len, PURPOSES)) - 6
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name, _shortened(PURPOSES[name], width)) for name in names])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if ctx.resilient_parsing and cmd_name in OPTIONS:
            return _CompletedCommand(cmd_name)
        module = None if cmd_name in self.commands else _module_of_command(cmd_name)
        return super().get_command(ctx, cmd_name) if module is None else _grammar(module).commands[cmd_name]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        params = self.params
        if ctx.resilient_parsing:  # for a completion, only flags that are true or false: typer loads pydantic for None
            self.params = [param for param in params if param.name in ("version", "json")]
            self.add_help_option = False
        rest: list[str] = super().parse_args(ctx, args)
        self.params, self.add_help_option = params, True
        return rest

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        self.commands = {name: TyperCommand(name, help=purpose) for name, purpose in PURPOSES.items()}
        return super().shell_complete(ctx, incomplete)


def _shortened(sentence: str, width: int) -> str:
    """Return as much of a sentence as fits, up to a comma or the like."""
    sentence = re.sub(r" \([^)]*\)", "", sentence)
    if len(sentence) <= width:
        return sentence
    end = max(sentence.rfind(mark, 0, width) for mark in (", ", "; ", ": "))
    return sentence[:end] if end > 0 else f"{sentence[: sentence.rfind(' ', 0, width)]} …"


def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the versions and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --version: print JSON.")] = False,
) -> None:
    if version:
        if json:
            from tierd.cli.output import print_json

            print_json({"version": __version__, "protocol": str(PROTOCOL), "format": manifest.WITH_DELTAS})
        else:
            print(f"tierd {__version__}, protocol {PROTOCOL}, format {manifest.WITH_DELTAS}")
        raise typer.Exit()
    if json:
        raise typer.BadParameter("before a command, it is for --version alone; give it after the command", context)
    if context.invoked_subcommand is None:
        context.fail("Missing command.")


_NO_MODULE = ""
COMPLETES = "_TIERD_COMPLETE"  # the environment variable by which a shell asks for completions


@functools.cache
def _app(module: str | None) -> typer.Typer:
    """The commands of one module, or of all; with `_NO_MODULE`, each is loaded when it is asked for."""
    app = typer.Typer(
        name="tierd",
        cls=_GroupedCommands,
        help="Async tiered checkpoint storage: verified, retained, restored.",
        rich_markup_mode=None,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_main)
    for name in MODULES if module is None else filter(None, (module,)):
        importlib.import_module(f"tierd.cli.{name}").register(app)
    for group in (app, *(registered.typer_instance for registered in app.registered_groups)):
        for command in group.registered_commands if group else ():
            command.cls = _Command
    return app


def __getattr__(name: str) -> Any:
    """`app`: all commands, for those that document or test them."""
    if name == "app":
        return _app(None)
    raise AttributeError(name)


def _module_of(arguments: list[str]) -> str | None:
    """The module of the command that is asked for; none for help or completion, None for an unknown command."""
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    if COMPLETES in os.environ or not command:
        return _NO_MODULE
    return _module_of_command(command)


def _module_of_command(command: str) -> str | None:
    return next((module for module, commands in MODULES.items() if command in commands), None)


@functools.cache
def _grammar(module: str | None) -> Any:
    """The commands and their options; cached because to read them off the functions takes longer than most commands."""
    return get_command(_app(module))


def run(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(make_formatter())
    module = _module_of(sys.argv[1:] if arguments is None else arguments)
    if module not in _SERVICES:  # their answers say what the last try said
        handler.addFilter(lambda record: record.levelno > logging.INFO or not record.name.startswith("tierd.stores"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    try:
        grammar = _grammar(module)
        code = grammar(arguments, standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except typer.Abort:  # a question that nobody answered
        return 1
    except errors.TierdError as error:
        _complain(error)
        return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), EXIT_BAD_INPUT)
    except (OSError, TimeoutError) as error:
        _complain(error)
        return 1
    except (MemoryError, RuntimeError, ExceptionGroup) as error:
        if not errors.is_exhausted(error):
            raise
        _complain(errors.EXHAUSTED)
        return 1
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's and click's own errors, whichever typer brings
            raise
        complain_of_usage(error)
        return EXIT_BAD_INPUT


def _complain(problem: object) -> None:
    from tierd.cli.output import complain  # here, because it loads the tables, which the help does not need

    complain(problem)


def complain_of_usage(error: Any) -> None:
    """Say on the standard error how typer did not understand the command line; without any argument, print the help."""
    message, context = str(error.format_message()), getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
        return
    see = f"; see `{context.command_path} --help`" if context is not None else ""
    _complain(f"{message[:1].lower()}{message[1:].rstrip('.')}{see}")
