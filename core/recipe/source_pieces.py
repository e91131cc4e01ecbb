"""Assigns the code of a recipe's file to parts of its stage, by names in the source, without running it.

A part is a field of `Stage` (`data`, `model`, `loss`, ...) or `train`, the loop. A piece (a class, a function, an
assignment) belongs to the part from which the fewest names lead to it: `Stage(data={"train": train_data})`, `train_data
= Images(...)`, `class Images`. Pieces that build the data belong to the data, even if a model that is fitted to them
also uses them.
"""

import ast
import re
from collections import deque
from dataclasses import dataclass, field

from trainworthy.core.recipe.stage import PARTS

UPSTREAM = ("data", "model")  # a piece shared with other parts belongs to these
SETTINGS = ("Config", "tiny", "full")  # diff compares these by value
OF_GROUP = {"train": ("train",), "optim": ("optimizers", "train"), "loader": ("data",), "run": (), "gates": (), "track": (),
            "init_from": ("model",), "trust_pickle": ()}  # fmt: skip
"""Parts that read a setting which every recipe has, by the setting's group."""
OF_TRAINER = ("loss", "model", "optimizers", "counts")  # what a hosted trainer brings: hosted.host(trainer, run, ...)
# And what its stage has beyond a Stage
OF_HOSTED = {"ask": "data", "passes": "train", "evaluate_while_training": "evaluate"}


@dataclass
class Piece:
    """One named piece of a recipe."""

    key: str
    scope: str
    """Name of the enclosing function, or ""."""
    root: str
    """The part that this piece itself is, or ""."""
    also: tuple[str, ...] = ()
    """Further parts that it is, with less right to it."""
    nodes: list[ast.AST] = field(default_factory=list)
    """Syntax nodes; several if a name is set several times."""
    text: str = ""
    """Its source text."""
    gives: set[str] = field(default_factory=set)
    """Names that it defines."""
    takes: set[str] = field(default_factory=set)
    """Names that it reads."""
    parts: tuple[str, ...] = PARTS
    """Parts that the piece may change: the nearest ones and those one name further away; every part if unknown."""
    home: tuple[str, ...] = ()
    """The nearest part. A piece that several parts share belongs to the one upstream. Empty if unknown."""

    @property
    def line(self) -> int:
        """Its first line."""
        return _first_line(self.nodes[0])

    @property
    def meaning(self) -> str:
        """Its syntax without comments, docstrings and layout."""
        return "\n".join(map(_meaning, self.nodes))

    @property
    def settings(self) -> set[str]:
        """First names of the settings that it reads: `widths` for `cfg.widths`."""
        inside = (n for node in self.nodes for n in ast.walk(node) if isinstance(n, ast.Attribute))
        return {n.attr for n in inside if isinstance(n.value, ast.Name) and n.value.id == "cfg"}


