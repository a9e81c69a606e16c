"""Passes that split tasks further: gradients of parameters apart, and the tasks that the user names."""

from distgraph.passes.task_splitting import split_backward, split_user_tasks

__all__ = ["split_backward", "split_user_tasks"]
