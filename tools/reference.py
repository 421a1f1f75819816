"""`python -m tools.reference`: write the tables of docs/ that are made of the code, between their marks.

A page holds ``<!-- made: KIND ARGUMENT -->`` and ``<!-- made: end -->``, and this module writes the lines between them.
The tables are committed, because most readers see the pages without the site. `tests/test_docs.py` fails where a table
differs from the code.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import typer.main

import tierd
from tierd.bench.growth.growth_result import GrowthResult, GrowthVerdict
from tierd.bench.overhead_result import OverheadResult, TargetVerdict
from tierd.check.check_report import Report as Checked
from tierd.cli import app
from tierd.cli.command_runtime import EXIT_CODES
from tierd.cli.commands.advise_answer import AdviceReport
from tierd.cli.commands.checkpoint_commands import CopyCheck
from tierd.cli.commands.copy_commands import CopyResult, ImportResult
from tierd.cli.commands.doctor_command import Diagnosis
from tierd.cli.commands.flush_waits import DrainResult, WaitResult
from tierd.cli.commands.inspect_command import InspectReport
from tierd.cli.commands.notify_command import ReceiverTest
from tierd.cli.commands.prune_commands import DisownResult, PruneVerdict
from tierd.cli.commands.run_commands import Removal, RunOverviews, UsageReport
from tierd.cli.places import DefaultSource
from tierd.client.saving.save_jobs import Stats
from tierd.core.advice.run_estimates import SaveFit
from tierd.core.config import Config, HttpConfig, NotifyConfig, TierConfig, WatchConfig
from tierd.core.diagnosis.findings import CHECKS, FINDINGS
from tierd.core.event_kinds import EVENT_KINDS, Event
from tierd.core.retention.policy import Best, RetentionPolicy
from tierd.core.run_report import Checkpoint, Report
from tierd.daemon.daemon_status import COUNTERS, Status
from tierd.daemon.http.openmetrics import FAMILIES, sample_names
from tierd.daemon.intake.directory_preparation import PrepareResult
from tierd.daemon.intake.in_place_restore import RestoredUnit
from tierd.daemon.last_verified import VerifiedCheckpoints
from tierd.daemon.runs_report import RunsReport
from tierd.daemon.transfer.restore_forecast import RestoreForecast
from tierd.daemon.transfer.restore_to_directory import RestoredDirectory
from tierd.reading.checkpoint_differences import CheckpointDifferences
from tierd.reading.command_follower import Delivery
from tierd.reading.export_from_tiers import StateExport
from tierd.state.kinds import supported_values as state_reference
from tierd.watching.unit_description import WatchExplanation
from tools import api_reference, page_lists
from tools.installation import availability, with_install_commands

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs"
END = "<!-- made: end -->"
_MARK = re.compile(
    r"(<!-- made: (?!end)([a-z]+)(?: ([^\n]*?))? -->\n)(.*?)(?=^<!-- made: end -->$)", re.DOTALL | re.MULTILINE
)

# The JSON of commands that print a class of their own, and of those that print a few members.
SHAPES: dict[str, Any] = {
    "run": Event,
    "status": Status,
    "doctor": Diagnosis,
    "runs": RunOverviews,
    "ls": Report,
    "show": {"checkpoint": Checkpoint, "manifests": list[dict[str, Any]]},
    "diff": CheckpointDifferences,
    "verify": {"checks": list[CopyCheck], "unreached": list[str]},
    "restore": RestoredDirectory,
    "restore --dry-run": RestoreForecast,
    "restore --into": RestoredUnit,
    "copy": CopyResult,
    "import": ImportResult,
    "prepare": PrepareResult,
    "watch": Event,
    "watch --explain": WatchExplanation,
    "export": StateExport,
    "follow": Delivery,
    "prune": {"verdicts": list[PruneVerdict]},
    "du": UsageReport,
    "rm": Removal,
    "disown": DisownResult,
    "pin": {"run": str, "step": int, "attempt": str, "pinned": bool},
    "pause": {"spool": str, "paused": str | None},
    "drain": DrainResult,
    "wait": WaitResult,
    "notify test": {"receivers": list[ReceiverTest]},
    "config show": {"sources": list[DefaultSource], "config": Config | None},
    "config check": {"config": Config, "reach": dict[str, str], "modes": dict[str, dict[str, str | None]]},
    "inspect": InspectReport,
    "check-resume": Checked,
    "advise": AdviceReport,
    "advise --notice": SaveFit,
    "bench overhead": {"result": OverheadResult, "verdicts": list[TargetVerdict]},
    "bench growth": {"result": GrowthResult, "verdicts": list[GrowthVerdict]},
    "/runs": RunsReport,  # over HTTP alone
    ".tierd/last-verified.json": VerifiedCheckpoints,  # a file of the spool
    "--version": {"version": str, "protocol": str, "format": int},
}
# Members that mean the same in every class.
_COMMON = {
    "run": "the run's name",
    "step": "the checkpoint's step",
    "attempt": "the launch that wrote it",
    "rank": "the rank",
    "world_size": "the number of ranks of its launch",
    "place": "`local` for the spool, else the tier's name",
    "tier": "the tier's name",
    "size": "bytes",
    "unreached": "tiers that did not answer",
    "reason": "for people",
    "places": "what each place holds",
    "status": "the worst that was found, else `sound`",
    "findings": "what is wrong",
    "uncovered": "files in which a flipped bit cannot be found",
    "notes": "sound files of old formats",
    "launch": "the launch, from 1",
    "launches": "each launch of the run that was killed",
    "ranks": "each rank, compared",
    "causes": "what may have gone wrong",
    "target": "`MODULE:FUNCTION`; of a verdict, the promise",
    "steps": "the last step that was compared",
    "loss_tolerance": "the relative difference of losses that was allowed",
    "again_examples": "the first few samples that were read again",
    "skipped_examples": "the first few samples that were skipped",
    "disowned": "whether it was deleted",
    "removed": "whether it was deleted",
    "units": "each checkpoint that was found",
    "usage": "for each run and place",
    "checkpoints": "the number of checkpoints",
    "file": "its path",
    "name": "its name",
    "created": "when it was made, RFC 3339",
    "format": "the number of this layout",
    "gigabytes": "the size of the state",
    "state_bytes": "the size of the state",
    "tensors": "the number of tensors",
    "blocked_s": "seconds that a save takes from training",
    "durable_s": "seconds until a save is durable",
    "step_s": "seconds of one training step",
    "rounds": "rounds of each arm",
    "arm": "the arm that was measured",
    "arms": "each arm, by name",
    "sizes": "each size of the state",
    "options": "the options of the command",
    "advise": "what `tierd advise --from` reads",
    "machine": "the machine",
    "model": "the model that was trained",
    "processor": "the model of the CPU",
    "kernel": "the version of Linux",
    "python": "the version of Python",
    "cores": "CPU cores",
    "training_threads": "threads that train",
    "memory_bytes": "memory",
    "filesystem": "the file system of the directory",
    "packages": "versions, by package",
}
_ELSEWHERE = {Config: "a configuration: see its [reference](configuration.md)"}  # not shown again below a command


def attributes(kind: type) -> dict[str, str]:
    """Each member's meaning, as the `Attributes:` of a class's docstring have it."""
    section = re.search(r"\n *(?:Attributes|Args):\n((?:\n| {8}.*\n?)+)", (kind.__doc__ or "") + "\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section[1].splitlines() if section else []:
        if head := re.match(r" {8}([a-z_0-9]+(?:, [a-z_0-9]+)*): (.*)", line):
            names = head[1].split(", ")
            found |= dict.fromkeys(names, head[2])
            continue
        for name in names:
            found[name] += " " + line.strip()
    return {name: text.strip().rstrip(".") for name, text in found.items()}


def purpose(kind: type) -> str:
    """The prose of a class's docstring, without its `Attributes:`, on one line."""
    text = re.split(r"\n *(?:Attributes|Args|Raises):\n", kind.__doc__ or "")[0]
    return " ".join(text.replace("``", "`").split())


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def exit_codes() -> str:
    return table(("code", "meaning"), ((str(code), means) for code, means in EXIT_CODES.items()))


