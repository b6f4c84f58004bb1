"""What scores read in Python text, whole or broken: words, names, subtrees, where values come from.

Whole text is parsed by `ast`. Text that cannot be parsed (a guess seldom can, and a prompt may end
anywhere) still has words, and by a few rules on these names.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import keyword
import re
import warnings
from collections import Counter
from itertools import islice, product

# With triple quotes it may go on to where the text ends. An escaped quote begins none: of quotes
# that are not closed, the search would else look at the rest of the line from each.
_STRING = (
    r"(?:\b[rRbBuUfF]{1,2})?(?:\"{3}.*?(?:\"{3}|\Z)|'{3}.*?(?:'{3}|\Z)|"
    r"(?<!\\)\"(?:\\.|[^\"\\\n])*+\"|(?<!\\)'(?:\\.|[^'\\\n])*+')"
)
_NAME = r"[^\W\d]\w*"
_WORD = re.compile(
    rf"(?P<string>{_STRING})|(?P<comment>#[^\n]*)|(?P<name>{_NAME})|(?P<number>\d[\w.]*)|"
    r"(?P<sign>\*\*=|//=|>>=|<<=|\.\.\.|->|:=|[-+*/%@&|^=!<>]=|\*\*|//|<<|>>|\S)",
    re.DOTALL,
)
MAX_FLOWS = 100_000  # of a text
# Names that any Python text may have: they tell nothing about one.
COMMON = frozenset([*keyword.kwlist, *keyword.softkwlist, *dir(builtins)]) | {"self", "cls"}


def words(text: str) -> list[str]:
    """Return Python's tokens, strings whole, without comments, spaces, line ends; of any text."""
    return [match[0] for match in _WORD.finditer(text) if match.lastgroup != "comment"]


def parsed(text: str) -> ast.Module | None:
    """Return the syntax tree of a text, or None for what is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def names(text: str) -> set[str]:
    """Return all names in a text, strings and comments left out; of any text."""
    return {match[0] for match in _WORD.finditer(text) if match.lastgroup == "name"}


def defined(text: str) -> set[str]:
    """Return names that the text imports, and those of its variables (attributes and parameters
    too), functions and classes, without `COMMON` and names between double underscores.
    """
    tree = parsed(text)
    names = _defined_in_words(text) if tree is None else _defined_in(tree)
    return {
        name
        for name in names
        if name not in COMMON and not (name.startswith("__") and name.endswith("__"))
    }


def _defined_in(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                names |= {*alias.name.split("."), alias.asname or ""}
            names |= set((getattr(node, "module", None) or "").split("."))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
    return names - {"", "*"}


def _defined_in_words(text: str) -> set[str]:
    """Find names by rules on words: all of a line that begins with import, from, def, class, global
    (so annotations and defaults too); what follows as, def and class; what stands between for and
    in, and before an assignment.
    """
    names: set[str] = set()
    for line in _STRINGS_AND_COMMENTS.sub(" ", text).splitlines():
        tokens = words(line)
        kept = [w for w in tokens if re.fullmatch(_NAME, w)]
        if tokens and tokens[0] in _LISTS_OF_NAMES:
            names |= set(kept)
        for word, after in zip(tokens, tokens[1:], strict=False):
            if word in ("as", "def", "class") or after in _ASSIGNMENTS:
                names |= {after} if word in ("as", "def", "class") else {word}
        if "for" in tokens:
            rest = tokens[tokens.index("for") + 1 :]
            names |= set(rest[: rest.index("in")] if "in" in rest else rest[:1])
    return {name for name in names if re.fullmatch(_NAME, name)}


_LISTS_OF_NAMES = ("import", "from", "def", "async", "class", "global", "nonlocal")
_STRINGS_AND_COMMENTS = re.compile(rf"{_STRING}|#[^\n]*", re.DOTALL)
_ASSIGNMENTS = ("=", ":=", "+=", "-=", "*=", "/=", "//=", "%=", "**=", "&=", "|=", "^=", "@=")


def subtrees(tree: ast.Module) -> Counter[str]:
    """Count subtrees of two nodes or more, as kinds of nodes: names and constants do not count.
    Long names of subtrees are hashed, so that those of a deep tree fit into memory.
    """
    counts: Counter[str] = Counter()
    shapes: dict[ast.AST, str] = {}
    for node in reversed(_in_order(tree)):  # children before parents
        inner = [
            shapes[child]
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, ast.expr_context)
        ]
        shapes[node] = type(node).__name__
        if inner:
            whole = f"{type(node).__name__}({','.join(inner)})"
            shapes[node] = _short(whole)
            counts[shapes[node]] += 1
    return counts


def _short(name: str) -> str:
    return name if len(name) <= 64 else hashlib.sha256(name.encode()).hexdigest()


def flows(tree: ast.Module) -> Counter[tuple[int, int]]:
    """Count (target, source) for every variable that a value is made of: of assignments, loops,
    with, and (-1, source) of what is returned. Variables are numbered by where they first stand, so
    that other names for the same flow are the same flow. Of more than `MAX_FLOWS`, which n targets
    of one assignment with n sources soon have, the first alone count.
    """
    numbers: dict[str, int] = {}

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers))

    def read(node: ast.AST | None) -> list[int]:
        return (
            []
            if node is None
            else [
                number(n.id)
                for n in _in_order(node)
                if isinstance(n, ast.Name) and n.id not in COMMON
            ]
        )

    counts: Counter[tuple[int, int]] = Counter()
    left = MAX_FLOWS
    for node in _in_order(tree):
        targets: list[int] = []
        sources: list[int] = []
        if isinstance(node, ast.arg) and node.arg not in COMMON:
            number(node.arg)
        elif isinstance(node, ast.Assign):
            targets, sources = [t for one in node.targets for t in read(one)], read(node.value)
        elif isinstance(node, ast.AugAssign):
            targets = read(node.target)
            sources = [*targets, *read(node.value)]
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            targets, sources = read(node.target), read(node.value)
        elif isinstance(node, ast.For | ast.AsyncFor | ast.comprehension):
            targets, sources = read(node.target), read(node.iter)
        elif isinstance(node, ast.withitem):
            targets, sources = read(node.optional_vars), read(node.context_expr)
        elif isinstance(node, ast.Return | ast.Yield | ast.YieldFrom):
            targets, sources = [-1], read(node.value)
        counts.update(islice(product(targets, sources), left))
        left = max(0, left - len(targets) * len(sources))
    return counts


def _in_order(node: ast.AST) -> list[ast.AST]:
    """Return the node and all in it, as they stand in the text."""
    nodes, stack = [], [node]
    while stack:
        node = stack.pop()
        nodes.append(node)
        stack += reversed(list(ast.iter_child_nodes(node)))
    return nodes
