"""Python in a process of its own."""

import subprocess
import sys


def output_of(*command, **options):
    """What Python prints for these arguments; it must end well."""
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
