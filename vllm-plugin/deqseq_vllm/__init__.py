"""Models that deqseq has saved, served by vLLM, which finds this package by its entry point."""
