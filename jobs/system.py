"""The running system as a job sees it: Ray, the pool, one base (engine + trainer), the store and the router.

Starts what is missing, joins what runs. A job that started Ray itself also stops it; one that joined a cluster
(`RAY_ADDRESS`, `ray job submit`) leaves the base, the store and the router to others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray

from actors import proxy
from actors.engine_pool import NAMESPACE, BaseRequest, get_or_create_pool
from actors.handles import RemotePart
from actors.placement import Choice
from actors.scaling import ScalingLimits
from actors.spread import EngineSet
from epilora import planner
from epilora.config.schema import EngineConfig, JobConfig
from epilora.models import portable_model_path, resolve_model_path
from epilora.serving.keys import issue
from epilora.serving.tenant_file import put_tenants
from epilora.serving.tenants import TenantConfig, hash_key, issue_key
from epilora.sizing import RECIPES
from epilora.types import EngineInfo
from jobs.left_out import left_out
from jobs.loop import policy_name

ENGINE_FACTORY = "epilora.plugin.engine:VllmEngine"
ROUTER_APP = "router"
TRAINER_FACTORY = "epilora.trainer.trainer:LoraTrainer"
SHARDED_FACTORY = "epilora.trainer.sharded:ShardedTrainer"
# Serve gives up on a proxy that has not started within 5 s and starts another, which makes a busy machine busier.
WORKERS = {"env_vars": {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", **proxy.ENVIRONMENT}}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TenantKey:
    """A tenant's API key, known only to the job that made it; the router stores a hash."""

    tenant: str
    api_key: str


def base_request(config: JobConfig) -> tuple[BaseRequest, planner.Plan]:
    """What to ask the pool for, and the plan it follows. Raises MemoryInfeasible before anything starts."""
    engine, trainer = config.engine, config.trainer
    plan = planner.plan_for(config)
    request = BaseRequest(
        name=engine.name,
        trainer_name=trainer.name,
        engine_factory=ENGINE_FACTORY,
        engine_kwargs=engine_kwargs(engine),
        trainer_factory=trainer_factory(config),
        trainer_kwargs=trainer_kwargs(config),
        bundle=plan.bundle,
        engine_options=plan.engine_options,
        trainer_options=plan.trainer_options,
        environment=plan.environment,
        choices=choices(engine, plan),
        scaling=ScalingLimits(**asdict(config.scaling)),
    )
    return request, plan


def engine_kwargs(engine: EngineConfig) -> dict[str, Any]:
    """What the engine's factory is called with; equal for jobs from different copies of this package."""
    return {
        "name": engine.name,
        "model_path": portable_model_path(engine.model_path),
        "dtype": engine.dtype,
        "quantization": None if engine.quantization == "none" else engine.quantization,
        "activations": engine.activations.value,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "tenant_seats": engine.tenant_seats,
        "tool_parser": engine.tool_parser,
        "max_loras": engine.max_loras,
        "max_lora_rank": engine.max_lora_rank,
        "kv_cache_bytes": engine.kv_cache_mib * planner.MIB,
        "tensor_parallel": engine.tensor_parallel,
        "graph_sizes": tuple(engine.graph_sizes) or None,
        "seed": engine.seed,
    }


def choices(engine: EngineConfig, plan: planner.Plan) -> tuple[Choice, ...]:
    """Kinds of node the plan allows, best first, each with what its engine is told that differs from the rest."""
    if not plan.candidates:
        return (Choice(),)
    usual = engine_kwargs(engine)
    made = []
    for candidate in plan.candidates:
        told = engine_kwargs(candidate.engine)
        labels = {planner.ACCELERATOR_LABEL: candidate.gpu.label}
        made.append(Choice(labels, {key: told[key] for key in told if told[key] != usual[key]}))
    return tuple(made)


def trainer_factory(config: JobConfig) -> str:
    """The trainer's class: one process, or as many ranks as the engine has."""
    return TRAINER_FACTORY if config.engine.tensor_parallel == 1 else SHARDED_FACTORY


def trainer_kwargs(config: JobConfig) -> dict[str, Any]:
    """What the trainer's factory is called with."""
    trainer, recipe = config.trainer, RECIPES[config.trainer.placement]
    ranks = config.engine.tensor_parallel
    return ({"ranks": ranks} if ranks > 1 else {}) | {
        "dtype": trainer.dtype,
        "micro_batch_tokens": trainer.micro_batch_tokens,
        "logprob_chunk": trainer.logprob_chunk,
        "checkpoint_activations": trainer.checkpoint_activations,
        "device": "cuda" if config.engine.num_gpus else "cpu",
        "gemm_mode": trainer.gemm_mode,
        "own": recipe.own,
        "offloaded": recipe.offloaded,
        "gives_memory_back": not recipe.kv_kept,
    }


