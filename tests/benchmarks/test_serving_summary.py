"""Figures follow from rows: which run, which baseline, what counts; kernel classes; online intervals and goodput."""

from __future__ import annotations

import pytest

from benchmarks.serving.engines import NO_LORA, OURS, OURS_FP8, STOCK
from benchmarks.serving.profiling import kernel_class, summarise_kernels
from benchmarks.serving.summary import (
    OURS_BASE_ONLY,
    goodput,
    online_case,
    online_table,
    p99,
    summarise,
    throughput_case,
    tpot_case,
)
from benchmarks.serving.tables import is_serving, serving_table

KEYS = [
    "tpot_b1_ms",
    "tpot_b1_over_vllm_best",
    "tpot_b1_over_no_adapter",
    "tpot_b1_32slots_over_vllm_best",
    "throughput_32_over_vllm_best",
    "throughput_32_over_no_adapter",
    "throughput_32_fp8_over_vllm_best",
    "base_only_over_no_lora",
    "kv_tokens_over_vllm",
    "dispatch_cold_s",
    "online_tpot_worst_ratio",
    "online_ttft_p99_worst_ratio",
    "tpot_72b_over_vllm_best",
]


def row(case: str, provider: str, samples: list[float], unit: str = "ms", run: str = "a", **facts) -> dict:
    return {
        "case": case,
        "provider": provider,
        "M": 1,
        "unit": unit,
        f"samples_{unit}": samples,
        "run_id": run,
        **facts,
    }


ONE, MANY = tpot_case("qwen3-8b", 1), tpot_case("qwen3-8b", 32)
TENANTS = throughput_case("qwen3-8b", 32)


def test_nothing_measured_gives_every_key_and_no_value():
    assert summarise([]) == dict.fromkeys(KEYS)
    assert list(summarise([])) == KEYS


def test_times_are_over_vllms_fastest_and_throughputs_over_its_highest():
    rows = [
        row(ONE, OURS, [4.0, 4.1, 9.0]),
        row(ONE, STOCK[0], [8.0]),
        row(ONE, STOCK[3], [5.0]),
        row(ONE, NO_LORA, [3.9]),
        row(ONE, OURS_BASE_ONLY, [3.95]),
        row(MANY, OURS, [4.4]),
        row(MANY, STOCK[2], [5.5]),
        row(MANY, NO_LORA, [4.0]),
        row(MANY, OURS_BASE_ONLY, [4.1]),
        row(TENANTS, OURS, [9000.0], "tok_s"),
        row(TENANTS, OURS_FP8, [9600.0], "tok_s"),
        row(TENANTS, STOCK[0], [5000.0], "tok_s"),
        row(TENANTS, STOCK[1], [6000.0], "tok_s"),
        row(TENANTS, NO_LORA, [12000.0], "tok_s"),
        row("dispatch_cold/qwen3-8b/s1", OURS, [11.0], "s"),
        row("dispatch_cold/qwen3-8b/s32", OURS, [14.0], "s"),
        row("kv_tokens/qwen3-8b/s32", OURS, [99], "tokens"),
        row("kv_tokens/qwen3-8b/s32", STOCK[0], [100], "tokens"),
        row(tpot_case("qwen2.5-72b", 1), OURS, [18.0]),
        row(tpot_case("qwen2.5-72b", 1), STOCK[1], [20.0]),
    ]
    found = summarise(rows)
    assert found["tpot_b1_ms"] == 4.1
    assert found["tpot_b1_over_vllm_best"] == round(4.1 / 5.0, 4)
    assert found["tpot_b1_over_no_adapter"] == round(4.1 / 3.9, 4)
    assert found["tpot_b1_32slots_over_vllm_best"] == 0.8
    assert found["throughput_32_over_vllm_best"] == 1.5
    assert found["throughput_32_over_no_adapter"] == 0.75
    assert found["throughput_32_fp8_over_vllm_best"] == 1.6
    assert found["base_only_over_no_lora"] == 1.025  # the worse of the two slot counts
    assert found["kv_tokens_over_vllm"] == 0.99
    assert found["dispatch_cold_s"] == 14.0
    assert found["tpot_72b_over_vllm_best"] == 0.9
    assert found["online_tpot_worst_ratio"] is None


def test_both_sides_come_from_one_run_and_the_newest_that_has_both():
    rows = [
        row(ONE, OURS, [4.0], run="old"),
        row(ONE, STOCK[0], [8.0], run="old"),
        row(ONE, OURS, [2.0], run="new"),
    ]
    assert summarise(rows)["tpot_b1_over_vllm_best"] == 0.5
    assert summarise(rows)["tpot_b1_ms"] == 2.0
    rows.append(row(ONE, STOCK[1], [3.0], run="new"))
    assert summarise(rows)["tpot_b1_over_vllm_best"] == round(2 / 3, 4)


