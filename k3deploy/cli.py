"""The command line: finds the command, runs it, and turns whatever happens into words and an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click

from k3deploy import __version__
from k3deploy.errors import ExitCode, InputError, K3Error

# name -> (module, attribute, one line of help). The module is imported when its command is used: help must be instant.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "apply": ("k3deploy.commands.apply", "apply", "Build, start, measure and judge a candidate; put production back."),
    "calibrate": ("k3deploy.commands.calibrate", "calibrate", "Measure the baseline against itself."),
    "campaign": ("k3deploy.commands.campaign", "campaign", "Measure many candidates in one window, with one baseline."),
    "plan": ("k3deploy.commands.plan", "plan", "Show what apply would run, rank by rank; change nothing."),
    "verify": ("k3deploy.commands.verify", "verify", "Hold a candidate's kernels against FP64 on one rank's GPU."),
    "rollback": ("k3deploy.commands.rollback", "rollback", "Stop the candidate everywhere and bring production back."),
    "window": ("k3deploy.commands.window", "window", "Open, extend, close or show the maintenance window."),
    "status": ("k3deploy.commands.status", "status", "Show ranks, production, candidate and window as they are now."),
    "matrix": ("k3deploy.commands.matrix", "matrix", "List the rows to try, or show one."),
    "facts": ("k3deploy.commands.facts", "facts", "Print what a run measured, or validate a facts file."),
    "report": ("k3deploy.commands.report", "report", "Judge a run again and rewrite its report; list runs."),
    "compare": ("k3deploy.commands.history", "compare", "Put two runs beside each other."),
    "history": ("k3deploy.commands.history", "history", "Show verdicts over time and where the baseline shifted."),
    "export": ("k3deploy.commands.export", "export", "Write what a run measured for another program."),
    "promote": ("k3deploy.commands.promote", "promote", "Plan production's change to an accepted candidate."),
    "demote": ("k3deploy.commands.promote", "demote", "Plan production's way back from the last promotion."),
    "patch": ("k3deploy.commands.patch", "patch", "List, check and apply the source changes that rows need."),
    "lab": ("k3deploy.commands.lab", "lab", "Four ranks on this machine to try everything on."),
    "complete": ("k3deploy.commands.complete", "complete", "Print the completion script for your shell."),
}

EPILOG = """\b
Examples:
  k3deploy matrix                         what there is to try
  k3deploy plan candidate-U2              what it would do, changing nothing
  k3deploy lab up && k3deploy apply candidate-U2
  k3deploy apply candidate-U9 -i inventory/gb10
  k3deploy rollback -i inventory/gb10     production back, from any point
  eval "$(k3deploy complete bash)"        completion, candidates included

\b
Exit codes:
    0  done; for apply and report: ACCEPT
    1  something broke: a rank, Ansible, the service
    2  the command line is wrong
    3  inventory, matrix, run or facts are invalid
    4  preflight: a rank is not fit; nothing was changed
    5  another run holds the cluster
   10  REJECT
   11  INCONCLUSIVE
   12  INVALID: the measurement does not count
   20  production does not answer as recorded: act now
   21  production is back, but something of the candidate is left on a rank
  130  stopped by Ctrl-C or a signal; production was brought back

\b
Environment:
  K3DEPLOY_INVENTORY, K3DEPLOY_MATRIX, K3DEPLOY_RUNS   defaults of the options
  K3DEPLOY_STATE   locks and error logs (default $XDG_STATE_HOME/k3deploy, else ~/.local/state/k3deploy)
  K3DEPLOY_OWNER   who works here, as windows and runs name it (default user@host)
  NO_COLOR         no colours"""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used, and listed without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        if cmd_name == "lab" and isinstance(command, click.Group):
            command.add_command(importlib.import_module("k3deploy.commands.lab_model").model)
            command.add_command(importlib.import_module("k3deploy.commands.lab_production").production)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[click.shell_completion.CompletionItem]:
        names = [
            click.shell_completion.CompletionItem(name, help=text)
            for name, (_, _, text) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(COMMANDS)}"
            raise click.UsageError(f"{error.message.rstrip('.')}; {hint}", ctx) from None


@click.command(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="k3deploy")
def cli() -> None:
    """Try an upgrade of a large model's service beside production, prove what runs, measure it honestly, judge it, and
    put everything back."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script: never shows a traceback, always ends with a documented exit code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    _usable_streams()
    try:
        Path.cwd()  # Ansible and relative paths need one
        result = cli.main(
            args=None if arguments is None else list(arguments),
            prog_name="k3deploy",
            standalone_mode=False,
            color=False if os.environ.get("NO_COLOR") else None,
        )
        sys.stdout.flush()
        return int(result) if isinstance(result, int) else int(ExitCode.OK)
    except K3Error as error:
        show_error(error)
        return int(error.exit_code)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _say("stopped", "yellow")
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader (head, less) has gone; do not let the interpreter complain about it while it closes down.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.FAILED)
    except OSError as error:
        _show_os_error(error)
        return int(ExitCode.FAILED)
    except Exception as error:
        _say(f"internal error: {type(error).__name__}: {error}", "red")
        _say(f"  remedy: please report it, with the traceback that is in {_keep_traceback()}")
        return int(ExitCode.FAILED)


def _usable_streams() -> None:
    """Streams that take everything: one that was closed swallows it, one of a narrow encoding gets escapes."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (as long as the process lives)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


_OS_REMEDIES = {
    errno.ENOSPC: "free some space there, or name another place with --runs or K3DEPLOY_STATE",
    errno.EDQUOT: "free some space there, or name another place with --runs or K3DEPLOY_STATE",
    errno.EROFS: "name a place that can be written with --runs or K3DEPLOY_STATE",
    errno.EACCES: "name a place that is yours with --runs or K3DEPLOY_STATE, or mend its mode",
    errno.EPERM: "name a place that is yours with --runs or K3DEPLOY_STATE, or mend its mode",
}


def _show_os_error(error: OSError) -> None:
    """What this machine refused: a place that cannot be written, read or made."""
    where = f"{error.filename}: " if error.filename else ""
    if error.errno == errno.ENOENT and not error.filename:
        where = "the working directory: "
    elif not error.filename and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = "the output cannot be written: "
        with contextlib.suppress(OSError):  # or the interpreter would try again, and complain, while it closes down
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    remedy = _OS_REMEDIES.get(error.errno or 0, "")
    show_error(K3Error(f"{where}{error.strerror or error}", remedy=remedy))


def show_error(error: K3Error) -> None:
    """An error for people: what is wrong, all of it, and what to do."""
    if isinstance(error, InputError) and len(error.problems) > 1:
        _say(f"error: {len(error.problems)} problems", "red")
        for problem in error.problems:
            _say(f"  {problem}")
    else:
        _say(f"error: {error}", "red")
    if error.remedy:
        _say(f"  remedy: {error.remedy}")


def _say(text: str, colour: str | None = None) -> None:
    from k3deploy.progress import printable

    click.secho(printable(text), fg=colour, err=True, color=False if os.environ.get("NO_COLOR") else None)


def _keep_traceback() -> str:
    from k3deploy.paths import state_dir, write_text
    from k3deploy.secrets import mask_text

    try:
        path = state_dir() / "errors" / f"{datetime.now():%Y%m%dT%H%M%S}-{os.getpid()}.txt"
        write_text(path, mask_text(f"k3deploy {__version__}\n{sys.argv}\n{traceback.format_exc()}"))
    except (OSError, K3Error) as error:
        return f"no file ({error}):\n{traceback.format_exc()}"
    return str(path)
