"""Problems, rewards and data sets. A task is named by import path, e.g. `epilora.tasks.arithmetic:Addition`."""

from .base import Problem, RewardError, Task, assert_disjoint, checked_score, load_object, load_task, split_of

__all__ = ["Problem", "RewardError", "Task", "assert_disjoint", "checked_score", "load_object", "load_task", "split_of"]
