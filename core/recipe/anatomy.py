"""What of a recipe's file belongs to which part of its stage: read from the source, by names, without running it.

A part is a field of `Stage` (`data`, `model`, `loss`, ...) or `train`, the loop. A piece (a class, a function, an assignment)
belongs to the part from which it is reached over the fewest names: `Stage(data={"train": train_data})`, `train_data = Images(...)`,
`class Images`. What the data are made of is theirs, although a model that is fitted to them reaches it, too.
"""

import ast
import re
from collections import deque
from dataclasses import dataclass, field

from trainworthy.core.recipe.stage import PARTS

UPSTREAM = ("data", "model")  # what these are made of, others only use
SETTINGS = ("Config", "tiny", "full")  # compared by their values
OF_GROUP = {"train": ("train",), "optim": ("optimizers", "train"), "loader": ("data",), "run": (), "gates": (), "track": (),
            "init_from": ("model",), "trust_pickle": ()}  # fmt: skip
"""Parts that read a setting which every recipe has, by the first name of the setting."""


@dataclass
class Piece:
    """One named piece of a recipe."""

    key: str
    scope: str
    """The function it stands in, or ""."""
    root: str
    """The part that it is by itself, or ""."""
    nodes: list[ast.AST] = field(default_factory=list)
    """Several where a name is set several times."""
    text: str = ""
    """As it stands in the file."""
    gives: set[str] = field(default_factory=set)
    """Names it defines."""
    takes: set[str] = field(default_factory=set)
    """Names it reads."""
    parts: tuple[str, ...] = PARTS
    """Those it may change: the nearest and those one name further; every part if that cannot be told."""
    home: tuple[str, ...] = ()
    """Where it belongs: the nearest; what several share is upstream's. Empty if that cannot be told."""

    @property
    def line(self) -> int:
        """Where it begins."""
        return _first_line(self.nodes[0])

    @property
    def meaning(self) -> str:
        """Its syntax without comments, docstrings and layout."""
        return "\n".join(map(_meaning, self.nodes))

    @property
    def settings(self) -> set[str]:
        """First names of the settings it reads: `widths` for `cfg.widths`."""
        inside = (n for node in self.nodes for n in ast.walk(node) if isinstance(n, ast.Attribute))
        return {n.attr for n in inside if isinstance(n.value, ast.Name) and n.value.id == "cfg"}


def pieces(source: str) -> dict[str, Piece]:
    """{key: piece} of a recipe's source, in its order. Raises SyntaxError."""
    tree, lines, found = ast.parse(source), source.splitlines(), {}
    listed = {n.id for s in tree.body if "STAGES" in _targets(s) for n in ast.walk(s) if isinstance(n, ast.Name)}

    def add(node: ast.AST, key: str, scope: str = "", root: str = "") -> None:
        piece = found.setdefault(key, Piece(key, scope, root))
        piece.nodes.append(node)
        piece.text += "\n".join([*lines[_first_line(node) - 1 : node.end_lineno], ""])
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        inner = {
            a.arg for n in ast.walk(node) if isinstance(n, (ast.FunctionDef, ast.Lambda)) for a in _arguments(n.args)
        }
        stores = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        piece.takes |= (
            {n.id for n in names if isinstance(n.ctx, ast.Load)} - inner - (stores if _is_def(node) else set())
        )
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            piece.gives |= {(a.asname or a.name).split(".")[0] for a in node.names}
        else:
            piece.gives |= {node.name} if _is_def(node) else stores

    makers = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and _stage_call(n)]
    for name in (n for s in tree.body if "STAGES" in _targets(s) for n in ast.walk(s) if isinstance(n, ast.Name)):
        name.id = "stage" if name.id in makers[:1] else name.id  # a fork may call it otherwise
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef) and node.name in (*listed, *makers):
            scope = "stage" if node.name in makers[:1] else node.name
            for inner in _statements(node.body):
                call = None if _is_def(inner) else _stage_call(inner)
                if call:
                    for word in call.keywords:
                        arg = word.arg or ""  # **more: what it sets is not seen from here
                        add(word if arg else word.value, f"{scope}: {arg or '**'}=", scope, arg)
                elif not (isinstance(inner, ast.Return) and isinstance(inner.value, ast.Name)):
                    set_field = re.match(r"\w+\.(\w+)", " ".join(_targets(inner)))  # stage.loss = ...
                    root = set_field[1] if set_field and set_field[1] in PARTS else ""
                    add(inner, f"{scope}: {_name(inner)}", scope, root)
        elif not (_is_def(node) and node.name in SETTINGS):
            add(node, _name(node), root="train" if _name(node) == "train" else "")
    _place(list(found.values()))
    return found


