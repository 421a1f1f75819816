"""What each command is for, so that the help and the completion of names load no command's module.

A test compares them with the first sentences of the commands' own help.
"""

from __future__ import annotations

PURPOSES = {
    "run": "Run the daemon: flush, verify, retain; until SIGTERM",
    "pin": "Make retention leave a checkpoint alone, in the spool and on every tier",
    "unpin": "Give a checkpoint back to retention",
    "config": "The configuration: check a file, or show which one commands use",
    "prune": "Apply retention to the tiers now: each run's own policy, or the one given",
    "disown": (
        "Delete a launch's names (manifests, quarantined ones, intents, pins, marks) from tiers: they are nobody's"
    ),
    "ls": "Every checkpoint, where its copies lie, and what retention makes of them",
    "show": "One checkpoint: its manifest's files, metrics, origin, lineage, and every copy",
    "diff": "Which tensors and other entries of two checkpoints differ, and how far",
    "verify": "Re-read every byte of every copy and compare digests",
    "runs": (
        "Every run of whole tiers: its newest verified step, how old it is, how far newer ones are ahead, and its size"
    ),
    "rm": "Delete a whole run from the places named, pins and all",
    "du": "The room that each run takes in each place, and how much of it several checkpoints share",
    "status": "How the node's daemon does: each tier's backlog, failures and last events",
    "pause": "Leave the tiers as they are for a while: no flush, no prune, no scrub",
    "resume": "End a pause; what is pending is flushed",
    "top": "The node's runs, tiers, problems and events, live: the daemon's page on a terminal",
    "doctor": (
        "Try what a daemon and its trainers will need: the spool, the machine, every tier, the receivers of "
        "events, and the time to end"
    ),
    "notify": "The receivers of events: send each an event",
    "check-resume": (
        "Run a training loop once through, and once killed and started again, and compare samples and losses"
    ),
    "bench": "Measure what saving costs training",
    "drain": "Have the daemon flush everything now, newest first, and wait for it; exit code 9 when something is left",
    "wait": (
        "Wait until a checkpoint is whole and verified on a tier; exit code 6 when a tier refuses or the time is over"
    ),
    "advise": "How often to save, and the goodput to expect, from what saving and failing cost",
    "inspect": "Check the structure of checkpoints of other programs, without loading or unpickling anything",
    "follow": "Run a command for each complete checkpoint, once over restarts; status 0 counts as delivered",
    "export": "Write the newest verified checkpoint, or the best, in another format, streamed",
    "restore": (
        "Copy the newest verified checkpoint, or the best, out of the tiers: one directory a rank, or back in place"
    ),
    "watch": "Take the checkpoints that another program writes below DIR, until SIGTERM",
    "prepare": (
        "Before a launch: verify every checkpoint below DIR, move damaged and unfinished ones to DIR/.tierd-"
        "quarantine, and fetch replacements"
    ),
    "copy": "Copy a run from one tier to another, verified, and only what TO lacks",
    "import": (
        "Turn existing checkpoints of other programs into verified ones of a run: each is checked and taken "
        "as its files, in the order of steps"
    ),
}
