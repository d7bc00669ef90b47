"""Names of the cases of a test: solvers, sweeps and gradients by their text, pages and images by
their file, options by their names.
"""

from pathlib import Path

PARTS = ("deqseq.solvers", "deqseq.sweeps", "deqseq.gradients")


def pytest_make_parametrize_id(val):
    match val:
        case Path():
            return val.stem
        case dict():
            return "+".join(map(str, val))
        case list():
            return str(val)
    return str(val) if type(val).__module__.startswith(PARTS) else None
