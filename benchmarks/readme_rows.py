"""What the README says of a results file: (text, key of its summary, format)."""

from __future__ import annotations

KERNEL_ROWS = (
    ("1 token, 1 adapter: time of the layer", "layer_m1_us", "{:.1f} us"),
    ("1 token, 1 adapter, over vLLM's layer *without* an adapter", "layer_m1_over_no_adapter", "{:.2f}x"),
    ("1 token, 1 adapter, over vLLM's fastest with one", "layer_m1_over_vllm_best", "{:.2f}x"),
    ("8 tokens, the same", "layer_m8_over_vllm_best", "{:.2f}x"),
    ("16 tokens, the same", "layer_m16_over_vllm_best", "{:.2f}x"),
    ("16 tokens, over vLLM's layer without an adapter", "layer_m16_over_no_adapter", "{:.2f}x"),
    ("no adapter, 1 token: our GEMM over quantise + CUTLASS", "gemm_m1_over_cutlass", "{:.2f}x"),
    ("32 tokens, 1 adapter, over vLLM's fastest", "m32_1_over_vllm_best", "{:.2f}x"),
    ("32 tokens, 32 adapters, over vLLM's fastest", "m32_32_over_vllm_best", "{:.2f}x"),
    ("512 tokens, 32 adapters, over vLLM's fastest", "hybrid_512_32_over_vllm_best", "{:.2f}x"),
    ("2,048 tokens, 32 adapters, over vLLM's fastest", "prefill_2048_32_over_vllm_best", "{:.2f}x"),
    ("2,048 tokens, 32 adapters, over the vendor GEMM alone", "prefill_2048_32_over_vendor_gemm", "{:.2f}x"),
    ("W8A16, 1 token, over Marlin", "w8a16_m1_over_marlin", "{:.2f}x"),
    ("training forward, 4,096 tokens, over bf16 cuBLAS", "train_fwd_4096_over_bf16", "{:.2f}x"),
    ("training backward, the same", "train_bwd_4096_over_bf16", "{:.2f}x"),
)
SERVING_ROWS = (
    ("time per output token, batch 1, one adapter, 1 slot", "tpot_b1_ms", "{:.2f} ms"),
    ("the same, over vLLM's fastest", "tpot_b1_over_vllm_best", "{:.2f}x"),
    ("the same, over vLLM with LoRA off", "tpot_b1_over_no_adapter", "{:.2f}x"),
    (
        "time per output token, batch 1, one adapter, 32 slots, over vLLM's fastest",
        "tpot_b1_32slots_over_vllm_best",
        "{:.2f}x",
    ),
    ("no adapter in the batch, over vLLM with LoRA off", "base_only_over_no_lora", "{:.3f}x"),
    (
        "throughput of 32 tenants, 256 x (512 + 256) tokens, over vLLM's fastest",
        "throughput_32_over_vllm_best",
        "{:.2f}x",
    ),
    ("the same, over vLLM with LoRA off", "throughput_32_over_no_adapter", "{:.2f}x"),
    ("the same with adapters stored in FP8, over vLLM's fastest", "throughput_32_fp8_over_vllm_best", "{:.2f}x"),
    ("KV tokens, over vLLM's", "kv_tokens_over_vllm", "{:.3f}x"),
    ("timing the paths, no cache", "dispatch_cold_s", "{:.1f} s"),
    ("online, median time per token, worst rate, over vLLM's fastest", "online_tpot_worst_ratio", "{:.2f}x"),
    ("online, p99 TTFT, worst rate, over vLLM's fastest", "online_ttft_p99_worst_ratio", "{:.2f}x"),
    ("72B shape, time per token at batch 1, over vLLM's fastest", "tpot_72b_over_vllm_best", "{:.2f}x"),
)
ONE_COPY_ROWS = (
    ("trained tokens/s on the engine's FP8 codes, over the same trainer on a 16-bit base", "train_tokens_s_over_bf16", "{:.2f}x"),
    ("from the optimizer step's end to the new version's first token (vLLM's own LoRA kernels)", "publish_ms_8b", "{:.0f} ms"),
    ("release and restore of 64 GiB of KV cache, together", "kv_release_s", "{:.2f} s"),
)  # fmt: skip
FORMAT_ROWS = (
    ("resident adapters at equal memory, FP8 over bf16", "resident_adapters_fp8_over_bf16", "{:.2f}x"),
    ("the same, NVFP4", "resident_adapters_nvfp4_over_bf16", "{:.2f}x"),
    ("NVFP4 base, layer without adapter, 1 token, over Marlin", "w4a16_m1_over_marlin_nvfp4", "{:.2f}x"),
    ("block-scaled FP8 base, layer with one adapter, 1 token, over vLLM (its LoRA kernels untuned, one stream)", "fp8_block_m1_over_vllm", "{:.2f}x"),
    ("quality checks of converted adapters (tiny model, CPU)", "quality_checks", "{:.0f}"),
    ("of these failed, a conversion spoilt on purpose included", "quality_refused", "{:.0f}"),
    ("failed and served all the same", "quality_failed_served", "{:.0f}"),
)  # fmt: skip
ROUTER_ROWS = (
    ("requests/s over a Serve app that only forwards to the same stub engine, both behind Serve's HAProxy", "requests_over_bare_serve", "{:.2f}x"),
    ("requests/s", "requests_per_s", "{:.0f}"),
    ("added over that app at half its load: p99, median of paired rounds", "added_p99_ms", "{:+.1f} ms"),
    ("the same over all rounds, stalls of either side included", "added_p99_all_rounds_ms", "{:+.1f} ms"),
    ("added to the median", "added_p50_ms", "{:+.1f} ms"),
    ("10,000 versions: resolve a name inside the store, p99", "resolve_ms", "{:.2f} ms"),
    ("the same: a page of 100 models over HTTP, p99", "list_http_ms", "{:.1f} ms"),
    ("Jain's index of four tenants' tokens, one of them with ten times the clients", "jain", "{:.3f}"),
    ("a tenant's p99 TTFT beside a neighbour that sends ten times as much, over alone", "worst_p99_over_solo", "{:.2f}x"),
    ("tenants' p99 TTFT with RL on over off, vLLM's CPU engine, under a promise", "rl_on_p99_over_off", "{:.2f}x"),
    ("RL steps/s kept beside those tenants", "rl_rate_over_solo", "{:.2f}x"),
    ("malformed adapters, each refused for its own reason", "malformed_adapters", "{:.0f}"),
    ("malformed requests, the same", "malformed_requests", "{:.0f}"),
    ("answers while versions were published, promoted, rolled back, collected and engines died, at full speed", "hammer_answers", "{:,.0f}"),
    ("of these mixed, or lost", "hammer_mixed_or_lost", "{:.0f}"),
    ("the same, slowly, for", "soak_s", "{:,.0f} s"),
    ("its resident memory's slope", "soak_growth_mib_per_h", "{:+.1f} MiB/h"),
)  # fmt: skip
