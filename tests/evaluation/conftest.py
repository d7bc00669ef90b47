"""Modules of the examples can be imported as the scripts import them."""

import sys
from pathlib import Path

# At the end: lm-eval imports a package called evaluate, which examples/evaluate.py must not hide.
sys.path.append(str(Path(__file__).parents[2] / "examples"))
