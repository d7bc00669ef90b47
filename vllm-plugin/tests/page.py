"""Run the commands of the page ``docs/guides/vllm.md`` as they stand there: ``page.py FOLDER``.

FOLDER is the home of whoever reads the page, with the environment ``~/vllm``. Runs where deqseq is
installed with its extra hf.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "vllm.md"
WAIT = 900
"""Seconds for the server to start."""


def blocks(language: str) -> list[str]:
    """The code of the page that a reader copies."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def answers() -> bool:
    """Whether the server is there."""
    try:
        return urlopen("http://127.0.0.1:8000/health").status == 200
    except OSError:
        return False


def main(home: Path) -> None:
    """Save, serve and ask; SystemExit with the server's log if there is no answer."""
    where = {"cwd": home, "env": os.environ | {"HOME": str(home)}}
    (save,) = blocks("python")
    *_, serve, ask = blocks("bash")
    subprocess.run([sys.executable, "-c", save], check=True, **where)
    with (home / "log").open("w") as log:
        # a session of its own, so that all processes of the server end
        server = subprocess.Popen(
            ["bash", "-c", serve], stdout=log, stderr=log, start_new_session=True, **where
        )
    try:
        started = time.monotonic()
        while not answers():
            if server.poll() is not None or time.monotonic() - started > WAIT:
                raise SystemExit(f"no server: {(home / 'log').read_text()[-3000:]}")
            time.sleep(1)
        answer = subprocess.run(["bash", "-c", ask], check=True, capture_output=True, **where)
        usage = json.loads(answer.stdout)["usage"]
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
    lines = (home / "log").read_text().splitlines()
    (line,) = [line for line in lines if "iterations each" in line]
    print(f"the page's server answered with {usage['completion_tokens']} tokens: {line}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
