"""The planner: phases, bundles, what can run it, refusals, and the command that shows it."""

from __future__ import annotations

import itertools

import pytest

from epilora import planner, sizing
from epilora.config import load_config
from epilora.config.schema import JobConfig, Placement
from epilora.errors import MemoryInfeasible
from epilora.gpus import GPU_TYPES
from epilora.model_facts import ModelFacts, facts_of, read_facts
from jobs import plan as plan_command

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 32, "tie_word_embeddings": True,
}  # fmt: skip
GPU = (
    "engine.num_gpus=0.5", "trainer.num_gpus=0.5", "engine.dtype=bfloat16", "trainer.dtype=bfloat16",
    "trainer.checkpoint_activations=true", "trainer.micro_batch_tokens=2048", "trainer.logprob_chunk=256",
)  # fmt: skip


def config(*overrides: str) -> JobConfig:
    return load_config(None, ["engine.model_path=m", "task.path=a:b", *overrides])


@pytest.fixture
def big() -> ModelFacts:
    return read_facts("/nowhere", "qwen3-8b")


def line(plan: planner.Plan, words: str) -> planner.MemoryLine:
    found = [one for one in plan.memory if words in one.what]
    assert len(found) == 1, (words, [one.what for one in plan.memory])
    return found[0]


def test_cpu_plan_adds_up_and_refuses_with_the_sum() -> None:
    facts = facts_of(TINY)
    plan = planner.plan(config("trainer.placement=shared_kv_kept"), facts, available_bytes=8 * planner.GIB)
    assert plan.training_bytes == sum(one.count_bytes for one in plan.memory if one.training)
    assert plan.total_bytes == max(plan.training_bytes, plan.rollout_bytes)
    assert plan.bundle == {"CPU": 1.0}
    assert line(plan, "codes").count_bytes == 2 * (2 * 96 * 96 + 2 * 32 * 96 + 3 * 288 * 96)
    with pytest.raises(MemoryInfeasible, match=r"(?s)sum.*available.*1024\.0"):
        planner.plan(config(), facts, available_bytes=1 * planner.GIB)


def test_cpu_refuses_a_base_of_the_trainers_own() -> None:
    with pytest.raises(ValueError, match="own_bf16 needs a GPU"):
        planner.plan(config("trainer.placement=own_bf16"), facts_of(TINY))


def test_gpu_plan_names_what_fits_and_why_the_rest_does_not(big: ModelFacts) -> None:
    plan = planner.plan(config(*GPU, "engine.kv_cache_mib=40000", "trainer.placement=shared_kv_kept"), big)
    assert plan.accelerators == ("H100", "GH200", "H200", "RTX-PRO-6000", "B200")
    assert plan.refusals["L40S"].endswith("42.7 GiB usable")
    assert plan.refusals["A100"] == "sm_80 computes 16bit, the base is fp8"
    assert plan.labels == {"ray.io/accelerator-type": "in(H100,GH200,H200,RTX-PRO-6000,B200)"}
    with pytest.raises(MemoryInfeasible, match=r"(?s)no known GPU.*cannot run on B200: .* GiB needed in training"):
        planner.plan(config(*GPU, "engine.kv_cache_mib=900000", "trainer.placement=shared_kv_kept"), big)


def test_the_configurations_order_is_the_preference_and_typing_errors_are_seen(big: ModelFacts) -> None:
    plan = planner.plan(config(*GPU, "engine.accelerator_types=[H200,L40S,H10]"), big)
    assert plan.accelerators == ("H200", "L40S")
    assert "unknown accelerator type" in plan.refusals["H10"]
    assert "not among" in plan.refusals["H100"]


