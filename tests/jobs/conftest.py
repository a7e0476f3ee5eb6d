"""What the tests of whole jobs share: one main job cut by Ctrl-C, and then one cluster with one base for everything else.

An engine takes most of a core for half a minute to start, so there are two starts in all: that of the job that is cut,
which starts and stops everything itself, and that of the cluster's first job. The cut job goes on inside the cluster.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator

import pytest
from cluster import Cluster
from main_job import Interrupted, MainJob, interrupt

from benchmarks.ports import free_port


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """The main job, cut in the middle of its steps."""
    return interrupt(MainJob(tmp_path_factory.mktemp("jobs"), free_port()))


@pytest.fixture(scope="session")
def cluster(interrupted: Interrupted) -> Iterator[Cluster]:
    """Runs on what the interrupted job left in its store."""
    with tempfile.TemporaryDirectory(prefix="epi-", dir="/tmp") as short:  # Ray's socket paths end at 107 characters
        running = Cluster(interrupted.job.out, short, interrupted.job.port)
        yield running
        running.stop()


@pytest.fixture(scope="session")
def server(cluster: Cluster) -> tuple[str, str, str]:
    """(job id, API key, log) of a serving job; the first use starts engine, trainer, store and router."""
    job = cluster.submit(
        "jobs.serve",
        "name=server",
        f"router.admin_port={free_port()}",
        "tenants=[{name: dora, prompts_task: {path: 'epilora.tasks.arithmetic:addition'}}]",
    )
    logs = cluster.wait_for(
        lambda: ((text := cluster.client.get_job_logs(job)) and "curl" in text and text)
        or (cluster.client.get_job_status(job).is_terminal() and pytest.fail(text)), "the server"
    )  # fmt: skip
    found = re.search(r"^  dora\s+(\S+)$", logs, re.MULTILINE)
    assert found is not None
    return job, found.group(1), logs
