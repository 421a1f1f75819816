"""The commands' purposes and options, so that the help and the completion load no command's module.

A test compares them with the commands' own help and parameters.
"""

from __future__ import annotations

PURPOSES = {
    "run": "Run the daemon: flush, verify, retain; until SIGTERM",
    "pin": "Make retention leave a checkpoint alone, in the spool and on every tier",
    "unpin": "Give a checkpoint back to retention",
    "config": "Check a configuration file, or show which one commands use",
    "prune": "Apply retention to the tiers now, by each run's own policy or the one given",
    "disown": (
        "Delete a launch's names (manifests, quarantined ones, intents, pins, marks) from tiers: they are nobody's"
    ),
    "ls": "List every checkpoint, where its copies lie, and what retention makes of them",
    "show": "Show one checkpoint: its manifest's files, metrics, origin, lineage, and every copy",
    "diff": "Compare two checkpoints: which tensors and other entries differ, and how far",
    "verify": "Re-read every byte of every copy and compare digests",
    "runs": (
        "List every run of whole tiers: its newest verified step, how old it is, how far newer ones are "
        "ahead, and its size"
    ),
    "rm": "Delete a whole run from the places named, pins and all",
    "du": "Show the room that each run takes in each place, and how much of it several checkpoints share",
    "status": "How the node's daemon does: each tier's backlog, failures and last events",
    "pause": "Leave the tiers as they are for a while: no flush, no prune, no scrub",
    "resume": "End a pause; what is pending is flushed",
    "top": "The node's runs, tiers, problems and events, live: the daemon's page on a terminal",
    "doctor": (
        "Try what a daemon and its trainers will need: the spool, the machine, every tier, the receivers of "
        "events, and the time to end"
    ),
    "notify": "Send a test event to the receivers of events",
    "check-resume": (
        "Prove that a training loop resumes exactly: run it once through, and once killed and started again, "
        "and compare samples and losses"
    ),
    "bench": "Measure what saving costs training",
    "drain": "Have the daemon flush everything now, newest first, and wait for it; exit code 9 when something is left",
    "wait": (
        "Wait until a checkpoint is whole and verified on a tier; exit code 6 when a tier refuses or the time is over"
    ),
    "advise": "How often to save, and the goodput to expect, from what saving and failing cost",
    "inspect": "Check the structure of checkpoints of other programs, without loading or unpickling anything",
    "follow": "Run a command for each complete checkpoint, once over restarts; status 0 counts as delivered",
    "export": "Export a checkpoint in another format, the newest verified one or the best, streamed",
    "restore": (
        "Copy a checkpoint out of the tiers, the newest verified one or the best: one directory a rank, or "
        "back in place"
    ),
    "watch": "Take the checkpoints that another program writes below DIR, until SIGTERM",
    "prepare": (
        "Before a launch: verify every checkpoint below DIR, move damaged and unfinished ones to DIR/.tierd-"
        "quarantine, and fetch replacements"
    ),
    "copy": "Copy a run from one tier to another, verified, and only what TO lacks",
    "import": (
        "Import other programs' checkpoints into a run: each is checked and taken as its files, in the order of steps"
    ),
}
OPTIONS = {  # `=`: takes a value, of these if some follow; `+`: may be given several times
    "run": (
        "--spool= --to+= --config= --keep-last= --until-idle --await-trainer --key-file= --log-format=text|json --json"
    ),
    "pin": "--spool= --config= --attempt= --note= --json",
    "unpin": "--spool= --config= --attempt= --json",
    "prune": "--config= --run= --keep-last= --dry-run --key-file= --json",
    "disown": "--spool= --config= --yes --dry-run --key-file= --json",
    "ls": "--spool= --config= --run= --newest= --since= --key-file= --json",
    "show": "--spool= --config= --attempt= --key-file= --json",
    "verify": "--spool= --config= --run= --step= --key-file= --json",
    "diff": "--spool= --config= --run= --key-file= --json",
    "runs": "--spool= --config= --key-file= --json",
    "rm": "--spool= --config= --yes --dry-run --key-file= --json",
    "du": "--spool= --config= --run= --key-file= --json",
    "status": "--spool= --config= --check --json",
    "pause": "--spool= --config= --for= --json",
    "resume": "--spool= --config= --json",
    "top": "--spool= --config=",
    "doctor": "--spool= --config= --key-file= --all --json",
    "check-resume": (
        "--steps= --kill-at= --ranks= --allowance= --loss-tolerance= --patience= --every-save --ignore+= --keep --json"
    ),
    "drain": "--spool= --config= --deadline= --json",
    "wait": "--spool= --config= --tier= --timeout= --attempt= --json",
    "advise": (
        "--state-size= --blocked= --bandwidth= --from= --mtbf= --nodes= --restart= --tier-bandwidth= "
        "--node-loss= --step-time= --every= --sync= --table --tier+= --from-run= --spool= --run= --notice= "
        "--drain= --plot= --json"
    ),
    "inspect": "--json",
    "follow": "--run= --exec= --to= --latest --period= --once --key-file= --json",
    "export": (
        "--run= --to= --format= --only= --dtype= --strip= --rank= --step= --attempt= --best= --mode=min|max "
        "--key-file= --json"
    ),
    "restore": (
        "--run= --to= --into= --config= --step= --attempt= --best= --mode=min|max --key-file= --dry-run --json"
    ),
    "watch": (
        "--run= --to+= --spool= --keep-last= --unit+= --step= --complete-when= --series= --until-idle "
        "--key-file= --explain --json"
    ),
    "prepare": "--run= --to+= --spool= --unit+= --step= --complete-when= --key-file= --dry-run --json",
    "copy": "--run= --step= --as= --attempt= --key-file= --to-key-file= --dry-run --json",
    "import": "--run= --to+= --step= --key-file= --dry-run --json",
}
