"""Baselines of a search (`baselines.py`), those of data parallelism with ZeRO in `data_parallel_zero.py`."""
