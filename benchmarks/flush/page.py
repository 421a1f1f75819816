"""The result as a Markdown page, and its verdicts.

Invariant: every number is computed from the result's samples; prose only says what the numbers are. A row without
samples, or with errors, says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import msgspec
from bench import Case

from tierd.bench.process_counters import Machine
from tierd.bench.report_page import MET, SIGNS, is_met, machine_text, markdown_table, number_text, spread_text

FORMAT = 1
_MIB = 1 << 20
_STORED = {"fp32": 0.85, "bf16": 0.70}
_FASTER, _MEMORY, _SLOWER = 1.5, 512.0, 0.05


class Result(msgspec.Struct):
    """The whole file. `data` says how each checkpoint was made."""

    format: int
    created: str
    machine: Machine
    server: str
    options: dict[str, str]
    data: dict[str, dict[str, str]]
    cache_dropped: bool
    cases: list[Case]


class Verdict(msgspec.Struct, frozen=True):
    """`measured` is None where a row that it needs has no samples."""

    what: str
    relation: str
    limit: float
    measured: float | None
    spread: str = ""

    @property
    def met(self) -> str:
        return MET[is_met(self.relation, self.measured, self.limit)]


def verdicts(result: Result) -> list[Verdict]:
    """Every target that a part of this run is about."""
    rows = {(case.part, case.gigabytes, case.kind, case.place, case.arm): case for case in result.cases}
    found: list[Verdict] = []
    for (part, size, kind, place, arm), case in rows.items():
        name = f"{part}: {size:g} GB {kind}"

        def times(other: str, figure: str, case: Case = case, at: tuple[Any, ...] = (part, size, kind, place)) -> Any:
            return _times(rows[(*at, other)].samples.get(figure, []), case.samples.get("total_s", []))

        if part == "a" and arm == "tierd":
            for other in ("dcp + zstd", "dcp + zstd, 2 threads"):
                found.append(Verdict(f"{name}: seconds of {other} / tierd", ">=", _FASTER, *times(other, "total_s")))
            stored = [value / case.raw_bytes for value in case.samples.get("stored_bytes", [])]
            found.append(Verdict(f"{name}: stored / raw bytes", "<=", _STORED[kind], *_spread(stored)))
        if part == "d" and arm.startswith("tierd"):
            for figure, end in (("total_s", "copied into the state"), ("loaded_s", "torch.load returned")):
                what = f"{name}, {place}: unverified ({end}) / {arm}"
                found.append(Verdict(what, ">=", 1.0, *times("download + torch.load", figure)))
        if part == "e":
            own = [value / _MIB for value in case.samples.get("flush_own_bytes", [])]
            what = f"{name}, {place}: daemon's own memory while flushing, MiB"
            found.append(Verdict(what, "<=", _MEMORY, *_max(own)))
            slower = case.samples.get("slowdown", [])
            found.append(Verdict(f"{name}, {place}: training's slowdown", "<=", _SLOWER, *_spread(slower)))
    return found


def _times(over: Sequence[float], under: Sequence[float]) -> tuple[float | None, str]:
    """The ratio of medians; the smallest and the largest that two rounds could give."""
    if not over or not under:
        return None, ""
    return median(over) / median(under), f"{min(over) / max(under):.2f} to {max(over) / min(under):.2f}"


def _spread(values: Sequence[float]) -> tuple[float | None, str]:
    return (median(values), f"{min(values):.3f} to {max(values):.3f}") if values else (None, "")


def _max(values: Sequence[float]) -> tuple[float | None, str]:
    return (max(values), f"{min(values):.0f} to {max(values):.0f}; the largest counts") if values else (None, "")


def page(result: Result) -> str:
    parts = ["# Saving to S3, restoring from it, and training beside that", _about(result), _verdicts(result)]
    for part, title, columns in (
        ("a", "## (a) From `save` to S3", _SAVING),
        ("d", "## (d) Restore on a fresh node", _RESTORING),
        ("e", "## (e) Training beside a flush", _TRAINING),
    ):
        cases = [case for case in result.cases if case.part == part]
        if cases:
            rows = [(f"{case.gigabytes:g} GB {case.kind}", case.place, *_cells(case, columns)) for case in cases]
            parts += [title, _TEXT[part], markdown_table(("state", "place", *columns), rows), *_errors(cases)]
    return "\n\n".join(parts) + "\n"


def _about(result: Result) -> str:
    data = "\n".join(
        f"- {name}: {reported['parameters']} parameters ({reported['model']}), {reported['steps']} steps of training, "
        f"loss {reported['loss']}"
        for name, reported in result.data.items()
    )
    options = ", ".join(f"{name} {value}" for name, value in result.options.items())
    dropped = "was dropped" if result.cache_dropped else "could not be dropped (that needs root)"
    return (
        f"Written by `benchmarks/flush` on {result.created[:10]} ({options}). Believe the ratios: they are of one "
        f"run, arms in turns.\nThe seconds are this machine's: {machine_text(result.machine)}. The S3 server "
        f"({result.server}) runs on the same cores.\nBefore each restore the page cache {dropped}; the server's own "
        f"cache was not. Cells are medians (smallest to largest).\n\n{data}"
    )


def _verdicts(result: Result) -> str:
    rows = [
        (
            verdict.what,
            f"{SIGNS[verdict.relation]} {verdict.limit:g}",
            number_text(verdict.measured, ".3g"),
            verdict.spread,
            verdict.met,
        )
        for verdict in verdicts(result)
    ]
    return "## Targets\n\n" + markdown_table(("target", "limit", "measured", "rounds", ""), rows)


Cell = Callable[[Case], str]


def _figure(name: str, unit: float = 1.0, form: str = ".2f", per_raw: bool = False) -> Cell:
    def cell(case: Case) -> str:
        scale = case.raw_bytes if per_raw else unit
        values = [value / scale for value in case.samples.get(name, [])]
        return spread_text(values, form)

    return cell


_COMMON: dict[str, Cell] = {"rounds": lambda case: str(max(map(len, case.samples.values()), default=0))}
_SAVING: dict[str, Cell] = {
    "arm": lambda case: case.arm,
    **_COMMON,
    "seconds in all": _figure("total_s"),
    "blocked": _figure("blocked_s", form=".3f"),
    "on local disk after": _figure("durable_s"),
    "zstd": _figure("compress_s"),
    "upload": _figure("upload_s"),
    "stored / raw": _figure("stored_bytes", per_raw=True, form=".3f"),
    "CPU-s": _figure("cpu_s"),
    "others' cores": _figure("others_cores"),
    "what is counted": lambda case: case.how,
}
_RESTORING: dict[str, Cell] = {
    "arm": lambda case: case.arm,
    **_COMMON,
    "seconds in all": _figure("total_s"),
    "on local disk after": _figure("brought_s"),
    "loaded after": _figure("loaded_s"),
    "CPU-s": _figure("cpu_s"),
    "others' cores": _figure("others_cores"),
}
_TRAINING: dict[str, Cell] = {
    "how": lambda case: case.how,
    **_COMMON,
    "state, MB": lambda case: f"{case.raw_bytes / 1e6:.0f}",
    "flush, s": _figure("flush_s"),
    "step alone, s": _figure("idle_step_s", form=".3f"),
    "step beside it": _figure("flushing_step_s", form=".3f"),
    "slowdown": _figure("slowdown", form=".1%"),
    "of medians": _figure("slowdown_of_medians", form=".1%"),
    "own memory, MiB": _figure("flush_own_bytes", _MIB, ".0f"),
    "RssAnon": _figure("flush_RssAnon_bytes", _MIB, ".0f"),
    "RssFile": _figure("flush_RssFile_bytes", _MIB, ".0f"),
    "RssShmem": _figure("flush_RssShmem_bytes", _MIB, ".0f"),
    "own, persisting": _figure("persist_own_bytes", _MIB, ".0f"),
    "VmHWM": _figure("daemon_high_water_bytes", _MIB, ".0f"),
    "others' cores": _figure("others_cores"),
}
_TEXT = {
    "a": """Seconds from the call. tierd: until `Save.wait("s3")` returns; every save is its run's first, so nothing of
