"""The forecast of a step: seconds and bytes of memory of every rank, before anything runs."""
