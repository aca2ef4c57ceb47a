# SPDX-License-Identifier: Apache-2.0
"""Mutations of Python sources: which one-line mistakes tools/mutate.py can make. Pure.

Each replaces one operator, constant, call, condition, return or raise. Docstrings, annotations,
decorators, logs, assertions, texts of errors and what stands in f-strings stay as they are. The
syntax tree says where; the text is replaced, so the rest of the file stays byte for byte.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

SWAPS = {
    "<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<"), "==": ("!=",),
    "!=": ("==",), "is": ("is not",), "is not": ("is",), "in": ("not in",), "not in": ("in",),
    "+": ("-",), "-": ("+",), "*": ("+",), "/": ("*",), "//": ("*",), "%": ("*",), "**": ("*",),
    "<<": (">>",), ">>": ("<<",), "&": ("|",), "|": ("&",), "^": ("&",), "and": ("or",),
    "or": ("and",),
}  # fmt: skip
OPERATOR = re.compile(
    rb"is\s+not|not\s+in|<<|>>|\*\*|//|[<>=!]=|[-+*/%&|^<>]|\b(?:is|in|and|or)\b"
)
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGS = ("_log", "log", "logging", "warnings")
UNSEEN = ("__repr__", "__str__")  # functions whose texts are for people


class Mutation(NamedTuple):
    """One replacement in one line; nth: which of the lines of the file with this text."""

    path: str
    line: int
    nth: int
    before: str
    after: str
    kind: str
    text: bytes  # the whole file, mutated

    @property
    def key(self) -> str:
        """Name the mutation by texts, which stay when other lines are added."""
        return json.dumps([self.path, self.nth, self.before, self.after])

    def __str__(self) -> str:
        return f"{self.path}:{self.line}  {self.before}  ->  {self.after}"


class Source:
    """One file: its bytes, and where its syntax tree can be mutated."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source = path, source
        self.lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self.lines:
            self._starts.append(self._starts[-1] + len(line))

    def mutations(self) -> Iterator[Mutation]:
        """Yield all mutations of the file."""
        seen: Counter[bytes] = Counter()
        nth = [seen.update([line.strip()]) or seen[line.strip()] - 1 for line in self.lines]
        for start, end, new, kind in self._walk(ast.parse(self.source)):
            row = self.source.count(b"\n", 0, start)
            if b"\n" in self.source[start:end]:
                continue
            text = self.source[:start] + new.encode() + self.source[end:]
            before, after = self.lines[row], text.splitlines()[row]
            words = before.decode().strip(), after.decode().strip()
            yield Mutation(self.path, row + 1, nth[row], *words, kind, text)

    def _at(self, node: Any) -> tuple[int, int]:
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def _walk(self, node: ast.AST) -> Iterator[tuple[int, int, str, str]]:
        """Yield (start, end, replacement, kind) below a node, in bytes."""
        yield from self._own(node)
        for child in _children(node):
            yield from self._walk(child)

    def _own(self, node: Any) -> Iterator[tuple[int, int, str, str]]:
        match node:
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for left, right in itertools.pairwise(sides):
                    yield from self._swaps(left, right, "comparison")
            case ast.BoolOp():
                for left, right in itertools.pairwise(node.values):
                    yield from self._swaps(left, right, "boolean")
            case ast.BinOp() if not (_is_text(node.left) or _is_text(node.right)):
                yield from self._swaps(node.left, node.right, "arithmetic")
            case ast.AugAssign():
                yield from self._swaps(node.target, node.value, "arithmetic")
            case ast.UnaryOp(op=ast.Not()):
                yield self._at(node)[0], self._at(node.operand)[0], "", "not"
            case ast.Constant(value=bool() as value):
                yield *self._at(node), str(not value), "constant"
            case ast.Constant(value=int() | float() as value):
                yield *self._at(node), str(value + 1), "constant"
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                yield *self._at(node.func), CALLS[name], "call"
            case ast.Expr(value=ast.Call() as call) if _name(call) not in LOGS:
                yield *self._at(node), "pass", "dropped"
            case ast.Return(value=ast.expr() as value) if not _is_none(value):
                yield *self._at(node), "return None", "return"
            case ast.Raise() if "NotImplementedError" not in ast.dump(node):
                start, end = self._at(node)
                is_plain = node.exc is not None and node.cause is None
                yield start, start + 6 if is_plain else end, "" if is_plain else "pass", "raise"
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            start, end = self._at(node.test)
            if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
                yield start, end, f"not ({self.source[start:end].decode()})", "condition"

    def _swaps(self, left: Any, right: Any, kind: str) -> Iterator[tuple[int, int, str, str]]:
        start, end = self._at(left)[1], self._at(right)[0]
        found = OPERATOR.search(self.source, start, end)
        if found is not None and b"#" not in self.source[start:end]:
            for new in SWAPS[b" ".join(found[0].split()).decode()]:
                yield found.start(), found.end(), new, kind


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _name(node: ast.AST) -> str:
    """Name what is called, or where it is found: _log of _log.debug."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", "")


def _children(node: Any) -> Sequence[ast.AST]:
    """List what may be mutated below a node: no annotation, decorator, log, or error message."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [one for one in node.args.kw_defaults if one is not None]
            return [] if node.name in UNSEEN else [*node.args.defaults, *defaults, *node.body]
        case ast.ClassDef():
            return list(node.body)
        case ast.AnnAssign():
            is_type = "TypeAlias" in ast.dump(node.annotation)
            return [] if is_type or node.value is None else [node.value]
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return list(node.orelse)
        case ast.Expr(value=ast.Call()) if _name(node.value) in LOGS:
            return []
        case ast.Call() if re.search(r"Error$|Warning$|TypeVar$|^cast$", ast.unparse(node.func)):
            return []
        case ast.keyword(arg="strict"):  # an assertion of zip()
            return []
        case ast.Assert() | ast.Raise() | ast.JoinedStr():  # 3.11 misplaces what is in f"{...}"
            return []
    return list(ast.iter_child_nodes(node))


def pick(sources: Mapping[str, bytes], seed: int, count: int) -> list[Mutation]:
    """Choose mutations by seed, at most one in a line; each line is as likely as any other."""
    lines: dict[tuple[str, str, int], list[Mutation]] = {}
    for path, text in sources.items():
        for one in Source(path, text).mutations():
            lines.setdefault((path, one.before, one.nth), []).append(one)

    def place(*words: object) -> bytes:
        return hashlib.sha256(repr((seed, *words)).encode()).digest()

    chosen: list[Mutation] = []
    for place_of in sorted(lines, key=lambda line: place(*line)):
        for one in sorted(lines[place_of], key=lambda one: place(one.before, one.after)):
            if len(chosen) < count and _differs(one, sources[one.path]):
                chosen.append(one)
                break
    return chosen


def _differs(one: Mutation, source: bytes) -> bool:
    """Return whether the mutation is Python, and another program."""
    with contextlib.suppress(SyntaxError):
        return ast.dump(ast.parse(one.text)) != ast.dump(ast.parse(source))
    return False
