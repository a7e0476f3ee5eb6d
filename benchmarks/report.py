"""Turn results files into Markdown tables (and plots): the only place numbers in prose may come from.

    python -m benchmarks.report benchmarks/results/kernels_h200.json            # tables to the terminal
    python -m benchmarks.report benchmarks/results/kernels_h200.json --out report/   # report.md and one PNG a case

Medians with 20th and 80th percentiles. "of floor" divides the time in which the bytes of weights and distinct adapters can
be read (a row's `floor_us`) by the row's time. "over base" and "over vLLM" divide by the vendor GEMM without an adapter and by the
fastest of vLLM's LoRA rows, in the same run. Failures keep their reason; losses stay in.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
from typing import Any

from benchmarks.kernels.summary import VLLM_BASE, VLLM_LORA_PREFIX
from benchmarks.serving.tables import is_serving, online_lines, serving_table

Row = dict[str, Any]


def percentile(samples: list[float], fraction: float) -> float:
    """Linear-interpolation percentile of unsorted samples. Raises ValueError for no samples."""
    if not samples:
        raise ValueError("percentile: no samples")
    ordered = sorted(samples)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def groups(rows: list[Row]) -> dict[tuple[str, str, int], list[Row]]:
    """Rows by (run, case, M), newest run last, order of first appearance."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row["run_id"], row["case"], row["M"]), []).append(row)
    return found


def ratio(value: float, others: list[float]) -> str:
    """`value` over the smallest of `others`, a dash where there is none."""
    return f"{value / min(others):.3f}" if others else "-"


def case_table(rows: list[Row]) -> str:
    """Markdown table of one case: every provider of one run at one M."""
    good = [r for r in rows if r["unit"] == "us" and r.get("samples_us")]
    base = [statistics.median(r["samples_us"]) for r in good if r["provider"] == VLLM_BASE]
    vllm = [statistics.median(r["samples_us"]) for r in good if r["provider"].startswith(VLLM_LORA_PREFIX)]
    lines = [
        "| provider | median us | p20 | p80 | over base | over vLLM | of floor |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        samples = row.get(f"samples_{row['unit']}") or []
        if not samples:
            lines.append(f"| {row['provider']} | failed: {row.get('failure', 'no samples')} | | | | | |")
            continue
        middle = statistics.median(samples)
        floor = f"{row['floor_us'] / middle:.0%}" if row.get("floor_us") and row["unit"] == "us" else "-"
        cells = [f"{middle:.1f}", f"{percentile(samples, 0.2):.1f}", f"{percentile(samples, 0.8):.1f}"]
        cells += [ratio(middle, base), ratio(middle, vllm), floor]
        lines.append(f"| {row['provider']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def markdown(results: dict[str, Any], name: str) -> str:
    """The whole report of one results file."""
    versions = ", ".join(f"{k} {v}" for k, v in results.get("versions", {}).items())
    lines = [
        f"# {name}",
        "",
        f"{results.get('gpu', 'unknown GPU')}; {versions}; commit {results.get('commit', 'unknown')[:12]}",
        "",
    ]
    summary = results.get("summary", {})
    if summary:
        lines += ["| figure | value |", "|---|---:|"]
        lines += [f"| {k} | {'not measured' if v is None else v} |" for k, v in summary.items()] + [""]
    for (run, case, M), rows in groups(results["rows"]).items():
        if is_serving(rows):
            lines += [f"## {case}, batch {M} (run {run})", "", serving_table(rows), ""]
        else:
            lines += [f"## {case}, {M} tokens (run {run})", "", case_table(rows), ""]
    lines += online_lines(results["rows"])
    return "\n".join(lines)


def plot(rows: list[Row], title: str, path: pathlib.Path) -> None:
    """Horizontal bars of the medians with p20 to p80, and the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [r for r in rows if r["unit"] == "us" and r.get("samples_us")]
    middles = [statistics.median(r["samples_us"]) for r in good]
    spread = [
        [m - percentile(r["samples_us"], 0.2) for r, m in zip(good, middles, strict=True)],
        [percentile(r["samples_us"], 0.8) - m for r, m in zip(good, middles, strict=True)],
    ]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(good) + 1.2))
    colors = ["tab:green" if r["provider"].startswith("epilora") else "tab:gray" for r in good]
    axes.barh([r["provider"] for r in good], middles, xerr=spread, color=colors)
    floors = [r["floor_us"] for r in good if r.get("floor_us")]
    if floors:
        axes.axvline(floors[0], linestyle="--", color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("us a layer")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=pathlib.Path, nargs="+")
    parser.add_argument("--out", type=pathlib.Path, help="folder for report.md and plots; default: print the tables")
    args = parser.parse_args()
    texts = []
    for path in args.results:
        results = json.loads(path.read_text())
        if "rows" not in results:
            raise SystemExit(f"{path}: no rows; give a results file written by a benchmark program")
        texts.append(markdown(results, path.stem))
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            for (run, case, M), rows in groups(results["rows"]).items():
                if any(r["unit"] == "us" and r.get("samples_us") for r in rows):
                    plot(rows, f"{case}, {M} tokens", args.out / f"{path.stem}_{case.replace('/', '_')}_M{M}_{run}.png")
    if args.out:
        (args.out / "report.md").write_text("\n".join(texts))
    else:
        print("\n".join(texts))


if __name__ == "__main__":
    main()
