"""The committed traces against any OpenAI-compatible server: ours, vLLM's own, SGLang, TensorRT-LLM.

    python -m benchmarks.serving.peers --base-url http://127.0.0.1:8000/v1 --provider sglang --models a b c \
        --trace poisson --rate 4 --prompt-tokens 512 --vocabulary 151936 --out sglang.json

Tenant k of the trace asks for model (k - 1) mod their number; `--models` are the names under which the server offers its
adapters. Prompts are token ids drawn from a seed, sent as a list, which `POST /completions` allows; `ignore_eos` keeps every
reply at its length (vLLM, SGLang and ours know it; take it out with --no-ignore-eos). TTFT counts from a request's arrival time
in the trace, so that a client that falls behind shows; every chunk with text or tokens counts as one arrival, and the number of
tokens comes from the server's usage. Rows are those of the online wave under the given provider's name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pathlib
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from benchmarks.serving import summary, traces
from benchmarks.serving.driving import random_prompt


@dataclass(frozen=True)
class Outcome:
    """One request. ttft_ms from its arrival in the trace; tpot_ms 0 for one token; late_ms: how late the client sent it."""

    ttft_ms: float
    tpot_ms: float
    tokens: int
    late_ms: float


class PeerError(RuntimeError):
    """The server refused or broke a request."""


async def ask(client: httpx.AsyncClient, body: dict, arrival: float) -> Outcome:
    """Stream one completion. arrival: of `time.perf_counter`. Raises PeerError."""
    sent = time.perf_counter()
    first = last = 0.0
    tokens = chunks = 0
    async with client.stream("POST", "completions", json=body) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")[:300]
            raise PeerError(f"{answer.request.url}: status {answer.status_code}: {text}")
        async for line in answer.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            data = json.loads(line[5:])
            if "error" in data:
                raise PeerError(f"{answer.request.url}: {data['error']}")
            if any(choice.get("text") or choice.get("token_ids") for choice in data.get("choices", ())):
                last = time.perf_counter()
                first = first or last
                chunks += 1
            tokens = (data.get("usage") or {}).get("completion_tokens", tokens)
    tokens = tokens or chunks
    if not first:
        raise PeerError(f"{body['model']}: the server streamed no token")
    tpot_ms = (last - first) * 1e3 / (tokens - 1) if tokens > 1 else 0.0
    return Outcome((first - arrival) * 1e3, tpot_ms, tokens, (sent - arrival) * 1e3)


async def run_trace(
    base_url: str,
    rows: Sequence[traces.Row],
    models: Sequence[str],
    *,
    vocabulary: int,
    api_key: str = "",
    ignore_eos: bool = True,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> tuple[list[Outcome], float]:
    """Outcomes in the trace's order, and the seconds it took. Raises PeerError at the first request that fails.

    base_url: with /v1. rows: of `traces.read`. vocabulary: token ids are drawn below it.
    """
    generator = random.Random(seed)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    bodies = []
    for _, prompt_tokens, new_tokens, tenant in rows:
        body = {
            "model": models[(tenant - 1) % len(models)],
            "prompt": list(random_prompt(generator, prompt_tokens, vocabulary)),
            "max_tokens": new_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        bodies.append(body | ({"ignore_eos": True} if ignore_eos else {}))
    async with httpx.AsyncClient(
        base_url=base_url.rstrip("/") + "/", headers=headers, timeout=timeout_s, limits=limits
    ) as client:
        began = time.perf_counter()

        async def at(arrival: float, body: dict) -> Outcome:
            await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
            return await ask(client, body, arrival)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(at(began + row[0], body)) for row, body in zip(rows, bodies, strict=True)]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks], time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", required=True, help="with /v1")
    parser.add_argument("--provider", required=True, help="the system's name in the rows")
    parser.add_argument("--models", nargs="+", required=True, help="model names of the adapters, in order of tenants")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--trace", choices=("poisson", "wildchat"), default="poisson")
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the poisson trace")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--vocabulary", type=int, required=True, help="token ids are drawn below it")
    parser.add_argument("--no-ignore-eos", action="store_true")
    parser.add_argument("--shape", default="unknown", help="name of the model's shape, for the rows' case")
    parser.add_argument("--capture", type=int, default=0, help="largest batch with a CUDA graph, for the rows' case")
    parser.add_argument("--out", type=pathlib.Path, help="results file to append to")
    args = parser.parse_args()
    length = args.prompt_tokens if args.trace == "poisson" else 0
    rows = traces.read(args.trace, rate=args.rate, prompt_tokens=length, requests=args.requests)
    outcomes, seconds = asyncio.run(
        run_trace(
            args.base_url,
            rows,
            args.models,
            vocabulary=args.vocabulary,
            api_key=args.api_key,
            ignore_eos=not args.no_ignore_eos,
        )
    )
    ttft, tpot = [o.ttft_ms for o in outcomes], [o.tpot_ms for o in outcomes]
    good = sum(o.ttft_ms <= summary.TTFT_LIMIT_MS and o.tpot_ms <= summary.TPOT_LIMIT_MS for o in outcomes)
    print(
        f"{args.provider}: {len(rows)} requests in {seconds:.1f} s, TTFT p50 {sorted(ttft)[len(ttft) // 2]:.1f} "
        f"p99 {summary.p99(ttft):.1f} ms, per token p50 {sorted(tpot)[len(tpot) // 2]:.2f} ms, "
        f"goodput {good / seconds:.2f}/s, sent at most {max(o.late_ms for o in outcomes):.1f} ms late"
    )
    if args.out:
        from benchmarks.harness import Results, command_line

        arguments = [a for a in sys.argv[1:] if not args.api_key or args.api_key not in a]  # a key is nobody's business
        results = Results(args.out, summary.summarise, command_line("python -m benchmarks.serving.peers", arguments))
        for metric, values in (("tpot", tpot), ("ttft", ttft)):
            case = summary.online_case(metric, args.trace, args.shape, length, args.capture, args.rate)
            facts = {"rate": args.rate, "trace": args.trace, "seconds": round(seconds, 2), "over": "HTTP"}
            results.add(case, args.provider, len(rows), values, unit="ms", **facts)
        results.write()


if __name__ == "__main__":
    main()
