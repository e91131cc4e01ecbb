"""Why an optimiser's steps have no gradient."""

from trainworthy.guard.measures.records import Group

SWEPT = 4  # steps, and backward() calls with gradients, at least


def swept(group: Group) -> bool:
    """Return whether no step of an optimiser had a gradient, although backward() gave its tensors some."""
    return group.steps >= SWEPT <= group.reached and group.empty >= group.steps


def without(group: Group, flat: bool) -> str:
    """Return the cause of steps without a gradient. `flat`: there were gradients of zero."""
    if not group.reached and not flat and not group.received and group.empty >= group.steps:
        return (
            "no loss depends on this optimiser's tensors: they are those of another model (a teacher, the one before)"
        )
    often = ""
    if flat and not swept(group):
        often = "factors of one product that all start at zero, or a mask that is always 0; or "
    return often + "zero_grad() is called between backward() and step(), or step() before backward()"