def test_placements_differ_by_exactly_their_copies(big: ModelFacts) -> None:
    fp8 = sizing.base_bytes(big, "fp8", 2)
    bf16 = sizing.base_bytes(big, "16bit", 2)
    assert bf16 == 2 * big.parameters
    plans = {p: planner.plan(config(*GPU, f"trainer.placement={p.value}"), big) for p in Placement}
    shared, kept = plans[Placement.shared_kv_released], plans[Placement.shared_kv_kept]
    kv = 64 * planner.MIB
    assert kept.training_bytes - shared.training_bytes == kv
    assert kept.rollout_bytes == shared.rollout_bytes
    for placement, copy in ((Placement.own_fp8, fp8), (Placement.own_bf16, bf16)):
        assert plans[placement].rollout_bytes - kept.rollout_bytes == copy
        assert plans[placement].training_bytes - kept.training_bytes == copy
        assert plans[placement].host_bytes == 0
    for placement, copy in ((Placement.own_fp8_offloaded, fp8), (Placement.own_bf16_offloaded, bf16)):
        assert plans[placement].rollout_bytes == shared.rollout_bytes
        assert plans[placement].training_bytes - shared.training_bytes == copy
        assert plans[placement].host_bytes == copy


def test_one_bf16_copy_and_two(big: ModelFacts) -> None:
    bf16 = sizing.base_bytes(big, "16bit", 2)
    one = planner.plan(config(*GPU, "engine.quantization=none"), big)
    two = planner.plan(config(*GPU, "engine.quantization=none", "trainer.placement=own_bf16"), big)
    codes = line(one, "base: bfloat16").count_bytes + line(one, "embeddings").count_bytes
    assert codes == bf16
    assert two.rollout_bytes - one.rollout_bytes == bf16
    assert "A100" in one.accelerators
    with pytest.raises(ValueError, match=r"copies the engine's FP8 codes, but engine\.quantization=none"):
        planner.plan(config(*GPU, "engine.quantization=none", "trainer.placement=own_fp8"), big)


def test_precision_follows_from_the_gpu(big: ModelFacts) -> None:
    nvfp4 = planner.plan(config(*GPU, "engine.quantization=modelopt_fp4"), big)
    assert nvfp4.accelerators == ("RTX-PRO-6000", "B200")
    paths = {c.gpu.label: c.kernel_path for c in planner.plan(config(*GPU, "engine.activations=w8a8"), big).candidates}
    assert paths["L40S"] == "FP8 W8A8: fused K1+K2"
    assert "dependent-launch" in paths["H200"]
    assert "hybrid" in paths["H200"]
    matched = planner.plan(config(*GPU, "engine.activations=w8a16"), big)
    assert {c.gpu.label: c.kernel_path for c in matched.candidates}["L40S"].startswith("W8A16: fused")


def test_a_type_may_have_a_format_and_a_cache_of_its_own(big: ModelFacts) -> None:
    own = "engine.by_accelerator={RTX-PRO-6000: {quantization: modelopt_fp4}, A100: {quantization: none}, H200: {kv_cache_mib: 100000}}"
    plan = planner.plan(config(*GPU, own, "engine.activations=w8a8"), big)
    by_label = {candidate.gpu.label: candidate for candidate in plan.candidates}
    assert by_label["RTX-PRO-6000"].engine.quantization == "modelopt_fp4"
    assert by_label["RTX-PRO-6000"].kernel_path.startswith("NVFP4")
    assert by_label["H100"].engine.quantization == "fp8_per_channel"
    assert by_label["A100"].kernel_path.startswith("stock 16-bit")  # without its own format the A100 is refused
    assert by_label["H200"].total_bytes - by_label["H100"].total_bytes > 90_000 * planner.MIB
    assert by_label["H100"].total_bytes - by_label["RTX-PRO-6000"].total_bytes > big.linear_parameters // 3
    with pytest.raises(ValueError, match="copies the engine's FP8 codes"):
        planner.plan(config(*GPU, own, "trainer.placement=own_fp8"), big)


