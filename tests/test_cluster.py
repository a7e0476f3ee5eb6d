"""cluster.yaml against the launcher's own schema, and its labels against what the planner asks for."""

import json
from pathlib import Path

import jsonschema
import ray
import yaml

from epilora.planner import GPU_TYPES

ROOT = Path(__file__).resolve().parent.parent


def test_cluster_yaml_is_valid_and_its_labels_are_known() -> None:
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(cluster, schema)
    assert cluster["head_node_type"] in cluster["available_node_types"]
    labels = {t["labels"]["ray.io/accelerator-type"] for t in cluster["available_node_types"].values() if "labels" in t}
    assert labels <= set(GPU_TYPES)
