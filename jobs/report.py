"""What a finished run shows a person: a table in the terminal and one plot. Numbers come from the run's own records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def print_table(result: Mapping[str, Any], console: Console | None = None) -> None:
    """The run's outcome, one line per thing."""
    table = Table(
        title=f"{result['name']}: {result['steps']} steps in {result['main_job_s']:.0f} s", title_justify="left"
    )
    table.add_column("what")
    table.add_column("value", justify="right")
    for name, value in table_rows(result):
        table.add_row(name, value)
    (console or Console()).print(table)


def table_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(what, value) pairs of the table."""
    before, after = result["eval_before"], result["eval_after"]
    rows = [
        ("held-out accuracy before", accuracy_text(before)),
        ("held-out accuracy after", accuracy_text(after)),
        ("gain", f"{100 * (after['accuracy'] - before['accuracy']):+.1f} points"),
        ("well-formed answers before / after", f"{100 * before['well_formed']:.0f} % / {100 * after['well_formed']:.0f} %"),
        ("rollout speed", f"{result['rollout_tok_s']:.0f} tokens/s"),
        ("one step: generate + train + publish", " + ".join(f"{result[k]:.2f}" for k in ("generate_s", "train_s", "publish_s")) + " s"),
        (f"engine against trainer ({result['activations']}, {result['dtype']})", f"mean |dlogp| {result['mismatch_mean']:.1e}, max {result['mismatch_max']:.1e}"),
        ("adapter versions published", str(result["versions_published"])),
        ("copies of the base in memory", f"{result['base_copies']:.2f} (mapped by {result['base_mappings']} processes, read-only: {'yes' if result['base_read_only'] else 'NO'})"),
        ("base checksum before and after", "equal" if result["checksum_equal"] else "DIFFERENT"),
        ("peak memory of all processes", f"{result['peak_rss_gb']:.2f} GB"),
    ]  # fmt: skip
    for tenant in result.get("tenants", []):
        label = f"tenant {tenant['name']} ({tenant['model']})"
        if tenant.get("accuracy_base") is not None:
            rows.append(
                (
                    f"{label}: accuracy base -> adapter",
                    f"{100 * tenant['accuracy_base']:.1f} % -> {100 * tenant['accuracy_adapter']:.1f} %",
                )
            )
        for phase in ("rl_off", "rl_on"):
            if phase in tenant:
                seen = tenant[phase]
                rows.append((
                    f"{label}: {phase.replace('_', ' ')}, {seen['answers']} answers",
                    f"TTFT p50 {seen['ttft_ms_p50']:.0f} p99 {seen['ttft_ms_p99']:.0f} ms, per token p50 {seen['tpot_ms_p50']:.1f} p99 {seen['tpot_ms_p99']:.1f} ms",
                ))  # fmt: skip
    if "mixed_steps" in result:
        rows.append(("engine steps with tenants and rollouts together", str(result["mixed_steps"])))
    if "answers_equal" in result:
        rows.append(("tenants' greedy answers against isolation", f"{result['answers_equal']} equal, {result['answers_near_tie']} differ at a near-tie, {result['answers_wrong']} wrong"))  # fmt: skip
    return rows


def accuracy_text(evaluation: Mapping[str, float]) -> str:
    """A share with its 95 % interval, in per cent."""
    return f"{100 * evaluation['accuracy']:.1f} % [{100 * evaluation['ci_low']:.1f}, {100 * evaluation['ci_high']:.1f}]"


def plot(metrics: Sequence[Mapping[str, float]], result: Mapping[str, Any], path: Path) -> None:
    """Learning, mismatch, where a step's time goes and tenants' latency, as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [m["step"] for m in metrics]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    learning, mismatch, timing, latency = axes.flat

    learning.plot(steps, [100 * m["rollout/accuracy"] for m in metrics], label="rollouts (train problems, sampled)")
    for key, x in (("eval_before", 0), ("eval_after", steps[-1])):
        seen = result[key]
        learning.errorbar(
            [x], [100 * seen["accuracy"]], fmt="o", capsize=4, color="tab:red",
            yerr=[[100 * (seen["accuracy"] - seen["ci_low"])], [100 * (seen["ci_high"] - seen["accuracy"])]],
            label="held-out, greedy, 95 % interval" if x == 0 else None,
        )  # fmt: skip
    learning.set(title="Accuracy", xlabel="optimizer step", ylabel="%", ylim=(0, 100))
    learning.legend(loc="lower right")

    mismatch.semilogy(steps, [m["mismatch/mean_abs_dlogp"] for m in metrics], label="mean")
    mismatch.semilogy(steps, [m["mismatch/max_abs_dlogp"] for m in metrics], label="max")
    mismatch.set(
        title=f"|log p engine - log p trainer| ({result['activations']}, {result['dtype']})", xlabel="optimizer step"
    )
    mismatch.legend()

    parts = [("generate", "time/generate_s"), ("train", "time/train_s"), ("publish", "time/publish_s")]
    timing.stackplot(steps, [[m[key] for m in metrics] for _, key in parts], labels=[name for name, _ in parts])
    timing.set(title="Seconds per step", xlabel="optimizer step", ylabel="s")
    timing.legend(loc="upper right")

    _plot_latency(latency, result)
    figure.suptitle(f"{result['name']}: one FP8 base, RL and {len(result.get('tenants', []))} tenants at once")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _plot_latency(axis: Any, result: Mapping[str, Any]) -> None:
    tenants = [t for t in result.get("tenants", []) if "rl_on" in t and "rl_off" in t]
    if not tenants:
        axis.text(0.5, 0.5, "no tenants in this run", ha="center", va="center")
        axis.set_axis_off()
        return
    width = 0.2
    bars = [("rl_off", "ttft_ms_p50", "TTFT p50, RL off"), ("rl_on", "ttft_ms_p50", "TTFT p50, RL on"),
            ("rl_off", "ttft_ms_p99", "TTFT p99, RL off"), ("rl_on", "ttft_ms_p99", "TTFT p99, RL on")]  # fmt: skip
    for i, (phase, key, label) in enumerate(bars):
        axis.bar(
            [x + (i - 1.5) * width for x in range(len(tenants))], [t[phase][key] for t in tenants], width, label=label
        )
    axis.set_xticks(range(len(tenants)), [t["name"] for t in tenants])
    axis.set(title="Tenants' time to first token", ylabel="ms")
    axis.set_ylim(0, 1.4 * axis.get_ylim()[1])  # room for the legend
    axis.legend(loc="upper right", ncols=2)
