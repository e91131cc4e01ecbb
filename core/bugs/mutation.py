"""Mutants of a recipe: its source with one small change, such as a typing error would make.

A mutant replaces one expression or one statement, so its patch is one line or two. Places that cannot cause a bug of training are
left out: messages of errors, annotations, imports, and the pieces that only the report
and the export read.
"""

import ast
import difflib
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from trainworthy.core.recipe.source_pieces import SETTINGS, pieces

PARTS = ("loss", "counts", "data", "train", "evaluate", "optimizers", "state", "on_start")
"""Parts of a recipe that are mutated by default: loss, data, loop and evaluation."""
HELPER = "helper"  # the part of a mutant in another module than the recipe's own

ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult, ast.FloorDiv: ast.Div,
              ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd}  # fmt: skip
COMPARISON = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
ALONG = ("mean", "sum", "softmax", "log_softmax", "argmax", "argmin", "cat", "stack", "std", "var", "gather", "cumsum", "amax",
         "amin", "logsumexp", "squeeze", "unsqueeze", "flatten", "roll", "norm", "size")  # fmt: skip
"""Calls whose integer arguments are dimensions."""
SAME_SHAPE = ("clamp", "clamp_min", "clamp_max", "exp", "log", "sqrt", "square", "abs", "softmax", "log_softmax", "sigmoid",
              "tanh", "relu", "gelu", "silu", "roll", "flip", "normalize", "flatten", "deepcopy", "float", "clone")  # fmt: skip
"""Calls that may be dropped from an expression: what they return has the shape of what they got."""


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: Path
    part: str
    """The part of the recipe that it changes; `helper` in another module."""
    kind: str
    line: int
    last: int
    old: str
    new: str
    start: int
    """Bytes from here to `end` are replaced by `new`."""
    end: int

    @property
    def id(self) -> str:
        mark = hashlib.blake2b(f"{self.file.name} {self.old} -> {self.new} {self.start}".encode(), digest_size=3)
        return f"{self.file.stem}-{self.line}-{self.kind}-{mark.hexdigest()}"

    def applied(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.start] + self.new.encode() + raw[self.end :]).decode()

    def patch(self, source: str) -> str:
        """Return the unified diff, without its two header lines."""
        lines = difflib.unified_diff(source.splitlines(), self.applied(source).splitlines(), lineterm="", n=0)
        return "\n".join(list(lines)[2:])


def mutants(file: Path, parts: tuple[str, ...] = PARTS, *, helper: bool = False) -> list[Mutant]:
    """Return every mutant of `file` that compiles to other bytecode, in the order of the source."""
    source = file.read_text()
    tree, found = ast.parse(source), {}
    for node, part in _regions(tree, source, helper=helper):
        if part == HELPER or part in parts:
            for kind, place, new in _changes(node, part):
                one = _mutant(file, source, part, kind, place, new)
                found.setdefault((one.start, one.end, one.new), one)
    before = _meaning(compile(source, "recipe", "exec"))
    kept = []
    for one in sorted(found.values(), key=lambda m: (m.start, m.end, m.kind, m.new)):
        try:
            changed = _meaning(compile(one.applied(source), "recipe", "exec")) != before
        except SyntaxError:
            continue
        kept += [one] * changed
    return kept


def drawn(found: list[Mutant], seed: int = 0) -> list[Mutant]:
    """Return the mutants in a random order that depends on `seed` alone: a larger sample contains a smaller one."""
    ordered = sorted(found, key=lambda m: m.id)
    random.Random(seed).shuffle(ordered)
    return ordered


def reached(found: list[Mutant], lines: dict[str, list[int]]) -> list[Mutant]:
    """Return the mutants with a line among `lines` (of each file) that were executed."""
    return [m for m in found if {*range(m.line, m.last + 1)} & {*lines.get(str(m.file), ())}]


