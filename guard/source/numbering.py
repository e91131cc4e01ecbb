"""Finds classes and tokens whose numbers depend on what is numbered (a list in two orders, each batch, each split), and rows that a function for
batches or another order exchanges."""

import ast
from collections.abc import Iterator

from trainworthy.core.base.names import words
from trainworthy.core.base.verdict import Fault
from trainworthy.guard.source.assignments import assigned, loaded, named
from trainworthy.guard.source.calls import is_call, methods, owner, passed
from trainworthy.guard.source.nodes import LABELS, Function, inside, only, tail, variable
from trainworthy.guard.source.reading import Source
from trainworthy.guard.source.splits import HELD_OUT, split_of

VOCABULARIES = {
    "tokenizer", "vocab", "vocabulary", "stoi", "itos", "lexicon", "word2idx", "char2idx", "token2id", "w2i",
    "encoder", "codes",
}  # fmt: skip
SAMPLES = {
    "audio", "features", "image", "images", "input", "inputs", "pixel", "sentence", "sentences", "text", "texts",
    "video", "waveform", "x",
}  # fmt: skip
EPISODES = {"episode", "episodes", "episodic", "fewshot", "shot", "shots", "support", "prototypes"}
READY = {"load", "loads", "from", "pretrained", "read", "open", "copy", "deepcopy"}
"""Words of functions that make no new numbers."""


def two_orders(source: Source) -> Fault | None:
    """Find `dict(enumerate(NAMES))` beside `dict(enumerate(sorted(NAMES)))` of a list that is in no order."""
    lists = {name: value for _, n in source.of(ast.Assign) for name, _, value in named([n]) if unordered(value)}
    found: dict[str, dict[bool, int]] = {}
    for file, node in source.of(ast.Call, ast.DictComp):
        listed = numbered(node)
        whole = is_call(listed, "sorted") and isinstance(listed, ast.Call) and bool(listed.args)
        name = variable(listed.args[0] if whole and isinstance(listed, ast.Call) else listed)
        if name in lists:
            lines = found.setdefault(name, {})
            lines.setdefault(whole, node.lineno)
            if len(lines) == 2:
                return (
                    f"line {lines[False]} of {file} numbers `{name}` in its own order, line {lines[True]} in alphabetical order",
                    "the same number means two classes: make one table of names and numbers, and invert it for the other direction",
                )
    return None


def unordered(value: ast.AST) -> bool:
    """Return whether a value is a list of texts that is written down, and not in alphabetical order."""
    match value:
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            texts = [getattr(e, "value", None) for e in entries]
            return len(texts) > 1 and all(isinstance(t, str) for t in texts) and texts != sorted(map(str, texts))
    return False


def numbered(node: ast.AST) -> ast.expr | None:
    """Return what `dict(enumerate(x))` or `{name: i for i, name in enumerate(x)}` numbers."""
    match node:
        case ast.Call(func=ast.Name(id="dict"), args=[ast.Call(func=ast.Name(id="enumerate"), args=[given])]):
            return given
        case ast.DictComp(generators=[ast.comprehension(iter=ast.Call(func=ast.Name(id="enumerate"), args=[given]))]):
            return given
    return None


def each_batch(source: Source) -> Fault | None:
    """Find a function for batches (`map(batched=True)`, `with_transform`, `collate_fn`) that numbers the classes of its batch. Episodes of few-shot
    learning have numbers of their own."""
    if EPISODES & {w for name in source.known for w in words(name)}:
        return None
    for file, _, function in of_batches(source):
        for key, value in labelled(function):
            made = next((n for n in ast.walk(value) if makes_numbers(n)), None)
            if made is not None:
                return (
                    f"line {made.lineno} of {file} makes `{key}` by `{ast.unparse(made)[:80]}`, anew in each batch",
                    "where a batch lacks a class, the numbers of the others move: number the classes once, over all rows of training",
                )
    return None


def of_batches(source: Source) -> Iterator[tuple[str, ast.Call, Function | ast.Lambda]]:
    """Yield (file, call, function) of the script's functions that are called with batches, and where they are passed on."""
    functions = {f.name: (file, f) for file, f in source.functions}
    for file, call in source.of(ast.Call):
        keys = {k.arg: k.value for k in call.keywords}
        given = [keys["collate_fn"]] if "collate_fn" in keys else []
        match call:
            case ast.Call(func=ast.Attribute(attr="map"), args=[first, *_]):
                given += [first] * bool(getattr(keys.get("batched"), "value", None))
            case ast.Call(func=ast.Attribute(attr="with_transform" | "set_transform"), args=[first, *_]):
                given.append(first)
        for one in given:
            if isinstance(one, ast.Lambda):
                yield file, call, one
            elif variable(one) in functions:
                where, function = functions[variable(one)]
                yield where, call, function


