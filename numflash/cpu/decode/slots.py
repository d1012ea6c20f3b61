"""Which slots of a cache a query row attends to.

Up to three runs of them, because a ring starts over.
"""

from __future__ import annotations

from ...jit.compiler import bare

# columns of a row's `edges`: it attends to the slots [0, SINKS_END), [FIRST, STOP) and
# [SECOND, SECOND_STOP), in this order; the last run is that behind the end of the ring
SINKS_END, FIRST, STOP, SECOND, SECOND_STOP = range(5)


@bare
def row_edges(position, window, sinks, ring, edges):
    """Write the slots that a query at `position` attends to into `edges` (5,).

    Tokens below `sinks` have slots of their own, the others share a ring of `ring` slots after
    them.
    """
    stop = position + 1
    first = max(sinks, stop - window)
    edges[SINKS_END] = max(0, min(sinks, stop))
    if stop <= first:
        edges[FIRST], edges[STOP], edges[SECOND], edges[SECOND_STOP] = sinks, sinks, sinks, sinks
        return
    a = sinks + (first - sinks) % ring
    end = a + stop - first
    if end <= sinks + ring:
        edges[FIRST], edges[STOP], edges[SECOND], edges[SECOND_STOP] = a, end, end, end
    else:
        edges[FIRST], edges[STOP], edges[SECOND], edges[SECOND_STOP] = (
            sinks,
            end - ring,
            a,
            sinks + ring,
        )


@bare
def coverage(edges, first, n):
    """(any slot seen, all seen) of slots first .. first + n."""
    stop = first + n
    some = (
        first < edges[SINKS_END]
        or (first < edges[STOP] and stop > edges[FIRST])
        or (first < edges[SECOND_STOP] and stop > edges[SECOND])
    )
    every = (
        stop <= edges[SINKS_END]
        or (first >= edges[FIRST] and stop <= edges[STOP])
        or (first >= edges[SECOND] and stop <= edges[SECOND_STOP])
    )
    return some, every


@bare
def hide(edges, first, n, t, value):
    """t[j] = value for the slots of first .. first + n that are not seen."""
    begin, end = max(0, edges[SINKS_END] - first), min(n, edges[FIRST] - first)
    if begin < end:
        t[begin:end] = value
    begin, end = max(0, edges[STOP] - first), min(n, edges[SECOND] - first)
    if begin < end:
        t[begin:end] = value
    begin = max(0, edges[SECOND_STOP] - first)
    if begin < n:
        t[begin:n] = value


@bare
def sees_bad(edges, first, scales):
    """Whether a slot that is seen holds a token that was not finite."""
    for j in range(scales.size):  # noqa: SIM110
        if scales[j] != scales[j] and coverage(edges, first + j, 1)[0]:
            return True
    return False
