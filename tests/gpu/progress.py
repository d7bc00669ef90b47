"""A plugin of pytest for `.ci/gpu`, where a run may be cut: what a failed test says is printed when
the test ends, and at the end the tests that were not reached.
"""

from typing import Any

collected: list[str] = []
ended: set[str] = set()


def pytest_collection_finish(session: Any) -> None:
    collected.extend(item.nodeid for item in session.items)


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "teardown":
        ended.add(report.nodeid)
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        message = str(report.longrepr) if crash is None else crash.message
        print("\n   ", " ".join(message.split())[:400], flush=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    missing = [test for test in collected if test not in ended]
    terminalreporter.write_line(f"{len(collected)} tests, of which {len(missing)} did not end")
    for test in missing:
        terminalreporter.write_line(f"    not reached: {test}")
