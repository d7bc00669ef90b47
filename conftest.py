"""For all tests: one thread a process where several share the cores; modules whose extra is missing are left out."""

import os
from importlib.util import find_spec

import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that a test starts
    torch.set_num_threads(1)

collect_ignore = [] if find_spec("lm_eval") else ["deqseq/integrations/lm_eval.py"]