def events() -> str:
    rows = (
        (f"`{name}`", kind.level, "yes" if kind.is_usual else "no", kind.meaning) for name, kind in EVENT_KINDS.items()
    )
    return table(("event", "level", "sent by default", "meaning"), rows)


def findings() -> str:
    """Each check of `tierd doctor` with its reason, and each finding of it."""
    rows = []
    for check, why in CHECKS.items():
        rows.append((f"**{check}**", "", f"**{why}**"))
        rows += [(f"`{name}`", one.severity, one.do) for name, one in FINDINGS.items() if one.check == check]
    return table(("finding", "severity", "what to do"), rows)


def counters() -> str:
    return table(("counter", "meaning"), ((f"`{name}`", means) for name, means in COUNTERS.items()))


def families() -> str:
    """The metrics of `/metrics`, by the names of their samples."""
    rows = []
    for name, family in FAMILIES.items():
        shown = ", ".join(f"`{one}`" for one in sample_names(name))
        rows.append((shown, family.kind, ", ".join(f"`{label}`" for label in family.labels), family.means))
    return table(("metric", "type", "labels", "meaning"), rows)


def stats() -> str:
    means = attributes(Stats)
    return table(("member", "meaning"), ((f"`{it.name}`", means[it.name]) for it in dataclasses.fields(Stats)))


