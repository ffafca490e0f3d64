"""A bank that is killed repeatedly, and loses no cent: ``python examples/bank.py [--seed N] [--ledger URL]``.

    north  (a store)    instructions ──► north ──┬─► entries ───────┐
                             credits ──►         │                  ├─► ledger ──► a database
    south  (a store)    instructions ──► south ──┼─► entries ───────┘
                             credits ──►         └─► the other branch's credits

Each branch keeps the balances of its accounts in its own store. Money for an account of the other branch is
debited here. The same commit writes an entry for the ledger and a credit for the other store; there is no
transaction over both stores. The three consumers run in one process, which kills itself with SIGKILL a dozen
times. In the end every instruction must be paid once or refused once, the sum of the ledger must be 0, and the
sum of the accounts must be the same as at the beginning. If not, the exit code is 1.

The ledger is SQLite; ``--ledger postgresql+psycopg://…`` uses a server.
"""

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import sqlalchemy as sa

import cues
from cues.checkpoints import LMDBCheckpoint, SQLCheckpoint
from cues.txn import Consumer

ACCOUNTS, INSTRUCTIONS, DEATHS = 20, 2_000, 12
OPENING = 100  # on each account at first, in cents
BRANCHES = ("north", "south")
AIM_S = 0.05  # a process sees a random count of messages; then it is killed within this time
LEDGER = "create table if not exists ledger (instruction integer, account text, cents integer)"


class Branch:
    """Balances of one branch: instructions are debited, and credited here or sent to the other branch."""

    def __init__(self, here, there, checkpoint, seen):
        self.here, self.there, self.checkpoint, self.seen = here, there, checkpoint, seen
        self.balances, self.changed = {}, {}

    def start(self):
        self.balances = self.checkpoint.state

    def consume(self, envelope, publisher):
        self.seen()
        order = envelope.message
        if "payer" not in order:
            self.book(publisher, order["instruction"], order["payee"], order["cents"])
        elif self.balance(order["payer"]) < order["cents"]:
            self.enter(publisher, order["instruction"], "refused", 0)
        else:
            self.book(publisher, order["instruction"], order["payer"], -order["cents"])
            credit = {name: order[name] for name in ("instruction", "payee", "cents")}
            branch = self.here if order["payee"].startswith(Path(self.here.path).name) else self.there
            publisher.publish_uncommitted(lambda _: branch.queue("credits"), credit)

    def balance(self, account):
        return self.balances.get(account, OPENING)

    def book(self, publisher, instruction, account, cents):
        self.balances[account] = self.changed[account] = self.balance(account) + cents
        self.enter(publisher, instruction, account, cents)

    def enter(self, publisher, instruction, account, cents):
        entry = {"instruction": instruction, "account": account, "cents": cents}
        publisher.publish_uncommitted(lambda _: self.here.queue("entries"), entry)

    def finalize(self, publisher):
        changed, self.changed = self.changed, {}
        return lambda writes: writes.state.update(changed)


class Ledger:
    """Every entry of both branches, in a database."""

    def __init__(self, seen):
        self.seen, self.rows = seen, []

    def consume(self, envelope, publisher):
        self.seen()
        self.rows.append(envelope.message)

    def finalize(self, publisher):
        rows, self.rows = self.rows, []
        return lambda connection: connection.execute(
            sa.text("insert into ledger values (:instruction, :account, :cents)"), rows
        )


def settled(checkpoint) -> int:
    """The number of instructions that were refused, or debited and credited."""
    done = "select instruction from ledger group by 1 having count(*) >= 2 or max(account) = 'refused'"
    with checkpoint.engine.connect() as connection:
        return connection.execute(sa.text(f"select count(*) from ({done}) as done")).scalar_one()


