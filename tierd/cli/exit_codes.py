"""The exit codes of all commands."""

from __future__ import annotations

from tierd.ipc.messages import EXIT_BAD_INPUT, EXIT_HELD

EXIT_NOT_EXACT = 8
EXIT_UNFINISHED = 9
EXIT_WARNING, EXIT_ALERT = 10, 11
EXIT_UNDELIVERED = 12
EXIT_NOTHING_TAKEN = 13

EXIT_CODES: dict[int, str] = {
    0: "done; nothing wrong was found",
    1: "an unexpected failure: a bug, or an error of the operating system",
    2: "the command line was not understood",
    EXIT_BAD_INPUT: "bad input: configuration, URL, name, step, a spool that cannot be used, "
    "a loop that fails by itself",
    4: "not found: no such checkpoint, or none verified; `inspect`, `import`: a checkpoint is incomplete or unknown",
    5: "corruption was found",
    6: "a store or the daemon did not answer, or refused; this proves nothing wrong",
    EXIT_HELD: "another daemon holds the spool",
    EXIT_NOT_EXACT: "`check-resume`: the killed run differs from the uninterrupted one",
    EXIT_UNFINISHED: "`run` after SIGTERM, `drain`: some tier still lacks a part that it wants; "
    "`--until-idle`: a checkpoint in a watched directory was not taken",
    EXIT_WARNING: "`status --check`: a warning, and no alert; `doctor`: it works, at a cost or a risk; "
    "`advise --notice`: the state is not in time",
    EXIT_ALERT: "`status --check`: an alert: somebody has to act, or checkpoints may be lost; "
    "`doctor`: something that is needed will fail",
    EXIT_NOTHING_TAKEN: "`--until-idle`: no checkpoint of a watched directory was ever taken, because it has none that "
    "tierd knows, or is empty",
    EXIT_UNDELIVERED: "`follow --once`: a checkpoint could not be delivered, or its command failed",
}
