"""Checks of the GPU path without pytest: python -m tests.gpu [--device cpu] [--seconds 60] [NAME ...]"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from swiftllm.files import save_result
from tests.gpu import operations, random_load, tokens

Check = Callable[[torch.device], None]
OK, FAILED = "ok", "FAILED"


def checks(seconds: float) -> dict[str, Check]:
    return {
        "rows": operations.check_rows,
        "blocks": operations.check_blocks,
        "int8-blocks": operations.check_int8_blocks,
        "contexts": operations.check_contexts,
        "prefill-attention": operations.check_prefill_attention,
        "decode-attention": operations.check_decode_attention,
        "quantised": operations.check_quantised_linear,
        "library": operations.check_library,
        "sort-pairs": operations.check_sort_pairs,
        "experts": operations.check_experts,
        "sampling": operations.check_sampling,
        "states": operations.check_states,
        "graphs": tokens.check_graphs,
        "tokens-float32": tokens.check_tokens_float32,
        "tokens-float16": tokens.check_tokens_float16,
        "tokens-windows": tokens.check_tokens_windows,
        "tokens-linear": tokens.check_tokens_linear,
        "tokens-gpt-oss": tokens.check_tokens_gpt_oss,
        "tokens-4-bit": tokens.check_tokens_4_bit,
        "tokens-int8": tokens.check_tokens_int8,
        "tokens-prefixes": tokens.check_tokens_prefixes,
        "tokens-eager": tokens.check_eager_tokens,
        "tokens-streamed": tokens.check_streamed_tokens,
        "random-load": partial(random_load.check_random_load, seconds=seconds),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the GPU path on this machine's GPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(checks(0))}; by default all")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu checks the checks themselves")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long random load lasts; 600 for a full check")
    parser.add_argument("--results", type=Path, help="add result and seconds of each check to this JSON file")
    options = parser.parse_args()
    known = checks(options.seconds)
    if unknown := set(options.names) - known.keys():
        parser.error(f"no check is called {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    torch.set_num_threads(1)
    results = json.loads(options.results.read_text()) if options.results and options.results.exists() else {}
    failed = 0
    for name in options.names or known:
        start_s = time.monotonic()
        result = judge(known[name], torch.device(options.device))
        results[name] = {"result": result, "seconds": time.monotonic() - start_s}
        print(f"{result}: {name}, {results[name]['seconds']:.1f} s", flush=True)
        failed += result == FAILED
        if options.results:
            save_result(options.results, json.dumps(results, indent=1) + "\n")
    return 1 if failed else 0


def judge(check: Check, device: torch.device) -> str:
    """How a check ends: well, failed, or with what this machine lacks for it."""
    try:
        check(device)
    except operations.NotHere as lacking:
        return f"needs {lacking}"
    except Exception:
        traceback.print_exc()
        return FAILED
    return OK


if __name__ == "__main__":
    sys.exit(main())
