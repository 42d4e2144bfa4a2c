"""Parts of `python tests/benchmarks/gpu.py`."""