it is shared with an older checkpoint. Baseline: DCP's process-based `async_save`, then zstd level 1 file by file, then
boto3's `upload_fileobj`, each as its library sets it up; a first save was made before. CPU-seconds are of trainer,
daemon and every child; *others' cores* is what everybody else, the server included, kept busy meanwhile.""",
    "d": """Seconds until every tensor of a state that is in memory holds the checkpoint's bytes, which is compared
after every turn. tierd: empty spool, a daemon that has just started; everything is verified. Baseline: an uncompressed
`torch.save` file, brought by boto3's `download_fileobj` or a copy, `torch.load`, copied into the state; nothing is
verified. `tierd restore --to` starts Python, brings files, and safetensors loads them.""",
    "e": """Training has one thread; steps are means over a window. Alone: before and after; beside it: whole steps
between the save being durable in the spool and being verified on the tier. *Own memory* is RssAnon + RssFile of the
daemon, at most, sampled twenty times a second; RssShmem is the trainer's arena, mapped. VmHWM counts all of it, from
the save on. With the S3 server on the same cores, its work is in the slowdown too: see *others' cores*.""",
}


def _cells(case: Case, columns: dict[str, Cell]) -> Iterable[str]:
    return (cell(case) for cell in columns.values())


def _errors(cases: Sequence[Case]) -> list[str]:
    lines = [
        f"- {case.gigabytes:g} GB {case.kind}, {case.place}, {case.arm}: {error}"
        for case in cases
        for error in case.errors
    ]
    return ["Failed turns:\n\n" + "\n".join(lines)] if lines else []
