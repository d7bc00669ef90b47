"""Modules that cannot be imported without their extra are left out where it is not installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("lm_eval") else ["deqseq/integrations/lm_eval.py"]
