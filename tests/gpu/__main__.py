"""Checks of the GPU path without pytest: python -m tests.gpu [--device cpu] [--seconds 60] [NAME ...]"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

import torch

from tests.gpu import operations, random_load, tokens

Check = Callable[[torch.device], None]


def checks(seconds: float) -> dict[str, Check]:
    return {
        "rows": operations.check_rows,
        "blocks": operations.check_blocks,
        "prefill-attention": operations.check_prefill_attention,
        "decode-attention": operations.check_decode_attention,
        "quantised": operations.check_quantised_linear,
        "library": operations.check_library,
        "sampling": operations.check_sampling,
        "graphs": tokens.check_graphs,
        "tokens-float32": tokens.check_tokens_float32,
        "tokens-float16": tokens.check_tokens_float16,
        "tokens-windows": tokens.check_tokens_windows,
        "tokens-gpt-oss": tokens.check_tokens_gpt_oss,
        "tokens-eager": tokens.check_eager_tokens,
        "tokens-streamed": tokens.check_streamed_tokens,
        "random-load": partial(random_load.check_random_load, seconds=seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the GPU path on this machine's GPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(checks(0))}; by default all")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu checks the checks themselves")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long random load lasts; 600 for a full check")
    options = parser.parse_args()
    known = checks(options.seconds)
    if unknown := set(options.names) - known.keys():
        parser.error(f"no check is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    torch.set_num_threads(1)
    failed = 0
    for name in options.names or known:
        start_s = time.monotonic()
        try:
            known[name](torch.device(options.device))
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"FAILED {name}", flush=True)
        else:
            print(f"ok     {name}, {time.monotonic() - start_s:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
