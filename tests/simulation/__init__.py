"""Deterministic simulation: whole runs of the engine with several processes, decided by one number.

    python -m tests.simulation --seed 7           one run, with all its decisions
    python -m tests.simulation --seeds 500        the runs 0 to 499
    python -m tests.simulation --seconds 60       as many runs as fit
    python -m tests.simulation --endless          until one fails

    world.py      virtual time, simulated processes, and the scheduler, which also injects the faults
    processes.py  the programs that the processes run: the engine, members of a group, transactions, seeks
    graphs.py     a random graph, and a naive model of it, which works on whole lists
    run.py        one run: the world, the processes, and the judgement

    steered.py        processes that run from point to point, moved by a caller instead of by chance
    interleavings.py  all interleavings of two processes, by such moves
    replays.py        counter-examples of the models in tests/models, replayed by such moves
    protections.py    protections of the code, each with a way to remove it

The code that runs is that of the project: starts, workers, steps, leases, groups, transactions, timers, delayed
messages, forwarding, low-water marks, all on real stores. Four things are simulated. Each process has locks of its own,
and one runs at a time: at the crash points (cues/faults.py) and before each commit it may hand over to another one.
Clocks move only when the scheduler moves them. Random bytes come from the seed. Commits and syncs may fail.

A process may be killed at any point, and be stopped at any point outside of a transaction, while others take over. A
stopped writer inside of a transaction blocks all others (``WriterStuck``), which tests/test_ownership.py has.

Not simulated: lost power (tests/test_power.py), damage (tests/damage.py), and threads of one process.
"""
