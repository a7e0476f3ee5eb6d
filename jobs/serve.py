"""Keep the base and every stored adapter served over HTTP until Ctrl-C.

    python -m jobs.serve --config configs/quickstart_tiny.yaml [key=value ...] [--dry-run]

Prints one API key per configured tenant, a curl command and a Python snippet that work as they are, and what an operator
needs: the operators' port (`router.admin_port`, on 127.0.0.1), an admin key and the command that shows what happens.
"""

from __future__ import annotations

import asyncio

from epilora.config.schema import JobConfig
from epilora.tasks import load_task
from jobs.command import job_main
from jobs.system import System


async def run(config: JobConfig) -> None:
    """Serve until cancelled."""
    async with System(config, router=True) as system:
        print(instructions(config, system), flush=True)
        await asyncio.Event().wait()


def instructions(config: JobConfig, system: System) -> str:
    """What to type to use the server, with this run's keys and models."""
    source = config.task
    prompt = load_task(source.path, **source.args).problem("held_out", 0).prompt
    keys = "\n".join(f"  {name:<12} {key.api_key}" for name, key in system.keys.items())
    key = next(iter(system.keys.values())).api_key
    model, operator_key = system.info.model_name, system.operator_key()
    return f"""
serving {model} at {system.base_url} (Ctrl-C stops it); API keys of this run:
{keys}

curl -s {system.base_url}/v1/completions -H "Authorization: Bearer {key}" -H "Content-Type: application/json" \\
  -d '{{"model": "{model}", "prompt": "{prompt}", "max_tokens": {config.rl.max_tokens}, "temperature": 0}}'

from openai import OpenAI
client = OpenAI(base_url="{system.base_url}/v1", api_key="{key}")
print([m.id for m in client.models.list()])
print(client.completions.create(model="{model}", prompt="{prompt}", max_tokens={config.rl.max_tokens}, temperature=0).choices[0].text)

operators: page and /metrics at {system.admin_url}/, admin key of this run:
  {operator_key}
epilora top --url {system.admin_url} --key {operator_key}
"""


def main() -> None:
    job_main(run, description=__doc__ or "")


if __name__ == "__main__":
    main()
