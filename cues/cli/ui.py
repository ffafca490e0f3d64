"""``cues ui``: a page in the browser, of a graph that runs or of a store at rest."""

from __future__ import annotations

import importlib

import click

from cues.cli import options
from cues.cli.options import command, option
from cues.cli.output import CommandOutput, output_options
from cues.cli.page import HOST, PORT, access, need, settings_of
from cues.cli.printing import flush
from cues.cli.target import takes_place
from cues.operate.place import Place


@command()
@takes_place("[GRAPH | STORE]")
@option("--host", default=HOST, show_default=True, help="The address to listen on; any but loopback needs a token.")
@option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="The port; 0 takes a free one.")
@option("--allow-write", is_flag=True, help="Redrive and discard errors from the page. Without it the page only reads.")
@option("--token", metavar="TEXT", help="The token that the page asks for.  [default: made and printed, off loopback]")
@output_options
def ui(place: Place, host: str, port: int, allow_write: bool, token: str | None, output: CommandOutput) -> None:
    """Serve a page in the browser: the graph with flow and lag, queues, messages and where they came from, errors.

    \b
      cues ui graph.py
      cues ui data/flights --port 0
      cues ui graph.py --host 0.0.0.0      from other machines, with the token that is printed
      cues ui shared/flights               a directory of cues run --queues
      cues run graph.py --ui               the page of a run, as long as it runs

    It needs an extra: pip install 'cues-streams[ui]'. The store is opened read-only, whether its graph runs or not. The
    page is there until Ctrl-C. On any address but loopback it asks for a token; set it with CUES_UI_TOKEN, because a
    command line can be read by other users of the machine. The connection is not encrypted: from another machine use a
    tunnel (ssh -L 8420:127.0.0.1:8420 HOST), or a proxy that speaks TLS.
    """
    need()
    target = place.target
    if allow_write:
        place.only_stores("--allow-write is", "leave it out.")
    place.require()
    settings = settings_of(target.file.graph if target.file else None, target.location, place.name)
    settings |= access(host, port, allow_write, token)
    process = importlib.import_module("cues.ui.process")
    server = importlib.import_module("cues.ui.server")
    listener = server.listen(host, port)
    guard = process.guard_of(settings, listener.getsockname()[1])
    changes = None
    if allow_write:
        changes = importlib.import_module("cues.ui.change").Changes(target.text, target.store)
    serving = server.Server(importlib.import_module("cues.ui.look").look_of(settings), guard, listener, changes)
    address = server.address_of(listener, guard)
    output.say(address, address=address)
    options.note("Ctrl-C ends the page." if not allow_write else "The page may change things. Ctrl-C ends it.")
    flush()
    serving.run()
