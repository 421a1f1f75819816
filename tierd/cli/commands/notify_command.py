"""`tierd notify test`: send an event to each receiver of the configuration, from this process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import typer

from tierd.cli.options import ConfigOption, JsonOption
from tierd.cli.output import print_answer, print_json
from tierd.cli.places import DEFAULTS, default_config_file, load_config
from tierd.cli.tables import Table
from tierd.core.config import NotifyConfig
from tierd.core.errors import ConfigError
from tierd.core.event_kinds import TEST_EVENT, Event
from tierd.core.planning.place import SPOOL
from tierd.events.journal import utc_timestamp
from tierd.events.notifier import encode_event, node_members
from tierd.events.receivers import DeliveryFailed, open_receiver

_EXIT_FAILED = 6


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    notify = typer.Typer(help="Send a test event to the receivers of events.", no_args_is_help=True)
    notify.callback()(lambda: None)
    notify.command("test")(notify_test)
    app.add_typer(notify, name="notify")


@dataclass(frozen=True, slots=True)
class ReceiverTest:
    """One try to deliver an event.

    Attributes:
        name: `notify[0]`, `notify[1]` … in the order of the configuration.
        to: the part of the receiver's address that may be shown; empty if it cannot be read.
        error: why the event was not delivered; None: it was.
    """

    name: str
    to: str
    error: str | None


def notify_test(config: ConfigOption = None, json: JsonOption = False) -> None:
    """Send the event `test` to each receiver of the configuration, once, and say what each answered. It is sent by this
    command, so run it as the daemon's account, with the daemon's environment. Exit code 6: a receiver did not take it.
    """
    file = config or default_config_file()
    if file is None:
        raise ConfigError(f"the receivers stand in a configuration: give --config FILE, or {DEFAULTS}")
    loaded_config = load_config(file)
    if not loaded_config.notify:
        raise ConfigError(f"{file}: it has no [[notify]], so nobody is told of alerts; see docs/howto/notifications.md")
    spool = loaded_config.spool
    with ThreadPoolExecutor(len(loaded_config.notify)) as threads:
        tests = [
            *threads.map(lambda numbered: _send_test(numbered[0], numbered[1], spool), enumerate(loaded_config.notify))
        ]
    if json:
        print_json({"receivers": tests})
    else:
        rows = [(test.name, test.to, "failed" if test.error else "delivered") for test in tests]
        print_answer(Table(("RECEIVER", "TO", "RESULT"), rows))
        for test in tests:
            if test.error:
                print_answer(f"{test.name}: {test.error}")
    if any(test.error for test in tests):
        raise typer.Exit(_EXIT_FAILED)


def _send_test(index: int, config: NotifyConfig, spool: str) -> ReceiverTest:
    name = f"notify[{index}]"
    try:
        receiver = open_receiver(config, name)
    except ConfigError as error:
        return ReceiverTest(name, "", str(error))
    event = Event(
        at=utc_timestamp(), what=TEST_EVENT, place=SPOOL, subject=name, why="`tierd notify test` asked for it"
    )
    try:
        receiver.deliver(encode_event(event, node_members(spool)), config.timeout_s)
    except DeliveryFailed as error:
        return ReceiverTest(name, receiver.name, str(error))
    return ReceiverTest(name, receiver.name, None)