def _regions(tree: ast.Module, source: str, *, helper: bool) -> Iterator[tuple[ast.AST, str]]:
    """Yield (syntax node, part) of what may be mutated."""
    if helper:
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node, HELPER
        return
    every = pieces(source).values()
    # A trainer's settings make the loss, in the place where its model is made
    hosted = any(piece.also for piece in every)
    for piece in every:
        if piece.home and piece.key not in SETTINGS:
            part = "loss" if hosted and piece.home[0] == "model" else piece.home[0]
            for node in piece.nodes:
                if not isinstance(node, (ast.Import, ast.ImportFrom)):
                    yield node, part


def _walk(node: ast.AST, above: tuple[ast.AST, ...] = ()) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Yield (node, its ancestors) of what runs, without checks of the input, annotations, texts, docstrings and settings' defaults."""
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, ast.If) and not node.orelse and all(isinstance(one, ast.Raise) for one in node.body):
        return  # with another test it raises on good input, or never
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.AnnAssign) and above and _is_dataclass(above[-1]):
        return
    yield node, above
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment") or (name == "decorator_list" and _is_dataclass(node)):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child, (*above, node))


def _is_dataclass(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(d) for d in node.decorator_list)


def _changes(top: ast.AST, part: str) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield (kind, node to replace, its new text)."""
    for node, above in _walk(top):
        parent = above[-1] if above else None
        match node:
            case ast.BinOp(left, op, right):
                if type(op) in ARITHMETIC:
                    yield "operator", node, _text(ast.BinOp(left, ARITHMETIC[type(op)](), right))
                if isinstance(op, ast.Sub):
                    yield "sign", node, _text(ast.BinOp(right, op, left))
            case ast.AugAssign(target, op, value) if type(op) in ARITHMETIC:
                yield "operator", node, ast.unparse(ast.AugAssign(target, ARITHMETIC[type(op)](), value))
            case ast.Compare(left, [op], right) if type(op) in COMPARISON:
                yield "operator", node, _text(ast.Compare(left, [COMPARISON[type(op)]()], right))
            case ast.BoolOp(op, values):
                other = ast.Or() if isinstance(op, ast.And) else ast.And()
                yield "operator", node, _text(ast.BoolOp(other, values))
            case ast.UnaryOp(ast.USub(), operand) if not isinstance(operand, ast.Constant):
                yield "sign", node, _text(operand)
            case ast.UnaryOp(ast.Not() | ast.Invert(), operand):
                yield "condition", node, _text(operand)
            case ast.If(test) | ast.IfExp(test) | ast.While(test):
                yield "condition", test, _text(ast.UnaryOp(ast.Not(), test))
            case ast.Constant(value) if not isinstance(value, str):
                for kind, new in _constants(value, parent, above):
                    yield kind, node, new
            case ast.Constant("sum" | "mean" as value) if isinstance(parent, ast.keyword) and parent.arg == "reduction":
                yield "constant", node, '"mean"' if value == "sum" else '"sum"'
            case ast.Subscript(_, index):
                for one in index.elts if isinstance(index, ast.Tuple) else [index]:
                    for new in _indices(one):
                        yield "index", one, new
            case ast.Attribute(_, "training"):
                yield "mode", node, f"(not {ast.unparse(node)})"
            case ast.Expr(ast.Call()):
                yield "dropped-call", node, "pass"
            case ast.Assign([ast.Name()], value) if part in ("loss", HELPER) and isinstance(
                value, (ast.Call, ast.BinOp)
            ):
                yield "detach", value, f"({ast.unparse(value)}).detach()"
        if isinstance(node, ast.Call):
            for kind, new in _calls(node):
                yield kind, node, new
        if isinstance(node, ast.Dict) and part == "loss":  # terms of the loss
            for value in node.values:
                if not isinstance(value, (ast.UnaryOp, ast.Constant)):
                    yield "sign", value, f"-{_text(value)}"


def _constants(value: object, parent: ast.AST | None, above: tuple[ast.AST, ...]) -> Iterator[tuple[str, str]]:
    if value is True or value is False:
        yield "constant", str(not value)
    elif isinstance(value, int):
        call = next((a for a in reversed(above) if isinstance(a, (ast.Call, ast.stmt))), None)
        named = isinstance(parent, ast.keyword) and parent.arg in ("dim", "axis")
        if named or (isinstance(call, ast.Call) and _called(call) in ALONG and not isinstance(parent, ast.keyword)):
            yield "dimension", "1" if value == 0 else "0" if value in (1, -1) else str(value - 1)
        elif not any(isinstance(a, (ast.Subscript, ast.Slice)) for a in above[-2:]):
            yield "constant", str(value + 1)
            if value > 0:
                yield "constant", str(value - 1)
    elif isinstance(value, float):
        yield "constant", repr(2 * value if value else 1.0)
        if value:
            yield "constant", repr(0.5 * value)


def _indices(index: ast.expr) -> Iterator[str]:
    """Yield other indices: one further, one back, a slice without one of its bounds."""
    match index:
        case ast.Constant(int(i)) if not isinstance(i, bool):
            yield str(i + 1) if i >= 0 else str(i - 1)
        case ast.UnaryOp(ast.USub(), ast.Constant(int(i))):
            yield f"-{i + 1}"
        case ast.Name(name):
            yield f"{name} - 1"
        case ast.Slice(lower, upper, step) if step is None:
            if lower is not None:
                yield ast.unparse(ast.Slice(None, upper))
                yield ast.unparse(ast.Slice(ast.BinOp(lower, ast.Add(), ast.Constant(1)), upper))
            if upper is not None:
                yield ast.unparse(ast.Slice(lower, None))
                yield ast.unparse(ast.Slice(lower, ast.BinOp(upper, ast.Sub(), ast.Constant(1))))


def _calls(node: ast.Call) -> Iterator[tuple[str, str]]:
    name, args = _called(node), node.args
    for i in range(len(args) - 1):
        pair = args[i : i + 2]
        if not any(isinstance(a, ast.Starred) for a in pair) and ast.dump(pair[0]) != ast.dump(pair[1]):
            yield "arguments", ast.unparse(ast.Call(node.func, [*args[:i], *pair[::-1], *args[i + 2 :]], node.keywords))
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if owner is not None and name == "detach":
        yield "detach", _text(owner)
    if owner is not None and name in ("train", "eval") and not args:
        yield "mode", f"{ast.unparse(owner)}.{'eval' if name == 'train' else 'train'}()"
    if owner is not None and name in ("no_grad", "inference_mode"):
        yield "detach", f"{ast.unparse(owner)}.enable_grad()"
    if name in SAME_SHAPE and owner is not None:
        library = isinstance(owner, ast.Name) and owner.id in ("torch", "F", "copy", "np")
        kept = args[0] if library and args else None if library else owner
        if kept is not None:
            yield "dropped-call", _text(kept)


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def _text(node: ast.expr) -> str:
    """Return the expression's source, in parentheses where needed."""
    plain = ast.unparse(node)
    atoms = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
    return plain if isinstance(node, atoms) else f"({plain})"


def _mutant(file: Path, source: str, part: str, kind: str, node: ast.AST, new: str) -> Mutant:
    lines = source.encode().splitlines(keepends=True)
    start, end = (sum(map(len, lines[: row - 1])) + col for row, col in
                  ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)))  # fmt: skip
    old = source.encode()[start:end].decode()
    return Mutant(file, part, kind, node.lineno, node.end_lineno, old, new, start, end)


def _meaning(code: CodeType) -> tuple:
    """Return the code without line numbers, with that of everything inside it."""
    consts = tuple(_meaning(c) if isinstance(c, CodeType) else (type(c), repr(c)) for c in code.co_consts)
    return code.co_code, consts, code.co_names, code.co_varnames, code.co_freevars, code.co_exceptiontable
