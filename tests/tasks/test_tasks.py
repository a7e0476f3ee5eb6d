"""Tasks: disjoint splits, scores, loaders, and messages that say what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from epilora.tasks import Problem, RewardError, Task, assert_disjoint, checked_score, load_task, split_of
from epilora.tasks.arithmetic import Addition, Maximum, Subtraction

ARITHMETIC = ["addition", "subtraction", "maximum"]
FIRST_HELD_OUT = ["1+5=", "5-2=", "max(43,28)="]


@pytest.fixture(scope="module")
def tasks() -> dict[str, Task]:
    return {name: load_task(f"epilora.tasks.arithmetic:{name}") for name in ARITHMETIC}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_splits_are_disjoint_stable_and_a_tenth_is_held_out(tasks: dict[str, Task], name: str) -> None:
    task = tasks[name]
    prompts = {s: [task.problem(s, i).prompt for i in range(task.size(s))] for s in ("train", "held_out")}
    train, held_out = set(prompts["train"]), set(prompts["held_out"])
    assert not train & held_out
    assert len(train) == len(prompts["train"])
    assert len(held_out) == len(prompts["held_out"]) >= 200
    assert 0.08 < len(held_out) / (len(train) + len(held_out)) < 0.12
    assert all(split_of(prompt) == "held_out" for prompt in held_out)
    assert task.problem("train", 0) == task.problem("train", task.size("train"))
    with pytest.raises(IndexError, match="held_out has"):
        task.problem("held_out", task.size("held_out"))
    with pytest.raises(ValueError, match="allowed"):
        task.problem("test", 0)


def test_the_first_questions_never_change(tasks: dict[str, Task]) -> None:
    """A changed split or order would make old runs and the shipped model incomparable."""
    assert [tasks[name].problem("held_out", 0).prompt for name in ARITHMETIC] == FIRST_HELD_OUT
    assert [tasks[name].size("held_out") for name in ARITHMETIC] == [432, 205, 820]


@pytest.mark.parametrize("name", ARITHMETIC)
def test_scores_and_form(tasks: dict[str, Task], name: str) -> None:
    task = tasks[name]
    wrong_habit = 0
    for index in range(100):
        problem = task.problem("held_out", index)
        a, b = problem.meta["a"], problem.meta["b"]
        right = {"addition": a + b, "subtraction": a - b, "maximum": max(a, b)}[name]
        assert task.score(str(right), problem) == 1.0
        assert task.score(f" {right}\n", problem) == 1.0
        assert task.score(str(right + 1), problem) == 0.0
        assert task.score(f"{right}0", problem) == 0.0
        wrong_habit += task.habitual_answer(a, b) != right
    assert wrong_habit >= 30  # the headroom
    assert task.well_formed("42")
    assert not any(task.well_formed(text) for text in ("", "4 2", "=42", "1234", "-3"))


def test_planted_habits() -> None:
    assert [Addition.habitual_answer(a, b) for a, b in ((27, 15), (77, 55), (12, 34), (5, 7))] == [32, 22, 46, 2]
    assert [Subtraction.habitual_answer(a, b) for a, b in ((52, 17), (40, 7), (99, 9))] == [45, 43, 90]
    assert [Maximum.habitual_answer(a, b) for a, b in ((12, 47), (19, 47), (52, 32))] == [47, 19, 52]


def test_split_of_is_a_hash_of_the_text() -> None:
    assert [split_of(f"q{i}") for i in range(40)].count("held_out") in range(1, 9)
    assert split_of("q1", 0.0) == "train"
    assert split_of("q1", 1.0) == "held_out"
    problem = Problem("1", "same", "x")
    with pytest.raises(ValueError, match="1 prompts are in both splits"):
        assert_disjoint([problem], [problem])


def test_loading_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tasks.py").write_text(
        "class Half:\n"
        "    def problem(self, split, index): return None\n"
        "    def score(self, text, problem): return 0.0\n"
        "def make(**options): return Half()\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TypeError, match=r"lacks \['size', 'well_formed'\]"):
        load_task("my_tasks:make")
    with pytest.raises(TypeError, match="neither a task nor a callable"):
        load_task("my_tasks:number")
    with pytest.raises(AttributeError, match="no 'addtion'"):
        load_task("epilora.tasks.arithmetic:addtion")
    with pytest.raises(ImportError, match="no_such_module"):
        load_task("no_such_module:x")
    assert load_task("epilora.tasks.arithmetic:Addition").name == "addition"


def test_a_reward_that_raises_or_is_nan_names_the_problem() -> None:
    problem = Problem("q7", "1+1=", "2")

    def fails(text: str, problem: Problem) -> float:
        raise KeyError("boom")

    with pytest.raises(RewardError, match=r"'q7'.*'abc'.*KeyError.*boom"):
        checked_score(fails, "abc", problem)
    with pytest.raises(RewardError, match="reward is nan on problem 'q7'"):
        checked_score(lambda *_: math.nan, "abc", problem)
    assert checked_score(lambda *_: True, "abc", problem) == 1.0


def test_reasoning_gym_data_sets() -> None:
    task = load_task("epilora.tasks.reasoning:reasoning_gym_task", name="gcd", size=60, extract="last_number")
    problem = task.problem("held_out", 0)
    assert task.score(f"I think it is {problem.answer}", problem) == 1.0
    assert task.score("no idea", problem) < 0.5
    assert task.well_formed("so 12")
    assert not task.well_formed("no idea")
    assert task.size("train") + task.size("held_out") <= 60
    with pytest.raises(ValueError, match="extract"):
        load_task("epilora.tasks.reasoning:reasoning_gym_task", name="gcd", size=60, extract="first")
    with pytest.raises(ValueError, match="template"):
        load_task("epilora.tasks.reasoning:reasoning_gym_task", name="gcd", size=60, template="chat")


def test_chat_arithmetic_is_chatml() -> None:
    task = load_task("epilora.tasks.chat_arithmetic:chain_sum", size=400)
    problem = task.problem("train", 0)
    assert problem.prompt.startswith("<|im_start|>user\nWhat is ")
    assert problem.prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert task.score(f"The answer is {problem.answer}.", problem) == 1.0
    # The last number counts; chain_sum's own score gives part of a point to answers that contain the right one.
    assert task.score(f"The answer is {problem.answer}1.", problem) < 1.0
    assert task.score("I do not know.", problem) == 0.0
    assert task.size("held_out") >= 20


def test_longer_terms_never_ask_what_one_digit_terms_trained_on() -> None:
    short = load_task("epilora.tasks.chat_arithmetic:chain_sum", size=400)
    long = load_task("epilora.tasks.chat_arithmetic:chain_sum", size=2000, max_digits=2)
    trained = {short.problem("train", i).prompt for i in range(short.size("train"))}
    asked = {long.problem("held_out", i).prompt for i in range(long.size("held_out"))}
    assert len(asked) > 200
    assert not trained & asked


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        (r"so it is $\boxed{\frac{1}{2}}$", "0.5", 1.0),
        ("The answer is 3", "3", 1.0),
        ("The answer is 4", "3", 0.0),
        ("no numbers here", "3", 0.0),
    ],
)
def test_math_verify(text: str, answer: str, score: float) -> None:
    from epilora.tasks.maths import math_verify_score

    assert math_verify_score(text, Problem("m1", "?", answer)) == score


def _jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_data_sets_from_files(tmp_path: Path) -> None:
    rows = [{"q": f"{i}*3=", "a": str(3 * i), "key": f"row{i}"} for i in range(60)]
    source = _jsonl(tmp_path / "threes.jsonl", [*rows, rows[0]])
    options = {"prompt_column": "q", "answer_column": "a", "id_column": "key", "template": "Q: {prompt}"}
    task = load_task("epilora.tasks.dataset:dataset_task", source=source, **options)
    assert task.size("train") + task.size("held_out") == 60
    problem = task.problem("train", 0)
    assert problem.prompt.startswith("Q: ")
    assert problem.problem_id.startswith("row")
    assert task.score(f"{problem.answer} ", problem) == 1.0
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "threes.parquet")
    again = load_task("epilora.tasks.dataset:dataset_task", source=str(tmp_path / "threes.parquet"), **options)
    assert again.problem("held_out", 0) == task.problem("held_out", 0)
    verified = load_task(
        "epilora.tasks.dataset:dataset_task", source=source, score="epilora.tasks.maths:math_verify_score", **options
    )
    assert verified.score(f"it is {problem.answer}.0", problem) == 1.0


def test_data_set_messages(tmp_path: Path) -> None:
    def load(rows: list[dict], **options: object) -> Task:
        return load_task("epilora.tasks.dataset:dataset_task", source=_jsonl(tmp_path / "d.jsonl", rows), **options)

    with pytest.raises(ValueError, match=r"no columns \['prompt'\]; it has \['q', 'answer'\]"):
        load([{"q": "1", "answer": "1"}])
    with pytest.raises(ValueError, match="row 0 has prompt=None"):
        load([{"prompt": None, "answer": "1"}])
    with pytest.raises(ValueError, match="row 1 repeats 'x' with answer '2', before '1'"):
        load([{"prompt": "x", "answer": "1"}, {"prompt": "x", "answer": "2"}])
    with pytest.raises(ValueError, match=r"1 questions leave \['held_out'\] empty"):
        load([{"prompt": "x", "answer": "1"}])
    with pytest.raises(ValueError, match="has no rows"):
        load([])
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_task("epilora.tasks.dataset:dataset_task", source=str(tmp_path / "gone.jsonl"))