def labelled(function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, value) of the labels that a function makes."""
    for node in ast.walk(function):
        pairs: list[tuple[ast.expr | None, ast.expr]] = []
        match node:
            case ast.Dict(keys=keys, values=values):
                pairs = list(zip(keys, values, strict=True))
            case ast.Assign(targets=[ast.Subscript(slice=key)], value=value):
                pairs = [(key, value)]
            case ast.Assign(targets=[ast.Name() as target], value=value):
                pairs = [(target, value)]
        for key, value in pairs:
            text = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else variable(key)
            if set(words(text)) & (LABELS | {"label", "target"}):
                yield text, value


def makes_numbers(node: ast.AST) -> bool:
    """Return whether an expression numbers the different values that it gets."""
    match node:
        case ast.Call(func=func) if tail(func) == "unique":
            return any(k.arg == "return_inverse" and getattr(k.value, "value", None) is True for k in node.keywords)
        case ast.Call(func=func) if tail(func) in ("factorize", "Categorical", "get_dummies"):
            return True
        case ast.Call(func=ast.Attribute(attr="fit_transform", value=made)):
            return is_call(made, "LabelEncoder", "OrdinalEncoder", "LabelBinarizer")
        case ast.Call(func=ast.Name(id="enumerate"), args=[given]):
            return any(is_call(n, "set") for n in ast.walk(given))
    return False


def each_split(source: Source) -> Fault | None:
    """Find `tokenizer = build(train)`, later `tokenizer = build(test)`: the same numbers are other tokens."""
    for file, scope in source.plain_scopes:
        first: dict[tuple[str, str], int] = {}
        for line in sorted(only(inside(scope), ast.Assign), key=lambda n: n.lineno):
            for target, value in assigned(line):
                name = variable(target)
                if not isinstance(value, ast.Call) or not vocabulary(name, tail(value.func)):
                    continue
                of = {split_of(text) for given in passed(value) for text in texts_in(given)} - {""}
                key = (name, ast.unparse(value.func))
                if of == {"train"}:
                    first.setdefault(key, line.lineno)
                elif of and of <= HELD_OUT and key in first:
                    return (
                        f"line {line.lineno} of {file} makes `{name}` anew, of the {min(of)} split; line {first[key]} made it of training's",
                        "the model gets other numbers for the same words than in training: keep the one of the training split",
                    )
    return None


def vocabulary(name: str, function: str) -> bool:
    """Return whether a name is one of a table of tokens or codes, and the function makes a new one."""
    return bool(set(words(name)) & VOCABULARIES) and not set(words(function)) & READY


def texts_in(node: ast.AST) -> set[str]:
    """Return the names and the texts in an expression: `raw` and `test` of `raw["test"]`."""
    texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return loaded(node) | texts | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def reordered(source: Source) -> Fault | None:
    """Find `features = rows.map(f)`, then `rows = rows.shuffle()`, and a loop that joins `rows` and `features` by their places."""
    for file, scope in source.plain_scopes:
        nodes = [n for n in inside(scope) if hasattr(n, "lineno")]
        made: dict[str, tuple[str, int]] = {}  # features -> rows, line
        moved: dict[str, int] = {}  # rows -> line that puts them into another order
        for node in sorted(nodes, key=lambda n: (n.lineno, n.col_offset)):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    base = next(filter(None, map(owner, methods(ast.walk(value), "map"))), "")
                    again = next(filter(None, map(owner, methods(ast.walk(value), "shuffle", "sort", "sample"))), "")
                    made.pop(name, None), moved.pop(name, None)
                    if base and base != name:
                        made[name] = base, node.lineno
                    if again == name:
                        moved[name] = node.lineno
                    elif base == name:
                        made = {k: v for k, v in made.items() if v[0] != name}
                case (
                    ast.For(iter=walked)
                    | ast.ListComp(generators=[ast.comprehension(iter=walked), *_])
                    | ast.GeneratorExp(generators=[ast.comprehension(iter=walked), *_])
                ):
                    for features, (rows, at) in made.items():
                        if moved.get(rows, 0) > at and joined_by_place(node, walked, rows, features):
                            return (
                                f"line {moved[rows]} of {file} puts `{rows}` into another order; `{features}` of line {at} keeps the old one, and "
                                f"line {walked.lineno} joins both by their places",
                                "each row is joined with the features of another one: shuffle before the features are made",
                            )
    return None


def joined_by_place(loop: ast.AST, walked: ast.expr, rows: str, features: str) -> bool:
    """Return whether a loop walks over rows, and reads features at their places: `zip(rows, features)`, `features[i]` with `enumerate(rows)`."""
    match walked:
        case ast.Call(func=ast.Name(id="zip"), args=given):
            return {rows, features} <= {variable(g) for g in given}
        case ast.Call(func=ast.Name(id="enumerate"), args=[ast.Name(id=name), *_]) if name == rows:
            return any(isinstance(n, ast.Subscript) and variable(n.value) == features for n in ast.walk(loop))
    return False


def first_row(source: Source) -> Fault | None:
    """Find a function for batches that reads the inputs of the first row alone: `batch["image"][0]`."""
    for file, call, function in of_batches(source):
        alone = any(k.arg == "batch_size" and getattr(k.value, "value", None) == 1 for k in call.keywords)
        own = function.args.args[-1].arg if function.args.args else ""
        if not own or alone or isinstance(function, ast.Lambda):
            continue
        nodes = list(ast.walk(function))
        columns = [n for n in only(nodes, ast.Subscript) if variable(n.value) == own and isinstance(n.ctx, ast.Load)]
        firsts = {id(n.value): n for n in only(nodes, ast.Subscript) if getattr(n.slice, "value", None) == 0}
        idle = {id(n.args[0]) for n in only(nodes, ast.Call) if is_call(n, "len", "range") and n.args}
        idle |= {
            id(n.iter) for n in nodes if isinstance(n, (ast.For, ast.comprehension)) and variable(n.target)[:1] == "_"
        }
        for column in columns:
            key = getattr(column.slice, "value", None)
            uses = [n for n in columns if ast.unparse(n) == ast.unparse(column)]
            read = [n for n in uses if id(n) not in idle]
            if isinstance(key, str) and set(words(key)) & SAMPLES and read and all(id(n) in firsts for n in read):
                return (
                    f"line {read[0].lineno} of {file} reads `{ast.unparse(firsts[id(read[0])])}`, and nothing in {function.name}() reads the other "
                    "rows",
                    "the function gets a batch, and all of its rows get the input of the first: loop over the rows",
                )
    return None
