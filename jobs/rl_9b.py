"""RL on a 9B model: `ray job submit --working-dir . -- python jobs/rl_9b.py [key=value ...] [--dry-run]`.

The same job as jobs/rl.py with configs/rl_9b.yaml: one FP8 copy on one GPU, KV cache released while the trainer runs. Other
placements of the same loop: `python -m jobs.rl --config configs/placement_NAME.yaml`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script from a job's working directory
    sys.path.insert(0, str(ROOT))

from jobs import rl  # noqa: E402
from jobs.command import job_main  # noqa: E402

if __name__ == "__main__":
    job_main(rl.run, description=__doc__ or "", default_config=str(ROOT / "configs" / "rl_9b.yaml"))
