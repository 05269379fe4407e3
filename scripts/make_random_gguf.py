"""Write a random-weight GGUF of the shape of a known model, to measure speed without a download.

.venv/bin/python scripts/make_random_gguf.py llama-1b Q4_0 /tmp/llama-1b-q4_0.gguf
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backends.arch import RopeScaling
from tests.models import tiny_arch, write_gguf

SHAPES = {
    "llama-1b": tiny_arch(
        "llama", num_layers=16, d_model=2048, d_ff=8192, num_heads=32, num_kv_heads=8, head_dim=64, vocab_size=128256,
        context_length=131072, rope_theta=500000.0, tied_embeddings=True,
        rope_scaling=RopeScaling("llama3", 32.0, original_context=8192),
    ),
    "qwen3-0.6b": tiny_arch(
        "qwen3", num_layers=28, d_model=1024, d_ff=3072, num_heads=16, num_kv_heads=8, head_dim=128, vocab_size=151936,
        context_length=40960, rope_theta=1000000.0, tied_embeddings=True, norm_eps=1e-6,
    ),
    "qwen2-7b": tiny_arch(
        "qwen2", num_layers=28, d_model=3584, d_ff=18944, num_heads=28, num_kv_heads=4, head_dim=128, vocab_size=152064,
        context_length=32768, rope_theta=1000000.0, norm_eps=1e-6,
    ),
    "gemma3-1b": tiny_arch(
        "gemma3", num_layers=26, d_model=1152, d_ff=6912, num_heads=4, num_kv_heads=1, head_dim=256, vocab_size=262144,
        context_length=32768, window=512, norm_eps=1e-6,
    ),
    "smollm2-135m": tiny_arch(
        "llama", num_layers=30, d_model=576, d_ff=1536, num_heads=9, num_kv_heads=3, head_dim=64, vocab_size=49152,
        context_length=8192, rope_theta=100000.0, tied_embeddings=True,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a random-weight GGUF of a known model's shape.")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("quant", help="F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q6_K, Q4_K_M, Q5_K_M")
    parser.add_argument("path", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_gguf(args.path, SHAPES[args.shape], args.quant, args.seed)
    print(f"{args.path}: {args.path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