def test_one_gpu_is_halved_and_a_pair_goes_to_the_engine(big: ModelFacts) -> None:
    one = planner.plan(config(*GPU), big)
    assert one.bundle == {"GPU": 1.0, "CPU": 2.0}
    assert (one.engine_options["num_gpus"], one.trainer_options["num_gpus"]) == (0.5, 0.5)
    pair = planner.plan(config(*GPU, "engine.tensor_parallel=2"), big)
    assert pair.bundle == {"GPU": 2.0, "CPU": 2.0, "nvlink_pair": 1.0}
    assert (pair.engine_options["num_gpus"], pair.trainer_options["num_gpus"]) == (2.0, 0)
    assert line(pair, "codes").count_bytes * 2 == line(one, "codes").count_bytes
    waits = planner.plan(config(*GPU, "engine.tensor_parallel=2", "trainer.placement=own_bf16_offloaded"), big)
    assert waits.host_bytes == sizing.base_bytes(big, "16bit", 2)  # both ranks' halves, in one host's memory
    with pytest.raises(ValueError, match=r"tensor_parallel=3 does not divide"):
        planner.plan(config(*GPU, "engine.tensor_parallel=3"), big)


def test_27b_fits_48_gb_only_with_its_own_configuration() -> None:
    facts = read_facts("/nowhere", "qwen3.5-27b")
    default = planner.plan(load_config("configs/rl_27b.yaml"), facts)
    assert "L40S" in default.refusals
    assert {"H100", "H200"} <= set(default.accelerators)
    assert any("recurrent states" in note for note in default.notes)
    small = planner.plan(load_config("configs/rl_27b_l40s.yaml"), facts)
    assert small.accelerators[0] == "L40S"
    # Two bf16 copies of a 27B exceed an 80 GB GPU, as the paper says (Section 1).
    two = load_config("configs/rl_27b.yaml", ["engine.quantization=none", "trainer.placement=own_bf16"])
    assert "H100" in planner.plan(two, facts).refusals


def test_memory_grows_with_what_it_is_made_of(big: ModelFacts) -> None:
    base = planner.plan(config(*GPU), big)
    for change in ("engine.max_loras=16", "lora.rank=32 engine.max_lora_rank=32", "trainer.micro_batch_tokens=4096",
                   "trainer.checkpoint_activations=false", "engine.max_num_batched_tokens=32768"):  # fmt: skip
        more = planner.plan(config(*GPU, *change.split()), big)
        assert (more.training_bytes, more.rollout_bytes) > (base.training_bytes, base.rollout_bytes), change


def test_a_sequence_longer_than_a_micro_batch_counts(big: ModelFacts) -> None:
    short = planner.plan(config(*GPU, "trainer.micro_batch_tokens=2048", "engine.max_model_len=2048"), big)
    long = planner.plan(config(*GPU, "trainer.micro_batch_tokens=2048", "engine.max_model_len=4096"), big)
    assert line(long, "kept activations").count_bytes == 2 * line(short, "kept activations").count_bytes


def test_gpu_memories_are_ordered_as_their_names_promise() -> None:
    gib = {label: gpu.memory_bytes / planner.GIB for label, gpu in GPU_TYPES.items()}
    for small, large in itertools.pairwise(["L40S", "H100", "GH200", "H200", "B200"]):
        assert gib[small] < gib[large]


def test_the_command_plans_without_gpu_ray_or_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_command.main(["configs/rl_27b.yaml", "engine.max_loras=5"]) == 0
    shown = capsys.readouterr().out
    assert "5 x 466,911,232 x 2 B" in shown
    assert "42.7 GiB usable" in shown
    assert plan_command.main(["configs/rl_27b.yaml", "--placements"]) == 0
    table = capsys.readouterr().out
    assert "own_bf16_offloaded      fp8_per_channel" in table
    assert "not possible: trainer.placement=own_fp8 copies" in table
    assert plan_command.main(["configs/rl_27b.yaml", "engine.max_lora=5"]) == 1
    assert "max_lora" in capsys.readouterr().err
