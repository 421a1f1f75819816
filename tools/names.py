"""Measure how many identifiers of `tierd/` are homely words, and which public class names have two meanings.

`make lint` runs it. A homely name (`one`, `found`, `what`) says nothing about the thing that it names, so a reader
has to follow its assignment. Such names may be `MOST_SHARE` of all bindings: arguments, variables, attributes,
functions and classes. A public class name that two modules define is a homonym, of which there may be `MOST_HOMONYMS`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_SHARE = 0.03
MOST_HOMONYMS = 8
_HOMELY = re.compile(
    "again|anew|apart|asked|away|bad|begun|beside|both|brought|came|chosen|comes|doubt|each|else|ended|enough|every|few"
    "|found|gave|given|gives|goes|gone|good|got|had|happened|happens|held|here|kept|known|late|left|lies|lost|made|many"
    "|meant|mine|named|needed|once|ones?|others?|ours|own|picked|rest|said|seen|shown|some|soon|stays|stood|such|taken"
    "|theirs|them|there|these|things?|this|those|told|together|took|trouble|wanted|way|went|what|whatever|whole|written|yet"
)
# Words beside a homely one that make no noun of it: `is_named`, `all_of_them`.
_FILL = re.compile(
    "a|all|an|and|any|are|as|at|be|by|first|for|has|have|in|is|it|last|new|next|no|not|of|old|on|or|the|to|was"
)


def is_homely(name: str) -> bool:
    """Whether no word of a name is a noun of the field."""
    words = [word for word in name.lower().split("_") if word]
    return any(map(_HOMELY.fullmatch, words)) and all(
        _HOMELY.fullmatch(word) or _FILL.fullmatch(word) for word in words
    )


def bindings(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Each name that a module binds, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield name, node.lineno


def findings(root: Path) -> list[str]:
    """All that is wrong with the names of the modules below a directory."""
    total, homely = 0, []
    classes = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = list(bindings(tree))
        total += len(names)
        homely += [f"{path}:{line}: {name}" for name, line in names if is_homely(name)]
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(f"{path}:{node.lineno}")
    homonyms = {name: places for name, places in classes.items() if len(places) > 1}
    problems = []
    if len(homely) > MOST_SHARE * total:
        share = f"{len(homely)} of {total} names say nothing ({len(homely) / total:.1%}, at most {MOST_SHARE:.0%})"
        problems += [*homely, f"{share}: name the thing by a noun of the field; tools/names.py says more"]
    if len(homonyms) > MOST_HOMONYMS:
        problems += [f"{name}: {', '.join(places)}" for name, places in homonyms.items()]
        problems += [f"{len(homonyms)} class names are defined twice, at most {MOST_HOMONYMS}: rename one of each"]
    return problems


def main() -> None:
    """Print each finding; exit 1 if there is one."""
    sys.exit("\n".join(findings(ROOT / "tierd")) or None)


if __name__ == "__main__":
    main()
