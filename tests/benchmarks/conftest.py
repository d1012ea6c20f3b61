"""What pytest-benchmark's console lacks: how even the times were, and the figures of `extra_info`
as columns (efficiency of each component, bandwidth, shares of the peaks).
"""

from numflash.measure.console import Table
from numflash.measure.timing import DISTURBED, LARGEST_SPREAD

PERCENT, GIGA, PLAIN = "{:.1%}", "{:.2f}", "{:.2f}"
COLUMNS = {  # key of extra_info -> column, form, unit
    "gops": ("GOP/s", "{:.1f}", 1),
    "share_of_int8_peak": ("of INT8 peak", PERCENT, 1),
    "share_of_fma_peak": ("of FMA peak", PERCENT, 1),
    "effective_bandwidth": ("GB/s", GIGA, 1e-9),
    "read_bandwidth": ("GB/s, measured read", GIGA, 1e-9),
    "scores_efficiency": ("Q.K^T of peak", PERCENT, 1),
    "softmax_elements_per_second": ("softmax G/s", PLAIN, 1e-9),
    "values_efficiency": ("P.V of peak", PERCENT, 1),
    "gemm_share_of_peak": ("product of peak", PERCENT, 1),
    "gemm_in_l2_share_of_peak": ("product in L2", PERCENT, 1),
    "double_buffered_share_of_peak": ("two buffers", PERCENT, 1),
    "softmax_share": ("softmax of time", PERCENT, 1),
    "cycles_per_element": ("cycles a score", PLAIN, 1),
    "relative_l1": ("relative L1", "{:.1e}", 1),
}


def table(group, benchmarks):
    """The figures of one group of benchmarks; None where it has none."""
    known = [key for key in COLUMNS if any(key in b["extra_info"] for b in benchmarks)]
    if not known:
        return None
    names = [COLUMNS[key][0] for key in known]
    found = Table(f"{group or 'benchmarks'}: figures", ("name", "ms", "spread", *names))
    for b in benchmarks:
        spread = b["median"] / b["min"] - 1
        cells = []
        for key in known:
            _, form, unit = COLUMNS[key]
            cells.append(form.format(b["extra_info"][key] * unit) if key in b["extra_info"] else "")
        mark = f" {DISTURBED}" if spread > LARGEST_SPREAD else ""
        found.add(b["name"], f"{1e3 * b['median']:.3f}", f"{spread:.0%}{mark}", *cells)
    return found


def pytest_terminal_summary(terminalreporter):
    session = getattr(terminalreporter.config, "_benchmarksession", None)
    for group, benchmarks in getattr(session, "groups", None) or ():
        found = table(group, benchmarks)
        if found:
            terminalreporter.write_line("")
            for line in found.plain().splitlines():
                terminalreporter.write_line(line)