def configuration() -> str:
    """Every key, dotted, with its default."""
    rows = []
    for kind in (Config, TierConfig, NotifyConfig, HttpConfig, WatchConfig, RetentionPolicy, Best):
        means, hints, prefix = attributes(kind), typing.get_type_hints(kind), _prefix(kind)
        for field in msgspec.structs.fields(kind):
            default = "required" if field.required else _default(field)
            if kind is NotifyConfig and field.name in ("url", "command"):
                default = "one of `url` and `command`"
            meaning = means.get(field.name, "").replace("None:", "not given:")
            rows.append((f"`{prefix}{field.name}`", meaning, default, _in_toml(hints[field.name])))
    return table(("key", "meaning", "default", "type"), rows)


def _prefix(kind: type) -> str:
    """The key under which a class of the configuration stands, with a dot."""
    owners = ((name, hint) for owner in (Config, RetentionPolicy) for name, hint in members(owner).items())
    return next((f"{name}." for name, hint in owners if kind in _inner(hint)), "")


def _in_toml(hint: Any) -> str:
    return re.sub(r"\[[^]]+\]\(#[^)]+\)", "table", _json(hint)).removesuffix(" or null")


def _default(field: msgspec.structs.FieldInfo) -> str:
    return _value(field.default if field.default is not msgspec.NODEFAULT else field.default_factory()) or "not given"


def _value(default: Any) -> str:
    """A default; empty for what stands for nothing."""
    if default is None or default is False or default in ((), {}, ""):
        return ""
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


# -- the command line -------------------------------------------------------------------------------------------------


def commands(command: Any = None, prefix: str = "tierd") -> dict[str, Any]:
    """Each command by its words, `tierd config check`."""
    command = typer.main.get_command(app) if command is None else command
    inner = getattr(command, "commands", None)
    if inner is None:
        return {prefix: command}
    return {words: one for name, it in inner.items() for words, one in commands(it, f"{prefix} {name}").items()}


def parameters(command: Any) -> Iterator[tuple[str, str, str, bool]]:
    """Each argument and option: how it is written, its meaning, its default, and whether the usage shows it."""
    for parameter in command.params:
        text = getattr(parameter, "help", None) or ""
        flag = bool(getattr(parameter, "is_flag", False))
        metavar = "" if flag else parameter.metavar or "N"  # only whole numbers have no name of their own
        if parameter.param_type_name == "argument":
            yield metavar if parameter.required or metavar.startswith("[") else f"[{metavar}]", text, "", True
            continue
        again = " May be given several times." if getattr(parameter, "multiple", False) else ""
        default = "required" if parameter.required else _value(parameter.default)
        yield f"{parameter.opts[-1]} {metavar}".strip(), text + again, default, parameter.required


def usage(name: str, command: Any) -> str:
    """How a command is called."""
    return " ".join([name, *(word for word, _, _, shown in parameters(command) if shown), "[OPTIONS]"])


def cli(name: str) -> str:
    """One command: its purpose, its usage, its arguments and options."""
    command = commands()[f"tierd {name}"]
    rows = ((f"`{word}`", text, default) for word, text, default, _ in parameters(command))
    help_text = " ".join((command.help or "").split())
    return f"{help_text}\n\n    {usage(f'tierd {name}', command)}\n\n" + table(("", "meaning", "default"), rows)


# -- JSON -------------------------------------------------------------------------------------------------------------


def members(kind: type) -> dict[str, Any]:
    """The members of a class, with their types."""
    hints = typing.get_type_hints(kind)
    return {field.encode_name: hints[field.name] for field in msgspec.inspect.type_info(kind).fields}  # type: ignore[attr-defined]


def _inner(hint: Any) -> list[type]:
    """The classes with members of their own in a type."""
    if isinstance(hint, type) and not typing.get_origin(hint):
        return [hint] if dataclasses.is_dataclass(hint) or issubclass(hint, msgspec.Struct) else []
    return [one for part in typing.get_args(hint) for one in _inner(part)]


