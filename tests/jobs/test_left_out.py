"""Modules left out of a process, each case in a process of its own."""

import subprocess
import sys

import pytest

CASES = {
    "Serve is imported without pandas, and pandas can be imported later": """
from jobs.left_out import left_out
with left_out():
    import ray.serve
assert "pandas" not in sys.modules
import pandas
assert pandas.Series([1, 2]).sum() == 3
""",
    "a worker has none": """
from jobs.left_out import leave_out
leave_out()
for name in ("pandas", "pyarrow", "triton"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
import torch._dynamo, transformers, actors.router
""",
    "what is there already stays": """
import pandas
from jobs.left_out import leave_out, left_out
with left_out():
    import pandas as again
leave_out()
import pandas as once_more
assert pandas is again is once_more
""",
}


@pytest.mark.parametrize("code", CASES.values(), ids=CASES.keys())
def test_left_out(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import sys\n" + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
