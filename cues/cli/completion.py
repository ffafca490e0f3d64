"""``cues completion``: the script with which a shell completes commands, options, and the names in a store."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from cues.cli.options import command
from cues.errors import CuesError
from cues.groups.operate import list_groups
from cues.queues.store import Store
from cues.tools import metrics

SHELLS = ("bash", "zsh", "fish")


@command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands, options, files, and the names in a store.

    \b
      cues completion bash >> ~/.bashrc
      cues completion zsh >> ~/.zshrc
      cues completion fish > ~/.config/fish/completions/cues.fish

    After `data/shop#` the shell offers the queues of that store, or its processors if the command needs
    one. Completion does not import graph files, because that would run the file at every Tab.
    """
    from cues.cli.app import COMPLETE, commands

    # The source() of the class asks the bash on the path for its version, which may be another bash.
    completer = get_completion_class(shell)
    assert completer is not None
    script = completer(commands, {}, "cues", COMPLETE)
    click.echo(script.source_template % script.source_vars())


def names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The queues or processors after ``store#``; before the ``#`` files and directories."""
    place, hash, _ = incomplete.partition("#")
    path = Path(place or os.environ.get("CUES_STORE", ""))
    if not hash:
        return [CompletionItem(incomplete, type="file")]
    if not (path / "data.mdb").is_file():
        return []
    try:
        with Store(path, readonly=True) as store:
            of_processors = "PROCESSOR" in str(parameter.metavar)
            known = metrics.processors(store) if of_processors else store.queues()
            if "group:" in str(parameter.metavar):
                known = [*(known if of_processors else ()), *(f"group:{g.group}" for g in list_groups(store))]
    except CuesError:
        return []  # a Tab shows no error; the command itself will
    return [CompletionItem(f"{place}#{name}") for name in known if f"{place}#{name}".startswith(incomplete)]