def live(directory: Path, url: str, life: int, aim_s: float) -> None:
    """Run the bank until everything is settled, or until it has seen ``life`` messages and is killed."""
    count = itertools.count(1)

    def seen():
        if next(count) == life:
            threading.Timer(aim_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    north, south = stores = [cues.open(directory / name) for name in BRANCHES]
    consumers = []
    for here, there in (stores, stores[::-1]):
        checkpoint = LMDBCheckpoint(here, "branch")
        sources = [here.queue("instructions"), here.queue("credits")]
        consumers.append(Consumer(Branch(here, there, checkpoint, seen), sources, checkpoint, max_s=0.05))
    book = SQLCheckpoint(url, "ledger", LEDGER)
    consumers.append(Consumer(Ledger(seen), [north.queue("entries"), south.queue("entries")], book, max_s=0.05))
    threads = [threading.Thread(target=consumer.run) for consumer in consumers]
    for thread in threads:
        thread.start()
    while settled(book) < INSTRUCTIONS and all(thread.is_alive() for thread in threads):
        time.sleep(0.05)
    for consumer, thread in zip(consumers, threads):
        consumer.stop()
        thread.join()
        consumer.close()
    for one in (book, *stores):
        one.close()


def open_accounts(directory: Path, chance: random.Random) -> None:
    """Make two branches, and instructions for each: between branches, within one, and some that cannot be paid."""
    names = [f"{branch}-{number}" for branch in BRANCHES for number in range(ACCOUNTS // 2)]
    orders = {branch: [] for branch in BRANCHES}
    for instruction in range(INSTRUCTIONS):
        payer, payee = chance.sample(names, 2)
        order = {"instruction": instruction, "payer": payer, "payee": payee, "cents": chance.randrange(1, 60)}
        orders[payer.partition("-")[0]].append(order)
    for branch, some in orders.items():
        with cues.open(directory / branch) as store:
            store.queue("instructions").appender().write_many(some)


def judge(directory: Path, checkpoint) -> dict[str, bool]:
    """The conditions that must hold after any number of deaths."""
    balances = {}
    for branch in BRANCHES:
        with cues.open(directory / branch) as store:
            keeper = LMDBCheckpoint(store, "branch")
            keeper.restore()
            balances |= keeper.state
    with checkpoint.engine.connect() as connection:
        rows = connection.execute(sa.text("select instruction, account, cents from ledger")).fetchall()
    moved = dict.fromkeys(balances, 0)
    for _, account, cents in rows:
        if account != "refused":
            moved[account] += cents
    paid = [instruction for instruction, account, cents in rows if cents < 0]
    credited = [instruction for instruction, account, cents in rows if cents > 0]
    refused = [instruction for instruction, account, cents in rows if account == "refused"]
    return {
        "every instruction is paid once or refused once": sorted(paid + refused) == list(range(INSTRUCTIONS)),
        "what was debited was credited": sorted(paid) == sorted(credited),
        "the ledger adds up to nothing": sum(cents for _, _, cents in rows) == 0,
        "the accounts hold what the ledger says": all(OPENING + moved[a] == balances[a] for a in balances),
        "the money is all there": sum(balances.values()) == OPENING * len(balances),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="the seed of the random choices")
    parser.add_argument("--deaths", type=int, default=DEATHS, metavar="N")
    parser.add_argument("--ledger", metavar="URL", help="URL of an empty database; the default is SQLite")
    arguments = parser.parse_args()
    chance = random.Random(arguments.seed)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        url = arguments.ledger or f"sqlite:///{directory / 'ledger.db'}"
        book = SQLCheckpoint(url, schema=LEDGER)
        print(
            f"{INSTRUCTIONS:,} instructions over {ACCOUNTS} accounts, {arguments.deaths} deaths, seed {arguments.seed}"
        )
        open_accounts(directory, chance)
        for death in range(arguments.deaths + 1):
            life = chance.randrange(1, 2 * INSTRUCTIONS // arguments.deaths) if death < arguments.deaths else 0
            aim_s = chance.uniform(0, AIM_S)
            child = subprocess.run([sys.executable, __file__, "--live", name, url, str(life), str(aim_s)])
            if child.returncode not in (0, -signal.SIGKILL):
                print(f"the child failed with {child.returncode}")
                return 1
            fate = f"killed after {life:5,} messages" if child.returncode else "finished"
            print(f"  {fate:28} {settled(book):6,} instructions settled", flush=True)
        verdicts = judge(directory, book)
    for what, holds in verdicts.items():
        print(f"  {'yes' if holds else 'NO '}  {what}")
    good = all(verdicts.values())
    print(f"{'Not a cent is missing' if good else 'Something is wrong'}, {time.monotonic() - began:.1f} s.")
    return 0 if good else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--live"]:
        live(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), float(sys.argv[5]))
    else:
        sys.exit(main())