def pieces(source: str) -> dict[str, Piece]:
    """Return {key: piece} of a recipe's source, in source order. Raises SyntaxError."""
    tree, lines, found = ast.parse(source), source.splitlines(), {}
    stages = [n for s in tree.body if "STAGES" in _targets(s) for n in ast.walk(s) if isinstance(n, ast.Name)]
    listed = {n.id for n in stages}

    def add(node: ast.AST, key: str, scope: str = "", root: str = "", also: tuple[str, ...] = ()) -> None:
        piece = found.setdefault(key, Piece(key, scope, root, also))
        piece.nodes.append(node)
        piece.text += "\n".join([*lines[_first_line(node) - 1 : node.end_lineno], ""])
        names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
        inner = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        stores = {n.id for n in names if isinstance(n.ctx, ast.Store)}
        piece.takes |= (
            {n.id for n in names if isinstance(n.ctx, ast.Load)} - inner - (stores if _is_def(node) else set())
        )
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            piece.gives |= {(a.asname or a.name).split(".")[0] for a in node.names}
        else:
            piece.gives |= {node.name} if _is_def(node) else stores

    makers = [n.name for n in tree.body if isinstance(n, ast.FunctionDef) and _stage_call(n)]
    for name in stages:
        name.id = "stage" if name.id in makers[:1] else name.id  # a fork may use another name
    for node in _statements(tree.body):
        if isinstance(node, ast.FunctionDef) and node.name in (*listed, *makers):
            scope = "stage" if node.name in makers[:1] else node.name
            for inner in _statements(node.body):
                call = None if _is_def(inner) else _stage_call(inner)
                if call:
                    if _is_hosted(call) and call.args:
                        add(call.args[0], f"{scope}: trainer=", scope, OF_TRAINER[0], OF_TRAINER[1:])
                    for word in call.keywords:
                        arg = word.arg or ""  # the keys of **more are unknown
                        part = OF_HOSTED.get(arg, arg) if _is_hosted(call) else arg
                        add(word if arg else word.value, f"{scope}: {arg or '**'}=", scope, part)
                elif not (isinstance(inner, ast.Return) and isinstance(inner.value, ast.Name)):
                    set_field = re.match(r"\w+\.(\w+)", " ".join(_targets(inner)))  # stage.loss = ...
                    root = set_field[1] if set_field and set_field[1] in PARTS else ""
                    add(inner, f"{scope}: {_name(inner)}", scope, root)
        elif not (_is_def(node) and node.name in SETTINGS):
            add(node, _name(node), root="train" if _name(node) == "train" else "")
    _place(list(found.values()))
    return found


def _place(every: list[Piece]) -> None:
    """Fill `parts` and `home` from the number of names between each part's root and a piece."""
    makers: dict[tuple[str, str], list[Piece]] = {}
    for piece in every:
        for name in piece.gives:
            makers.setdefault((piece.scope, name), []).append(piece)
    for piece in every:  # nn.init.zeros_(model.head.weight): code that changes an object belongs to it
        if not piece.gives and not piece.root and not isinstance(piece.nodes[0], ast.Return):
            for name in piece.takes:
                owners = makers.get((piece.scope, name), [])
                if owners and not isinstance(owners[0].nodes[0], (ast.Import, ast.ImportFrom)):
                    owners.append(piece)
    steps: dict[str, dict[str, int]] = {piece.key: {} for piece in every}
    for part in PARTS:
        waiting = deque((piece, 0) for piece in every if piece.root == part)
        waiting += ((piece, 1) for piece in every if part in piece.also)
        while waiting:
            piece, n = waiting.popleft()
            if part not in steps[piece.key]:
                steps[piece.key][part] = n
                for name in piece.takes:
                    waiting += ((p, n + 1) for p in makers.get((piece.scope, name)) or makers.get(("", name), []))
    for piece in every:
        found = {piece.root: 0, **dict.fromkeys(piece.also, 1)} if piece.root else steps[piece.key]
        if found:
            piece.parts = tuple(part for part, n in found.items() if n <= min(found.values()) + 1)
            nearest = tuple(part for part, n in found.items() if n == min(found.values()))
            shared = len(nearest) > 1 and next((part for part in UPSTREAM if part in piece.parts), None)
            piece.home = (shared,) if shared else nearest


def expectations(every: dict[str, Piece]) -> dict[str, str]:
    """Return {field of Expect: the expression that sets it}."""
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
    """Return the statements without bare strings."""
    return [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]


def _stage_call(node: ast.AST) -> ast.Call | None:
    """Return the call that makes a stage, or None."""
    calls = (n for n in ast.walk(node) if isinstance(n, ast.Call))
    return next((c for c in calls if re.search(r"(^|\.)Stage$", ast.unparse(c.func)) or _is_hosted(c)), None)


def _is_hosted(call: ast.Call) -> bool:
    """Return whether the call makes the stage of a trainer of transformers or TRL."""
    return ast.unparse(call.func) == "hosted.host"


def _is_def(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.ClassDef))


def _targets(node: ast.AST) -> list[str]:
    """Return the targets of an assignment, as written."""
    if isinstance(node, ast.Assign):
        return [ast.unparse(t) for t in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def _name(node: ast.stmt) -> str:
    return node.name if _is_def(node) else ", ".join(_targets(node)) or ast.unparse(node).splitlines()[0]


def _first_line(node: ast.AST) -> int:
    return min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
