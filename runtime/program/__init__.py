"""Rank programs: tasks as generated Python source, and the memory of every value."""