def test_rows_that_fell_back_or_failed_do_not_count():
    rows = [
        row(ONE, OURS, [1.0], fallbacks=["its base is packed"]),
        row(ONE, STOCK[0], [8.0]),
        {**row(ONE, STOCK[1], []), "failure": "out of memory"},
    ]
    assert summarise(rows)["tpot_b1_over_vllm_best"] is None
    rows.append(row(ONE, OURS, [4.0], fallbacks=[]))
    assert summarise(rows)["tpot_b1_over_vllm_best"] == 0.5


def online_rows(rate: float, ours: float, stock: float, ttft: float = 100.0) -> list[dict]:
    rows = []
    for metric in ("tpot", "ttft"):
        case = online_case(metric, "poisson", "qwen3-8b", 512, 512, rate)
        for provider, tpot in ((OURS, ours), (STOCK[1], stock)):
            values = [tpot] * 9 + [0.0] if metric == "tpot" else [ttft] * 9 + [3000.0]
            rows.append(row(case, provider, values, seconds=10.0))
    return rows


def test_online_figures_are_the_worst_of_all_rates():
    rows = online_rows(2, 8.0, 10.0) + online_rows(4, 9.0, 10.0)
    found = summarise(rows)
    assert found["online_tpot_worst_ratio"] == 0.9
    assert found["online_ttft_p99_worst_ratio"] == 1.0
    table = online_table(rows)
    assert [line["case"] for line in table] == ["poisson/qwen3-8b/p512/c512/r2", "poisson/qwen3-8b/p512/c512/r4"]
    assert table[0]["tpot"] == [0.8, 0.8, 0.8]
    assert table[0]["tpot_over"] == STOCK[1]


def test_goodput_counts_requests_that_kept_both_limits():
    rows = online_rows(2, 8.0, 60.0)
    case = online_case("ttft", "poisson", "qwen3-8b", 512, 512, 2)
    assert goodput(rows, "a", case, OURS) == pytest.approx(0.9)  # nine of ten in ten seconds; the tenth waited 3 s
    assert goodput(rows, "a", case, STOCK[1]) == 0.0
    assert goodput(rows, "other", case, OURS) is None


def test_p99_lies_between_neighbours():
    assert p99([1.0]) == 1.0
    assert p99(list(range(101))) == 99.0
    assert p99([0.0, 100.0]) == pytest.approx(99.0)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("_lora_shrink_kernel", "lora"),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<...>>", "base_gemm"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "base_gemm"),
        ("void vllm::reshape_and_cache_flash_kernel<...>", "attention"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "quantise_norm"),
        ("void vllm::dynamic_per_token_scaled_fp8_quant_kernel_strided<...>", "quantise_norm"),
        ("void at::native::reduce_kernel<512, 1, at::native::ArgMaxOps>", "sampling"),
        ("Memcpy DtoD", "other"),
    ],
)
def test_kernel_classes(name, label):
    assert kernel_class(name) == label


def test_kernel_sums_are_per_step():
    found = summarise_kernels([("_lora_shrink_kernel", 10.0), ("gemm", 30.0), ("gemm", 50.0)], 2, 100.0)
    assert found["gpu_us"] == {"base_gemm": 40.0, "lora": 5.0}
    assert found["launches"] == {"base_gemm": 1.0, "lora": 0.5}
    assert found["gap_us"] == 5.0
    assert found["step_us"] == 50.0
    assert found["longest"][0] == {"kernel": "gemm", "us": 40.0}
    with pytest.raises(ValueError, match="no step left"):
        summarise_kernels([], 0, 1.0)


def test_tables_show_ratios_failures_and_what_does_not_count():
    rows = [
        row(TENANTS, OURS, [8000.0, 9000.0, 10000.0], "tok_s"),
        row(TENANTS, OURS_FP8, [9999.0], "tok_s", fallbacks=["packed base"]),
        row(TENANTS, STOCK[0], [5000.0], "tok_s"),
        row(TENANTS, STOCK[1], [6000.0], "tok_s"),
        row(TENANTS, NO_LORA, [12000.0], "tok_s"),
        {**row(TENANTS, STOCK[2], [], "tok_s"), "failure": "out of | memory"},
    ]
    text = serving_table(rows)
    assert f"| {OURS} | 9000 | 8000 | 10000 | 3 | 0.750 | 1.500 |" in text
    assert f"| {STOCK[2]} | failed: out of \\| memory |" in text
    assert f"{OURS_FP8} (does not count: packed base)" in text
    times = serving_table([row(ONE, OURS, [4.0]), row(ONE, STOCK[0], [8.0]), row(ONE, STOCK[3], [5.0])])
    assert f"| {OURS} | 4 | 4 | 4 | 1 | - | 0.800 |" in times
    assert is_serving(rows)
    assert not is_serving([row("layer/qwen3-8b/r64/a1/s8", OURS, [60.0], "us")])
