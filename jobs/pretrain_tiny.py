"""Make the tiny arithmetic model from a seed (about 900 steps, some minutes on one core).

    python -m jobs.pretrain_tiny --out epilora/models/tiny-arith

The model the package ships was made with the defaults. How its headroom came about is told in
epilora/models/pretrain.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from epilora.models.pretrain import PretrainConfig, pretrain, save_model


def main() -> None:
    default = PretrainConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--habit-rate", type=float, default=default.habit_rate, help="share of habitual answers")
    args = parser.parse_args()
    model, losses = pretrain(PretrainConfig(seed=args.seed, steps=args.steps, habit_rate=args.habit_rate))
    args.out.mkdir(parents=True, exist_ok=True)
    save_model(model, args.out)
    print(f"{args.steps} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per answer token; wrote {args.out}")


if __name__ == "__main__":
    main()
