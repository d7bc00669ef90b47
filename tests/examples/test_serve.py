import sys

import pytest
import serve


def test_a_server_that_cannot_start_is_an_error():
    with pytest.raises(SystemExit, match="the server ended:"):
        serve.main(["--python", sys.executable])  # this environment has no vLLM
