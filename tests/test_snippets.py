"""The Python that pages and docstrings show fits the functions that it calls, and what needs only torch runs."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.snippets import PAGES, ROOT, blocks, calls, execute, spans
from support.waiting import wait_until

import tierd

_HOWTO = ROOT / "docs" / "howto"
_CALL = re.compile(r"\btierd\.[\w.]+\(")  # most code calls nothing of tierd, and parsing takes seconds
_VALUES = ("Best", "EarlyStopping", "Retention", "When")  # classes that check their arguments, and do nothing else


def shown() -> Iterator[tuple[str, ast.Call]]:
    """Each call of tierd that a page or a docstring shows, with where it is shown."""
    for page in PAGES:
        for code in filter(_CALL.search, (*blocks(page), *spans(page.read_text()))):
            yield from ((page.name, call) for call in calls(code))
    for source in sorted((ROOT / "tierd").rglob("*.py")):
        text = source.read_text()
        for node in ast.walk(ast.parse(text)) if _CALL.search(text) else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _CALL.search(node.value):
                texts = (*spans(node.value), *(line.strip() for line in node.value.splitlines()))
                yield from ((source.name, call) for code in filter(_CALL.search, texts) for call in calls(code))


def called(name: str) -> Any:
    """The function of tierd that a snippet calls by this name."""
    function: Any = tierd
    for part in name.split(".")[1:]:
        function = getattr(function, part, None) or importlib.import_module(f"{function.__name__}.{part}")
    return function


@functools.cache
def shown_calls() -> dict[str, ast.Call]:
    """Calls that need no framework, by place and text. A test reads them, because each worker imports this module."""
    return {
        f"{where}: {ast.unparse(call)}": call
        for where, call in shown()
        if re.fullmatch(r"tierd\.(?!adapters\.)[\w.]+", ast.unparse(call.func))  # adapters need their frameworks
    }


def test_shown_calls_fit_the_signatures() -> None:
    misfits = {}
    for where, call in shown_calls().items():
        arguments = [argument for argument in call.args if ast.unparse(argument) != "..."]
        named = {word.arg: word.value for word in call.keywords if word.arg}
        try:
            inspect.signature(called(ast.unparse(call.func))).bind_partial(*arguments, **named)
        except TypeError as error:
            misfits[where] = str(error)
    assert not misfits and len(shown_calls()) > 50


def test_shown_rules_are_accepted() -> None:
    rules = {
        where: call
        for where, call in shown_calls().items()
        if ast.unparse(call.func).removeprefix("tierd.") in _VALUES
        and not any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(call))
    }
    for where, call in rules.items():
        eval(compile(ast.Expression(call), where, "eval"), {"tierd": tierd})  # a refusal's traceback names the place
    assert len(rules) > 10


def test_pages_show_positional_rules() -> None:
    assert tierd.Best("loss", "max", 3) == tierd.Best(metric="loss", mode="max", count=3)
    assert any("tierd.Best('eval_loss')" in name for name in shown_calls()), "the pages show a positional metric"


# -- blocks that need only torch --------------------------------------------------------------------------------------


def names_of_a_loop() -> dict[str, Any]:
    """The names that the blocks of a page expect: a model, its state, and what a loop of a few steps uses."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    objects = {"tierd": tierd, "torch": torch, "model": model, "optimizer": optimizer, "loader": _Loader()}
    state = {"model": model, "optimizer": optimizer, "step": 0}
    functions = {"evaluate": lambda model: 0.5, "validate": lambda model: 0.5}
    return {**objects, **functions, "state": state, "STEPS": 200, "loss": torch.ones(())}


class _Loader:
    def state_dict(self) -> dict[str, int]:
        return {"position": 3}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        pass


def test_blocks_of_the_pages_about_own_loops_and_evaluation_run(tmp_path: Path) -> None:
    loop, continued = blocks(_HOWTO / "own-loop.md")
    names = names_of_a_loop()
    execute(loop, tmp_path, names)

    def steps_on_tier() -> list[int]:
        with tierd.open((tmp_path / "tier").as_uri(), run="llama-7b") as reader:
            return [checkpoint.step for checkpoint in reader.checkpoints()]

    wait_until(lambda: 200 in steps_on_tier())
    execute(continued, tmp_path, names)
    names["ckpt"].close()
    again = names_of_a_loop()
    execute(loop, tmp_path, again)
    assert again["state"]["step"] == 200
    execute(blocks(_HOWTO / "evaluate.md")[0].replace("val_loss", "loss"), tmp_path, names)
    assert names["loaded"].step in steps_on_tier()


def test_block_of_the_page_about_rules_runs(tmp_path: Path) -> None:
    (block,) = blocks(_HOWTO / "choosing.md")
    names = names_of_a_loop()
    names["STEPS"] = 4000
    execute(block.replace("when=when)", "when=when, to=[])"), tmp_path, names)  # the page leaves the tiers out
    names["ckpt"].close()
    assert names["stopping"].state_dict() and names["step"] == 499 + 5 * 500