def _json(hint: Any) -> str:
    """A type as JSON has it."""
    names = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", Any: "any"}
    if hint in names:
        return names[hint]
    if isinstance(hint, type) and hint in _ELSEWHERE:
        return _ELSEWHERE[hint]
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _json(parts[0])
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (list, tuple):
        return f"array of {_json(parts[0])}"
    if origin is dict:
        return f"object of {_json(parts[1])}"
    if parts:
        return " or ".join(dict.fromkeys(_json(part) for part in parts))
    if not (isinstance(hint, type) and _inner(hint)):
        return "any"
    return f"[{_name(hint)}](#{_name(hint).lower().replace(' ', '-')})"


def _name(kind: type) -> str:
    """A class's name; two that share one are told apart by their packages."""
    alike = {one for one in classes() if one.__name__ == kind.__name__}
    return kind.__name__ if len(alike) < 2 else f"{kind.__name__} of {kind.__module__.split('.')[1]}"


def shapes() -> dict[str, dict[str, Any]]:
    """Each command's members at the top."""
    return {name: shape if isinstance(shape, dict) else members(shape) for name, shape in SHAPES.items()}


@cache
def classes() -> list[type]:
    """Every class that the JSON of some command shows, each once, in the order in which they appear."""
    found: list[type] = []
    todo = [one for top in shapes().values() for hint in top.values() for one in _inner(hint)]
    todo += [shape for shape in SHAPES.values() if isinstance(shape, type)]
    while todo:
        kind = todo.pop(0)
        if kind not in found and kind not in _ELSEWHERE:
            found.append(kind)
            todo += [one for hint in members(kind).values() for one in _inner(hint)]
    return found


def answers() -> str:
    """What each command prints, at the top."""
    rows = []
    for name, shape in SHAPES.items():
        if isinstance(shape, dict):
            shown = ", ".join(f"`{member}`: {_json(hint)}" for member, hint in shape.items())
        else:
            shown = _json(shape)
        rows.append((f"`{name}`", shown))
    return table(("command", "prints"), rows)


def types() -> str:
    """Each class: its purpose and its members."""
    parts = []
    for kind in sorted(classes(), key=lambda it: it.__name__):
        means = attributes(kind)
        rows = [
            (f"`{name}`", _json(hint), re.sub(r"\bNone\b", "null", means.get(name) or _COMMON.get(name, "")))
            for name, hint in members(kind).items()
        ]
        parts.append(f"### {_name(kind)}\n\n{purpose(kind)}\n\n" + table(("member", "type", "meaning"), rows))
    return "\n".join(parts)


# -- the Python interface ---------------------------------------------------------------------------------------------


def errors() -> str:
    """The public errors, with the first sentence of each docstring."""
    rows = []
    for name in tierd.__all__:
        value = getattr(tierd, name)
        if isinstance(value, type) and issubclass(value, Exception):
            rows.append((f"`tierd.{name}`", purpose(value)))
    return table(("error", "raised when"), rows)


def state_kinds() -> str:
    """The kinds of values that a state may hold."""
    rows = ((row.value, row.stored, row.restored) for row in state_reference.KINDS)
    return table(("value", "what is stored", "the value in its place at a restore"), rows)


def state_refused() -> str:
    """What a state may not hold, with what to do."""
    return table(("not stored", "what to do"), state_reference.REFUSED)


KINDS_OF_TABLE: dict[str, Callable[..., str]] = {
    "codes": exit_codes,
    "events": events,
    "counters": counters,
    "findings": findings,
    "families": families,
    "stats": stats,
    "configuration": configuration,
    "cli": cli,
    "answers": answers,
    "types": types,
    "api": api_reference.section,
    "contents": api_reference.contents,
    "links": page_lists.links,
    "availability": availability,
    "errors": errors,
    "state": state_kinds,
    "refused": state_refused,
}


def made(text: str) -> str:
    """A page with all its tables as the code has them today."""

    def anew(match: re.Match[str]) -> str:
        arguments = [match[3]] if match[3] else []
        return match[1] + KINDS_OF_TABLE[match[2]](*arguments)

    return with_install_commands(_MARK.sub(anew, text))


def stale() -> list[Path]:
    """The pages that say something else than the code."""
    shown = [ROOT / "README.md", ROOT / "systemd" / "tierd.toml", ROOT / "tierd" / "TIER_README.md"]
    return [path for path in (*shown, *sorted(PAGES.rglob("*.md"))) if made(path.read_text()) != path.read_text()]


def main() -> None:
    for path in stale():
        path.write_text(made(path.read_text()))
        print(f"{path.relative_to(ROOT)}: written anew")


if __name__ == "__main__":
    main()
