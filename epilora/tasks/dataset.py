"""Questions from a file or the hub through `datasets`: JSONL, parquet, CSV, or a hub name, with named columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from epilora.loading import load_object

from .base import Problem, SplitQuestions, assert_disjoint, split_of

_LOADERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}


def exact_score(text: str, problem: Problem) -> float:
    """1.0 if the completion, without white space at its ends, is the answer."""
    return 1.0 if text.strip() == problem.answer.strip() else 0.0


def not_empty(text: str) -> bool:
    """Any text but white space."""
    return bool(text.strip())


class DatasetTask(SplitQuestions):
    """Rows of a data set as problems; `score` and `well_formed` come by import path.

    Rows with equal prompts must have equal answers and count once. The split is a hash of the prompt (`split_of`).
    """

    def __init__(
        self,
        source: str,
        *,
        prompt_column: str = "prompt",
        answer_column: str = "answer",
        id_column: str | None = None,
        subset: str | None = None,
        hub_split: str = "train",
        template: str = "{prompt}",
        score: str = "epilora.tasks.dataset:exact_score",
        well_formed: str = "epilora.tasks.dataset:not_empty",
        held_out_fraction: float = 0.1,
        limit: int = 0,
    ) -> None:
        """source: a .jsonl, .json, .parquet or .csv file, else a hub name (with `subset`, `hub_split`). limit: rows, 0
        all. held_out_fraction: 1 for an evaluation set, 0 to train on everything.

        Raises FileNotFoundError, ValueError naming missing columns and those there are, or if a split is empty.
        """
        rows = _load(source, subset, hub_split)
        wanted = [prompt_column, answer_column, *([id_column] if id_column else [])]
        missing = [column for column in wanted if column not in rows.column_names]
        if missing:
            raise ValueError(
                f"{source}: no columns {missing}; it has {rows.column_names}. Set prompt_column and answer_column"
            )
        if "{prompt}" not in template:
            raise ValueError(f"{source}: template={template!r} has no {{prompt}}")
        self.name = Path(source).stem
        self._score: Callable[[str, Problem], float] = load_object(score)
        self._well_formed: Callable[[str], bool] = load_object(well_formed)
        found: dict[str, Problem] = {}
        for index, row in enumerate(rows.select(range(min(limit, len(rows)))) if limit else rows):
            question, answer = row[prompt_column], row[answer_column]
            if question is None or answer is None or not str(question).strip():
                raise ValueError(
                    f"{source}: row {index} has {prompt_column}={question!r}, {answer_column}={answer!r}; both are "
                    f"needed"
                )
            prompt, answer = template.replace("{prompt}", str(question)), str(answer)
            if prompt in found:
                if found[prompt].answer != answer:
                    raise ValueError(
                        f"{source}: row {index} repeats {question!r} with answer {answer!r}, before "
                        f"{found[prompt].answer!r}"
                    )
                continue
            found[prompt] = Problem(
                str(row[id_column]) if id_column else f"{self.name}:{index}", prompt, answer, {"row": index}
            )
        if not found:
            raise ValueError(f"{source} has no rows")
        self._splits: dict[str, list[Problem]] = {"train": [], "held_out": []}
        for prompt, problem in found.items():
            self._splits[split_of(prompt, held_out_fraction)].append(problem)
        unused = {"train"} if held_out_fraction >= 1 else {"held_out"} if held_out_fraction <= 0 else set()
        empty = [split for split, problems in self._splits.items() if not problems and split not in unused]
        if empty:
            raise ValueError(
                f"{source}: {len(found)} questions leave {empty} empty; give more rows or another held_out_fraction"
            )
        assert_disjoint(self._splits["train"], self._splits["held_out"])

    def score(self, text: str, problem: Problem) -> float:
        """What the configured reward says."""
        return self._score(text, problem)

    def well_formed(self, text: str) -> bool:
        """What the configured predicate says."""
        return self._well_formed(text)


def _load(source: str, subset: str | None, hub_split: str) -> Any:
    from datasets import load_dataset

    suffix = Path(source).suffix
    if suffix not in _LOADERS:
        return load_dataset(source, subset, split=hub_split)
    if not Path(source).is_file():
        raise FileNotFoundError(f"data set file {source} does not exist")
    if Path(source).stat().st_size == 0:
        raise ValueError(f"{source} has no rows")
    return load_dataset(_LOADERS[suffix], data_files=source, split="train")


def dataset_task(source: str, **options: Any) -> DatasetTask:
    """A data set as a task, by import path `epilora.tasks.dataset:dataset_task`."""
    return DatasetTask(source, **options)
