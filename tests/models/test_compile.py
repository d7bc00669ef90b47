"""``model.compile()``: in a process of its own, because the tests' checks of shapes would break the
graph.
"""

from pathlib import Path

import pytest
from processes import output_of

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "scripts" / "compiled_models.py"


@pytest.mark.parametrize("name", ["Mamba2", "Llama", "Mamba2 in several chunks", "Looped"])
def test_compiled_models_compute_the_same_and_compile_once_a_kind_of_call(name):
    assert name in output_of(SCRIPT, name, timeout=1200)
