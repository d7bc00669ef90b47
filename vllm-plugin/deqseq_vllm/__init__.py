"""Models that deqseq has saved, served by vLLM; imported by vLLM through the entry point in
pyproject.toml.
"""
