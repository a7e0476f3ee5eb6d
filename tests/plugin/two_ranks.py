"""Run by test_tensor_parallel: an engine of two CPU ranks says something with adapters; prints one JSON line.

python two_ranks.py MODEL PATH ADAPTER_FOLDER ...
"""

import json
import os
import sys

os.environ |= {
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
}
os.environ |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def kinds_of(worker):
    from epilora.plugin.layers import layer_kinds

    return layer_kinds(worker.model_runner.get_model())


def main():
    model, path, *adapters = sys.argv[1:]
    os.environ["EPILORA_PATH"] = path
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # collective_rpc takes a function below
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=model, tensor_parallel_size=2, distributed_executor_backend="mp", dtype="bfloat16",
        quantization="fp8_per_channel", enforce_eager=True, enable_lora=True, max_loras=2, max_lora_rank=16, max_model_len=128,
        max_num_seqs=8, kv_cache_memory_bytes=16 << 20, seed=0, additional_config={"epilora": {"activations": "w8a16"}},
    )  # fmt: skip
    kinds = llm.collective_rpc(kinds_of)
    prompts = [{"prompt_token_ids": [3 + (5 * i + 3 * j) % 26 for j in range(8)]} for i in range(4)]
    who = [None, *[LoRARequest(f"a{i}", i + 1, folder) for i, folder in enumerate(adapters)], None]
    sampling = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True)
    done = llm.generate(prompts, sampling, lora_request=who[:4], use_tqdm=False)
    said = [
        (list(o.outputs[0].token_ids), [next(iter(d.values())).logprob for d in o.outputs[0].logprobs]) for o in done
    ]
    print(
        "RESULT "
        + json.dumps(
            {
                "said": said,
                "kinds": [
                    sorted({kind for name, (kind, _) in rank.items() if name.endswith("_proj")}) for rank in kinds
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