def _place(every: list[Piece]) -> None:
    """Fill `parts` and `home` by the number of names between each root and a piece."""
    makers: dict[tuple[str, str], list[Piece]] = {}
    for piece in every:
        for name in piece.gives:
            makers.setdefault((piece.scope, name), []).append(piece)
    for piece in every:  # nn.init.zeros_(model.head.weight), model.head = ...: what changes a thing belongs to it
        if not piece.gives and not piece.root and not _is_return(piece):
            for name in piece.takes:
                owners = makers.get((piece.scope, name), [])
                if owners and not isinstance(owners[0].nodes[0], (ast.Import, ast.ImportFrom)):
                    owners.append(piece)
    steps: dict[str, dict[str, int]] = {piece.key: {} for piece in every}
    for part in PARTS:
        waiting = deque((piece, 0) for piece in every if piece.root == part)
        while waiting:
            piece, n = waiting.popleft()
            if part not in steps[piece.key]:
                steps[piece.key][part] = n
                for name in piece.takes:
                    waiting += ((p, n + 1) for p in makers.get((piece.scope, name)) or makers.get(("", name), []))
    for piece in every:
        found = {piece.root: 0} if piece.root else steps[piece.key]
        if found:
            piece.parts = tuple(part for part, n in found.items() if n <= min(found.values()) + 1)
            nearest = tuple(part for part, n in found.items() if n == min(found.values()))
            shared = len(nearest) > 1 and next((part for part in UPSTREAM if part in piece.parts), None)
            piece.home = (shared,) if shared else nearest


def expectations(every: dict[str, Piece]) -> dict[str, str]:
    """{field of Expect: the expression it is set to}."""
    found = {}
    for node in (n for piece in every.values() for top in piece.nodes for n in ast.walk(top)):
        if isinstance(node, ast.Call) and re.search(r"(^|\.)Expect$", ast.unparse(node.func)):
            found |= {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}
        for target in _targets(node):
            if into := re.fullmatch(r"\w+\.expect\.(\w+)", target):
                found[into[1]] = ast.unparse(node.value)
    return found


def _meaning(node: ast.AST) -> str:
    copy = ast.parse(ast.unparse(node))
    for inner in ast.walk(copy):
        if isinstance(getattr(inner, "body", None), list):
            inner.body = _statements(inner.body)
    return ast.dump(copy)


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Without texts that stand alone."""
    return [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]


def _stage_call(node: ast.AST) -> ast.Call | None:
    """The call that makes a Stage, if there is one."""
    calls = (n for n in ast.walk(node) if isinstance(n, ast.Call))
    return next((c for c in calls if re.search(r"(^|\.)Stage$", ast.unparse(c.func))), None)


def _is_def(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.ClassDef))


def _is_return(piece: Piece) -> bool:
    return isinstance(piece.nodes[0], ast.Return)


def _targets(node: ast.AST) -> list[str]:
    """What an assignment assigns to, as written."""
    if isinstance(node, ast.Assign):
        return [ast.unparse(t) for t in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def _name(node: ast.stmt) -> str:
    return node.name if _is_def(node) else ", ".join(_targets(node)) or ast.unparse(node).splitlines()[0]


def _first_line(node: ast.AST) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])


def _arguments(n: ast.arguments) -> list[ast.arg]:
    return [*n.posonlyargs, *n.args, *n.kwonlyargs, *filter(None, (n.vararg, n.kwarg))]
