"""Which slots of a cache a query row attends to.

Up to three runs of them, because a ring starts over.
"""

from __future__ import annotations

from ...jit.compiler import bare


@bare
def row_edges(position, window, sinks, ring, edges):
    """Slots that a query at `position` attends to: [0, e0), [e1, e2) and [e3, e4), in this order.

    Tokens below `sinks` have slots of their own, the others share a ring of `ring` slots after
    them.
    """
    stop = position + 1
    first = max(sinks, stop - window)
    edges[0] = max(0, min(sinks, stop))
    if stop <= first:
        edges[1], edges[2], edges[3], edges[4] = sinks, sinks, sinks, sinks
        return
    a = sinks + (first - sinks) % ring
    end = a + stop - first
    if end <= sinks + ring:
        edges[1], edges[2], edges[3], edges[4] = a, end, end, end
    else:
        edges[1], edges[2], edges[3], edges[4] = sinks, end - ring, a, sinks + ring


@bare
def coverage(edges, first, n):
    """(any slot seen, all seen) of slots first .. first + n."""
    stop = first + n
    some = (
        first < edges[0]
        or (first < edges[2] and stop > edges[1])
        or (first < edges[4] and stop > edges[3])
    )
    every = (
        stop <= edges[0]
        or (first >= edges[1] and stop <= edges[2])
        or (first >= edges[3] and stop <= edges[4])
    )
    return some, every


@bare
def hide(edges, first, n, t, value):
    """t[j] = value for the slots of first .. first + n that are not seen."""
    a, z = max(0, edges[0] - first), min(n, edges[1] - first)
    if a < z:
        t[a:z] = value
    a, z = max(0, edges[2] - first), min(n, edges[3] - first)
    if a < z:
        t[a:z] = value
    a = max(0, edges[4] - first)
    if a < n:
        t[a:n] = value


@bare
def sees_bad(edges, first, scales):
    """Whether a slot that is seen holds a token that was not finite."""
    for j in range(scales.size):  # noqa: SIM110
        if scales[j] != scales[j] and coverage(edges, first + j, 1)[0]:
            return True
    return False
