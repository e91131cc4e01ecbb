"""Walks over autograd's graph."""

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any


def nodes(
    *roots: Any, most: float = float("inf"), only: Collection[str] | None = None, nearest: bool = False
) -> Iterator[Any]:
    """Yield each node of the graph from the roots on, once; of operations not in `only`, neither they nor what is beyond them. `nearest`: in
    the order of their distance."""
    todo, done = deque(roots), set()
    while todo and len(done) < most:
        node = todo.popleft() if nearest else todo.pop()
        if node is None or node in done or (only is not None and node.name() not in only):
            continue
        done.add(node)
        yield node
        todo.extend(n for n, _ in node.next_functions)


def beyond(node: Any, operations: Collection[str]) -> Any:
    """Return the first node that is none of these operations, of which the first input counts."""
    while node is not None and node.name() in operations:
        node = node.next_functions[0][0] if node.next_functions else None
    return node
