"""Names of the cases of a test: parts of the library by their text, pages and images by their file,
options by their names.
"""

from pathlib import Path


def pytest_make_parametrize_id(val):
    match val:
        case Path():
            return val.stem
        case dict():
            return "+".join(map(str, val))
        case list():
            return str(val)
    is_ours = type(val).__module__.startswith("deqseq")
    return str(val) if is_ours and not callable(val) else None
