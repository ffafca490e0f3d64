"""``cues completion``: the script with which a shell completes commands, options, and the names in a store.

At each Tab the shell calls ``cues`` with :data:`cues.cli.app.COMPLETE`, and takes what is printed. So nothing but
completions may be printed. After an error nothing is; the command itself reports it. ``candidates.py`` has the names.
"""

from __future__ import annotations

import os
from typing import Any, Final

import click
from click import shell_completion
from click.shell_completion import CompletionItem, get_completion_class

from cues.cli.options import command
from cues.cli.printing import out
from cues.overrides import override

SHELLS = ("bash", "zsh", "fish")


@command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the script with which a shell completes commands, options, files, and the names in a store.

    \b
      cues completion bash >> ~/.bashrc
      cues completion zsh >> ~/.zshrc      after compinit
      cues completion fish > ~/.config/fish/completions/cues.fish

    After `data/shop#` or `graph.py#` the shell offers the queues of that store, or its processors if the command
    needs one. Names are read without opening the store. A graph file is not imported; its store is known if the
    file has the id of the graph as a text.
    """
    from cues.cli.app import COMPLETE, commands

    # The source() of the class asks the bash on the path for its version, which may be another bash.
    completer = get_completion_class(shell)
    assert completer is not None
    script = completer(commands, {}, "cues", COMPLETE)
    out(script.source_template % script.source_vars())


class _Bash(shell_completion.BashComplete):
    """Bash divides words at colons too, so ``data/shop#group:b`` comes as three words, and only ``b`` is replaced."""

    _before = ""
    """The part of the word before the last colon, which bash keeps."""

    @override
    def get_completion_args(self) -> tuple[list[str], str]:
        words = shell_completion.split_arg_string(os.environ["COMP_WORDS"])
        number = int(os.environ["COMP_CWORD"])
        args, pieces = words[:number], words[number : number + 1]
        while args and pieces and (pieces[0].startswith(":") or args[-1].endswith(":")):
            pieces.insert(0, args.pop())
        word = "".join(pieces)
        self._before = word[: word.rfind(":") + 1] if len(pieces) > 1 else ""
        whole: list[str] = []
        for arg in args[1:]:
            if whole and (arg.startswith(":") or whole[-1].endswith(":")):
                whole[-1] += arg
            else:
                whole.append(arg)
        return whole, word

    @override
    def format_completion(self, item: CompletionItem[Any]) -> str:
        return f"{item.type},{item.value.removeprefix(self._before)}"


_CLASSES: Final[dict[str, type[shell_completion.ShellComplete]]] = {"bash": _Bash}


def complete(commands: click.Group, variable: str, instruction: str) -> int:
    """Print the completions that a shell asks for, as ``bash_complete``; after any error, print nothing."""
    shell, _, asked = instruction.partition("_")
    kind = _CLASSES.get(shell) or get_completion_class(shell)
    if kind is None or asked != "complete":
        return 1
    try:
        text = kind(commands, {}, "cues", variable).complete()
    except Exception:
        return 0
    out(text)
    return 0