class System:
    """Use as `async with System(config) as system`."""

    def __init__(self, config: JobConfig, *, router: bool) -> None:
        self.config = config
        self._with_router = router
        self.owns_ray = False
        self.keys: dict[str, TenantKey] = {}
        self.engine: Any = None
        self.trainer: Any = None
        self.store: Any = None
        self.info: EngineInfo
        self._tenants_file: Path
        self.plan: planner.Plan

    @property
    def base_url(self) -> str:
        return f"http://{self.config.router.host}:{self.config.router.port}"

    @property
    def admin_url(self) -> str:
        """Where operators' calls go, if this job started the router."""
        port = self.config.router.admin_port
        return f"http://127.0.0.1:{port}" if port else self.base_url

    def operator_key(self) -> str:
        """A new admin key, which replaces an earlier one of the store's tenants file."""
        return issue(self._tenants_file, "operator", {}, admin=True, revoke=True)

    async def __aenter__(self) -> System:
        self._request, self.plan = base_request(self.config)
        self._connect()
        try:
            await self._start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    def _connect(self) -> None:
        address = os.environ.get("RAY_ADDRESS")
        if address:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
            return
        self.owns_ray = True
        on_cpu = self.config.engine.num_gpus == 0
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=max(2, os.cpu_count() or 2),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            object_store_memory=(128 if on_cpu else 4096) * planner.MIB,
            # This machine is the whole cluster: it has what cluster.yaml says of nodes that may run such a base.
            resources={key: n for key, n in self.plan.bundle.items() if key not in ("CPU", "GPU", "memory")} or None,
            runtime_env=WORKERS | ({"worker_process_setup_hook": "jobs.left_out.leave_out"} if on_cpu else {}),
            _system_config={"prestart_worker_first_driver": False},
        )

    async def _start(self) -> None:
        timeout = self.config.ready_timeout_s
        self._pool = RemotePart(get_or_create_pool(str(Path(self.config.store.root).resolve())))
        starting = asyncio.create_task(self._join())
        store_root = Path(await asyncio.wait_for(self._pool.ready(), timeout))
        if self._with_router:
            self._tenants_file = store_root / "tenants.json"
            await asyncio.to_thread(self._start_router)
        await starting
        self.store = RemotePart(ray.get_actor("store", namespace=NAMESPACE))

    async def _join(self) -> None:
        """Hold the base's engine (or engines) and trainer, once the pool has them running."""
        request, timeout = self._request, self.config.ready_timeout_s
        driver, session = ray.get_runtime_context().get_job_id(), policy_name(self.config.name)
        self.info = await self._pool.ensure(request, self.config.name, timeout, driver, session)
        self.engine = await self._engines(request.name, timeout)
        self.trainer = RemotePart(ray.get_actor(request.trainer_name, namespace=NAMESPACE))

    @property
    def one_engine(self) -> bool:
        """Whether the job samples from one engine. A deterministic one does: its batches must repeat."""
        return self.config.scaling.max_engines == 1 or self.config.deterministic

    async def _engines(self, base: str, timeout_s: float) -> Any:
        """The base's engine, or the set of those that the pool runs for it."""
        if self.one_engine:
            return RemotePart(ray.get_actor(base, namespace=NAMESPACE))

        async def find() -> dict[str, Any]:
            found = {}
            for name, start in sorted((await self._pool.starts([base])).items()):
                try:
                    if start:
                        found[f"{name} ({start})"] = RemotePart(ray.get_actor(name, namespace=NAMESPACE))
                except ValueError:
                    logger.info("engine %s has gone since the pool was asked", name)
            return found

        engines = EngineSet(find)
        await engines.wait_for(max(1, self.config.scaling.min_engines), timeout_s)
        return engines

    async def revive(self) -> None:
        """After a part died: wait until engine, trainer and store answer again, and take their new handles.

        Raises TimeoutError after `ready_timeout_s`, or as the pool does.
        """
        timeout, start = self.config.ready_timeout_s, time.monotonic()
        while True:
            try:
                await self._join()
                self.store = RemotePart(ray.get_actor("store", namespace=NAMESPACE))
                await self.store.ready()
                return
            except ray.exceptions.RayActorError as err:  # the pool or the store is being started again
                if time.monotonic() - start > timeout:
                    raise TimeoutError(f"pool or store did not come back within {timeout:g} s") from err
                await asyncio.sleep(0.5)

    def _start_router(self) -> None:
        """Give this job's tenants new keys, and start the router unless one runs (it re-reads the tenants file)."""
        with left_out():  # imported here: a job without a router does without Serve
            from ray import serve

            from actors.router import build_app

        self.keys = {tenant.name: TenantKey(tenant.name, issue_key(tenant.name)) for tenant in self.config.tenants}
        rows = [TenantConfig(key.tenant, (hash_key(key.api_key),)) for key in self.keys.values()]
        put_tenants(self._tenants_file, rows)
        serve.start(http_options={"host": self.config.router.host, "port": self.config.router.port})
        if ROUTER_APP in serve.status().applications:
            return
        app = build_app(
            {
                "engines": [self.config.engine.name],
                "base_model": resolve_model_path(self.config.engine.model_path).name,
                "tenants_file": str(self._tenants_file),
                "replicas": self.config.router.replicas,
                "admin_port": self.config.router.admin_port,
            }
        )
        serve.run(app, name=ROUTER_APP, route_prefix="/", blocking=False)

    async def __aexit__(self, *exc: object) -> None:
        if not ray.is_initialized():
            return
        if not self.owns_ray:
            if hasattr(self, "_pool"):
                await self._pool.release(self.config.name)
            ray.shutdown()
            return
        if self._with_router:
            from ray import serve

            await asyncio.to_thread(serve.shutdown)
        if hasattr(self, "_pool"):
            await asyncio.wait_for(self._pool.shutdown(), 30)
        ray.shutdown()
